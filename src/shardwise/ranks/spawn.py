"""Ranks as processes of this machine: started, joined in `torch.distributed`, given functions to run, and ended.

    results = spawn(fn, devices=4, args=(1, 2))       one result for each rank

    with Ranks(4) as ranks:                           the same ranks for many functions: torch is imported once
        first = ranks.run(fn, 1, 2)
        second = ranks.run(other)

The first rank that fails ends them all, and its error is raised here. Nothing is left running: ranks end with an error,
with an interrupt, and with this process, whichever way it goes.
"""

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from typing import Any

from shardwise import environment
from shardwise.errors import ShardwiseError
from shardwise.ranks import tensor_pickle
from shardwise.ranks.gpus import Gpus
from shardwise.ranks.lookout import LAST_WORD, LOST, STATUS_OF_LAST_WORD
from shardwise.ranks.pulse import SILENT, SILENT_SECONDS, Silence
from shardwise.ranks.rank_error import RankError, decode, encode
from shardwise.ranks.worker import Failure, serve
from shardwise.torch_private import TCPStore

# What ranks need, imported once for all of them. torch's optimizers load its compiler: 2 s of a core (torch 2.13).
_PRELOADED = ["shardwise.ranks.worker", "shardwise.engine.parallelize", "torch._dynamo"]
# How long the other ranks have, after one has failed, to say so themselves.
_GRACE_SECONDS = 5.0
# How often this process looks whether ranks live, and how much later than they themselves it names one.
_LOOK_SECONDS, _LATER_SECONDS = 1.0, 4.0
# More on each core would start, and then do nothing but take turns.
_MOST_ON_A_CORE = 64
# How a rank ends that would start ranks itself.
_STARTS_AGAIN_STATUS = 75


def spawn(
    fn: Callable[..., Any],
    devices: int = 4,
    args: Sequence[Any] = (),
    timeout_seconds: float | None = None,
    *,
    gpus: Gpus = "own",
) -> list[Any]:
    """Run `fn(*args)` on `devices` ranks, each a process, and return what each returned, in the order of the ranks.

    In `fn`, `torch.distributed` is ready: with NCCL if there is a GPU for each rank, else with gloo on CPUs. With
    `gpus="shared"` ranks share those that there are, over NCCL too: slow, and with the numbers of many GPUs. With
    `gpus="none"` they compute on CPUs. `fn`, its arguments and its results are pickled on the way.
    """
    with Ranks(devices, gpus=gpus) as ranks:
        return ranks.run(fn, *args, timeout_seconds=timeout_seconds)


class Ranks:
    """Processes that stay up from one function to the next. After a failure the next function gets new ones."""

    def __init__(
        self,
        devices: int,
        *,
        gpus: Gpus = "own",
        silent_seconds: float = SILENT_SECONDS,
        grace_seconds: float = _GRACE_SECONDS,
        variables: Mapping[str, str] | None = None,
        num_groups: int = 1,
    ) -> None:
        """Start the ranks. `variables` are set in their environment in addition to this process's; `num_groups` such
        groups share the cores of this machine.
        """
        if devices < 1:
            raise ShardwiseError(f"{devices} devices: at least 1 rank is needed", remedy="devices=2")
        most = _MOST_ON_A_CORE * environment.num_cores()
        if devices > most:
            raise ShardwiseError(
                f"{devices} ranks are too many for one machine with {environment.num_cores()} cores: each is a process,"
                f" and more than {_MOST_ON_A_CORE} on a core only take turns",
                remedy=f"devices={most} or fewer; or several machines: shardwise launch --help",
            )
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # A rank that is starting reads the script, and the script starts ranks again. The process that has started
            # this one says so, once for all ranks.
            sys.stdout.flush()
            os._exit(_STARTS_AGAIN_STATUS)
        self.devices, self.gpus, self._silent_seconds = devices, gpus, silent_seconds
        self._grace_seconds, self._variables, self._num_groups = grace_seconds, dict(variables or {}), num_groups
        self._silences: list[Silence] = []
        self._processes: list[Any] = []
        self._calls: list[Any] = []
        self._store: TCPStore | None = None

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        """The processes, by rank; none before the first function and after a failure."""
        return [process.pid for process in self._processes]

    def run(self, fn: Callable[..., Any], *args: Any, timeout_seconds: float | None = None) -> list[Any]:
        """Run `fn(*args)` on every rank and return what each returned."""
        try:
            call = tensor_pickle.dumps((fn, args))
        except Exception as error:
            raise ShardwiseError(
                f"{getattr(fn, '__qualname__', fn)} and its arguments cannot be sent to other processes: {error}",
                remedy="a function at the top level of a module, not a lambda or an inner function",
            ) from None
        try:
            if not self._processes:
                self._start()
            for calls in self._calls:
                with contextlib.suppress(OSError):  # One that is gone is noticed below, with the reason.
                    calls.send_bytes(call)
            return self._collect(None if timeout_seconds is None else time.monotonic() + timeout_seconds)
        except BaseException:
            self._kill()
            raise

    def check(self) -> None:
        """Raise if a rank has ended between two functions; then all of them end, as after any failure."""
        gone = next((rank for rank, process in enumerate(self._processes) if not process.is_alive()), None)
        if gone is not None:
            error = _death(gone, self._processes[gone].exitcode)
            self._kill()
            raise error

    def close(self) -> None:
        """End the ranks: gently first."""
        for calls in self._calls:
            calls.close()
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def _start(self) -> None:
        context = _context()
        # The listening socket is bound by us: to a port that the machine picks, and only for this machine.
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            self._store = TCPStore(
                "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        atexit.register(self._kill)
        with environment.threads_limited(environment.num_cores() // (self.devices * self._num_groups)):
            self._start_each(context, port, {**environment.all_variables(), **self._variables})

    def _start_each(self, context: Any, port: int, variables: dict[str, str]) -> None:
        assert self._store is not None, "ranks meet at a store"
        for rank in range(self.devices):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(rank, self.devices, port, variables, self.gpus, theirs, self._silent_seconds),
                name=f"shardwise-rank-{rank}",
            )
            self._calls.append(ours)
            self._begin(process)
            self._processes.append(process)
            self._silences.append(Silence(self._store, rank, self._silent_seconds + _LATER_SECONDS))
            theirs.close()

    def _begin(self, process: Any) -> None:
        """Start a rank. The fork server that it comes from may have been killed from outside."""
        try:
            process.start()
        except (EOFError, ConnectionError) as error:
            self._kill()
            raise ShardwiseError(
                f"the server that ranks are forked from has ended ({type(error).__name__}), perhaps out of memory",
                remedy="run it again: another is started then; dmesg says whether the system has ended it",
            ) from error

    def _collect(self, deadline: float | None) -> list[Any]:
        """Wait for every rank's report. After the first failure the others have a few seconds for theirs."""
        reports: dict[int, Any] = {}
        failures: list[Failure] = []
        while len(reports) < self.devices:
            waiting = [rank for rank in range(self.devices) if rank not in reports]
            ready = connection.wait(
                [self._calls[rank] for rank in waiting] + [self._processes[rank].sentinel for rank in waiting],
                _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())),
            )
            if not ready and (deadline is None or time.monotonic() < deadline):
                self._look_at(waiting)
                continue
            if not ready and not failures:
                named = ("rank " if len(waiting) == 1 else "ranks ") + ", ".join(map(str, waiting))
                problem = f"{named} of {self.devices} had not returned when the time was up"
                raise RankError(problem, remedy="a larger timeout_seconds", rank=waiting[0])
            if not ready:
                break
            for rank in waiting:
                if self._calls[rank] in ready or self._processes[rank].sentinel in ready:
                    reports[rank] = self._read(rank)
            failures = [report for report in reports.values() if isinstance(report, Failure)]
            if failures:
                # From one that the others call missing, no word may come; if it only raised, it comes at once.
                missing = {failure.error.rank for failure in failures if failure.follows}
                only_missing = missing.issuperset(set(waiting) - set(reports))
                grace = time.monotonic() + self._grace_seconds / (5 if only_missing else 1)
                deadline = min(deadline or grace, grace)
        if failures:
            # The earliest that does not look like the consequence of another.
            raise min(failures, key=lambda failure: (failure.follows, failure.when)).error
        return [reports[rank][0] for rank in range(self.devices)]

    def _read(self, rank: int) -> Any:
        """Return a rank's report; if it ended without one, how it ended."""
        with contextlib.suppress(EOFError, OSError):
            # Not simply read to its end: what a dead rank has started may hold the other end of the pipe open.
            if self._calls[rank].poll():
                report = pickle.loads(self._calls[rank].recv_bytes())
                if isinstance(report, Failure) and not report.follows:
                    # It may have been in code of its own, where no watch has seen it.
                    self._tell_the_others(report.error)
                return report
        self._processes[rank].join()
        _end(self._processes[rank])
        status = self._processes[rank].exitcode
        if status == _STARTS_AGAIN_STATUS:
            raise ShardwiseError(
                "the script starts ranks whenever it is imported, and every rank imports it",
                remedy='if __name__ == "__main__": before what starts them',
            )
        told = self._find_told(status)
        if told is not None:
            return Failure(error=told, when=time.monotonic(), follows=True)
        error = _death(rank, status)
        self._tell_the_others(error)
        return Failure(error=error, when=time.monotonic(), follows=False)

    def _look_at(self, ranks: Sequence[int]) -> None:
        """Name a rank that is silent, if the others have not: all of them may be."""
        for rank in ranks:
            if self._silences[rank].is_too_long():
                raise self._silences[rank].error()

    def _find_told(self, status: int | None) -> RankError | None:
        """Return why a rank has ended, if another caused it: its own report, or that another is silent."""
        assert self._store is not None, "ranks without a store"
        keys = [LAST_WORD, SILENT] if status == STATUS_OF_LAST_WORD else [SILENT]
        return next((decode(self._store.get(key)) for key in keys if self._store.check([key])), None)

    def _tell_the_others(self, error: RankError) -> None:
        assert self._store is not None, "ranks without a store"
        if not self._store.check([LOST]):
            self._store.set(LOST, encode(error))

    def _kill(self) -> None:
        """End every rank at once, and whatever it has started."""
        for process in self._processes:
            _end(process)
        for process in self._processes:
            process.join()
            process.close()
        for calls in self._calls:
            calls.close()
        self._processes, self._calls, self._silences, self._store = [], [], [], None
        atexit.unregister(self._kill)


def _context() -> Any:
    """Return how processes are started: on Linux from a server that has imported torch, otherwise each from scratch.

    Started so, 4 ranks are up 0.1 to 0.4 s after the server; one from nothing costs 2 s of a core (torch 2.13).
    The server itself has one thread and has not touched a GPU, so it is safe to fork.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _end(process: Any) -> None:
    """End a rank and what it has started. It becomes a group only when it begins to run, and may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _death(rank: int, status: int | None) -> RankError:
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        remedy = "dmesg: on Linux that is what happens when memory runs out" if name == "SIGKILL" else None
        return RankError(f"rank {rank} was killed by {name} (signal {-status})", remedy=remedy, rank=rank)
    return RankError(f"rank {rank} exited with status {status} before it had returned", rank=rank)
