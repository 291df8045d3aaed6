"""The server that ranks are forked from, forked itself from the process that runs the tests.

`multiprocessing` starts it as a new Python, which imports torch and transformers again: 6 s of a core in each worker of
xdist. A worker has them, and every test that it collected. So it is forked, before the worker has run a test with
ranks, and only where no other thread could hold a lock at that moment.
"""

import os
import sys
import threading
import warnings
from collections.abc import Sequence
from multiprocessing import forkserver, util
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

_SPAWN = util.spawnv_passfds
#: This thread, and in a worker of xdist the one that reads what it is told.
_MOST_THREADS = 2


def start(preload: Sequence[str]) -> None:
    """Let the server run, with some modules imported. If it is up already, it stays as it is."""
    forkserver.set_forkserver_preload(list(preload))
    if threading.active_count() == 1 and len(list(Path("/proc/self/task").iterdir())) <= _MOST_THREADS:
        with mock.patch.object(util, "spawnv_passfds", _forked):
            forkserver.ensure_running()
    else:
        forkserver.ensure_running()


def _forked(_: Any, arguments: Sequence[str], passed: Sequence[int]) -> int:
    """Instead of a new Python with these arguments, of which the last is the program of the server."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # There is the thread of xdist.
        process = os.fork()
    return process or _serve(arguments[-1], passed)


def _serve(program: str, passed: Sequence[int]) -> NoReturn:
    try:
        _forget_tests(passed)
        _forget_server()
        exec(program, {"__name__": "rank_server"})
    finally:
        os._exit(0)


def _forget_server() -> None:
    """It was forked while its lock was held, and while servers were forked. What is forked from it may start one too:
    a script of a test that starts ranks."""
    forkserver._forkserver._lock = threading.Lock()  # type: ignore[attr-defined]
    util.spawnv_passfds = _SPAWN


def _forget_tests(passed: Sequence[int]) -> None:
    """Be as a new Python is: no open files but those passed, and nothing of pytest between a rank and its output."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for each in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208 - it names open files, which are no paths
        if each not in (0, 1, 2, nothing, *passed):
            # Not closed: whoever still has its number would close another file later.
            os.dup2(nothing, each)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False, buffering=1) for number in (1, 2))  # noqa: SIM115
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
