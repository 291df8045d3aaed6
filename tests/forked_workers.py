"""Workers of xdist that are forked from the process that tells them what to run.

As new Pythons each imports torch and transformers by itself: 12 s of a core, three times. Here that is done once, and
workers are forks. What they are told, and how, stays as it is: they read their program from a pipe, like any other.
"""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from execnet import gateway_io
from execnet.gateway_base import Popen2IO

from tests.deep_calls import with_room

#: What most tests import, by a few of each.
_IMPORTED_ONCE = (
    "tests.crowd",
    "tests.conformance.processes",
    "tests.serving.http.serving_here",
    "openai",
    "torch._dynamo",
    # By the first that compiles, in every process that does: 0.7 s of a core.
    "torch._inductor.pattern_matcher",
)


class Forked:
    """What `subprocess.Popen` would be of a worker, as far as it is asked."""

    def __init__(self, program: str) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            with_room(_work)(program, theirs_in, theirs_out, (ours_in, ours_out))
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # It has ended, and was waited for.
            os.kill(self.pid, signal.SIGKILL)


def _work(program: str, source: int, sink: int, others: Sequence[int]) -> NoReturn:
    status = 1
    try:
        for each in others:
            os.close(each)
        os.dup2(source, 0)
        os.dup2(sink, 1)
        os.close(source)
        os.close(sink)
        # As `python -u` has them: the program says when a line is out.
        sys.stdin, sys.stdout = open(0, closefd=False, buffering=1), open(1, "w", closefd=False, buffering=1)  # noqa: SIM115
        exec(program, {"__name__": "__main__"})
        atexit._run_exitfuncs()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        os._exit(status)


def _test_modules() -> list[str]:
    """All of them: where nothing is compiled yet, to read and compile them takes a worker 15 s of a core."""
    root = Path(__file__).parents[1]
    return [".".join(each.relative_to(root).with_suffix("").parts) for each in sorted(root.glob("tests/**/test_*.py"))]


def _find_constants() -> None:
    """Let Hypothesis read the constants of our sources, of which it tries some: where none were read yet, that takes
    3.5 s of a core, and each worker would do it."""
    with suppress(ImportError, AttributeError):  # It is its own affair, and may be elsewhere in another release.
        providers: Any = import_module("hypothesis.internal.conjecture.providers")
        providers._get_local_constants()


def _import_all() -> None:
    for each in (*_IMPORTED_ONCE, *_test_modules()):
        import_module(each)
    _find_constants()


def fork_workers() -> None:
    """Import what workers need, and let all of them be forks of this process from now on."""
    with_room(_import_all)()
    gc.freeze()  # It stays to the end, here and in workers: nobody looks through it.
    start = gateway_io.Popen2IOMaster.__init__

    def forked(self: gateway_io.Popen2IOMaster, args: list[str], execmodel: Any) -> None:
        if args[-1] != gateway_io.popen_bootstrapline or args[0] != sys.executable:
            start(self, args, execmodel)
            return
        self.popen = Forked(args[-1])
        Popen2IO.__init__(self, self.popen.stdin, self.popen.stdout, execmodel=execmodel)

    gateway_io.Popen2IOMaster.__init__ = forked  # type: ignore[method-assign]
