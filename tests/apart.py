"""Scripts run as a user runs them, each in a process of its own, that need not import torch each time.

The process is forked from the server that ranks are forked from too, which has imported it: two to seven seconds of a
core less for each script (torch 2.13, transformers 5).
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from shardwise.torch_private import TCPStore
from tests.crowd import import_once

#: In which test group such a test belongs: where the server is.
RANKS = "ranks"
_TORCHRUN = "torch.distributed.run"


def run_script(path: Path, *words: str, folder: Path, timeout_seconds: float = 600) -> subprocess.CompletedProcess[str]:
    """Run a script with some words after its name, and return what it wrote. Where it cannot be forked, start it anew.

    `folder` is where its output is kept until it ends.
    """
    if sys.platform != "linux":
        command = [sys.executable, str(path), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    return _forked(_run_path, str(path), words, folder / path.stem, timeout_seconds)


def run_torchrun(
    *words: str, folder: Path, variables: Mapping[str, str], timeout_seconds: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run `torchrun` with some words, with variables added to the environment. What it starts imports torch itself."""
    if sys.platform != "linux":
        command, changed = [sys.executable, "-m", _TORCHRUN, *words], {**os.environ, **variables}
        return subprocess.run(
            command, env=changed, capture_output=True, text=True, timeout=timeout_seconds, check=False
        )  # fmt: skip
    return _forked(partial(_run_torchrun, dict(variables)), _TORCHRUN, words, folder / "torchrun", timeout_seconds)


def run_ranks(
    *words: str, num_ranks: int, folder: Path, timeout_seconds: float = 600
) -> list[subprocess.CompletedProcess[str]]:
    """Run the command `shardwise` on ranks that are told what `torchrun` tells its own, without it."""
    return _as_ranks(_run_command, "shardwise", words, num_ranks, folder, timeout_seconds)


class Command:
    """The command `shardwise`, which goes on beside the test until it is interrupted."""

    def __init__(self, *words: str, folder: Path, variables: Mapping[str, str]) -> None:
        import_once()
        self._words, self._out, self._err = words, folder / "shardwise.out", folder / "shardwise.err"
        run = partial(_run_interruptible, dict(variables))
        self._process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(run, "shardwise", words, str(self._out), str(self._err))
        )
        self._process.start()

    @property
    def is_up(self) -> bool:
        return self._process.exitcode is None

    def interrupt(self) -> None:
        assert self._process.pid is not None, "it was started"
        os.kill(self._process.pid, signal.SIGINT)

    def finish(self, timeout_seconds: float) -> subprocess.CompletedProcess[str]:
        """Wait for its end. If it does not come, it is killed, and its status says so."""
        self._process.join(timeout_seconds)
        if self.is_up:
            self._process.kill()
            self._process.join()
        code = self._process.exitcode or 0
        return subprocess.CompletedProcess(self._words, code, self._out.read_text(), self._err.read_text())


def run_script_on_ranks(
    path: Path, *words: str, num_ranks: int, folder: Path, timeout_seconds: float = 600
) -> list[subprocess.CompletedProcess[str]]:
    """The same of a script."""
    return _as_ranks(_run_script, str(path), words, num_ranks, folder, timeout_seconds)


def _as_ranks(
    run: Callable[[Mapping[str, object], str], None],
    name: str,
    words: tuple[str, ...],
    num_ranks: int,
    folder: Path,
    timeout_seconds: float,
) -> list[subprocess.CompletedProcess[str]]:
    """In the store of `torchrun` ranks meet, and here they are forked from the server too."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared: dict[str, object] = {
        "TORCHELASTIC_RUN_ID": "forked",
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
    }
    shared |= {"MASTER_PORT": store.port, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_USE_AGENT_STORE": True}
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(
            pool.map(
                lambda rank: _forked(
                    partial(run, {**shared, "RANK": rank, "LOCAL_RANK": rank}),
                    name, words, folder / f"rank{rank}", timeout_seconds,
                ),
                range(num_ranks),
            )
        )  # fmt: skip


def _run_command(variables: Mapping[str, object], _: str) -> None:
    from shardwise.cli import main

    os.environ.update({name: str(value) for name, value in variables.items()})
    sys.exit(main(sys.argv[1:]))


def _run_interruptible(variables: Mapping[str, object], name: str) -> None:
    """As in a terminal, also where whoever started the tests has this signal ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _run_command(variables, name)


def _run_script(variables: Mapping[str, object], path: str) -> None:
    os.environ.update({name: str(value) for name, value in variables.items()})
    _run_path(path)


def _forked(
    run: Callable[[str], None], name: str, words: tuple[str, ...], output: Path, timeout_seconds: float
) -> subprocess.CompletedProcess[str]:
    import_once()
    out, err = output.with_suffix(".out"), output.with_suffix(".err")
    process = multiprocessing.get_context("forkserver").Process(
        target=_run, args=(run, name, words, str(out), str(err))
    )
    process.start()
    process.join(timeout_seconds)
    if process.exitcode is None:
        process.kill()
    process.join()
    return subprocess.CompletedProcess([name, *words], process.exitcode or 0, out.read_text(), err.read_text())


def _run(run: Callable[[str], None], name: str, words: tuple[str, ...], out: str, err: str) -> None:
    for path, number in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = [name, *words]
    run(name)


def _run_path(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


def _run_torchrun(variables: Mapping[str, str], name: str) -> None:
    os.environ.update(variables)
    runpy.run_module(name, run_name="__main__", alter_sys=True)
