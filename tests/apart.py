"""Scripts run as a user runs them, each in a process of its own, that need not import torch each time.

The process is forked from the server that ranks are forked from too, which has imported it: two to seven seconds of a
core less for each script (torch 2.13, transformers 5).
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
from pathlib import Path

from tests.crowd import import_once

#: In which test group such a test belongs: where the server is.
RANKS = "ranks"


def run_script(path: Path, *words: str, folder: Path, timeout_seconds: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a script with some words after its name, and return what it wrote. Where it cannot be forked, start it anew.

    `folder` is where its output is kept until it ends.
    """
    if sys.platform != "linux":
        command = [sys.executable, str(path), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    import_once()
    out, err = folder / f"{path.stem}.out", folder / f"{path.stem}.err"
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, args=(str(path), words, str(out), str(err))
    )
    process.start()
    process.join(timeout_seconds)
    if process.exitcode is None:
        process.kill()
    process.join()
    return subprocess.CompletedProcess([str(path), *words], process.exitcode or 0, out.read_text(), err.read_text())


def _run(path: str, words: tuple[str, ...], out: str, err: str) -> None:
    for name, number in ((out, 1), (err, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")
