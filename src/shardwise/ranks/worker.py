"""The main function of a process that `spawn` has started: join the other ranks, and run the functions it is sent.

It leads its own process group of the system, so that its children end with it; and it ends when the process that
started it ends, in whatever way. A process that `torchrun` has started only joins the others (`join_if_launched`).
"""

import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardwise import environment
from shardwise.errors import ShardwiseError
from shardwise.ranks import tensor_pickle
from shardwise.ranks.faults import store_of_faults
from shardwise.ranks.gpus import Gpus, check_one_each, find_gpus
from shardwise.ranks.pulse import Pulse
from shardwise.ranks.rank_error import RankError, describe_failure
from shardwise.ranks.roll_call import agree_on_attempt
from shardwise.ranks.shared_gpus import share_if_needed
from shardwise.torch_private import PrefixStore, TCPStore

#: How much later a rank under `torchrun` ends than the one whose failure it follows. It looks ten times a second.
_LATER_SECONDS = 0.5
#: How often a rank checks whether its agent is there.
_LOOK_SECONDS = 0.5
_TELL_WITHIN = timedelta(seconds=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A rank's error, as it is reported to the process that started it.

    `when` is by the machine's monotonic clock. `follows`: it looks like the consequence of another rank's error.
    """

    error: RankError
    when: float
    follows: bool


def serve(
    rank: int,
    num_ranks: int,
    port: int,
    variables: dict[str, str],
    gpus: Gpus,
    calls: "connection.Connection",  # type: ignore[type-arg, unused-ignore]
    silent_seconds: float,
) -> None:
    """Join the ranks; then run what comes over `calls` until it is closed, or until something fails.

    What goes back is one pickle for each call: a `Failure`, or the result in a tuple of one.
    """
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, name="shardwise-parent", daemon=True).start()
    environment.replace_all(variables)
    environment.keep_streams_apart()
    environment.leave_faults_to_watch()
    report: object = None
    try:
        _join(rank, num_ranks, port, gpus, silent_seconds)
        while not isinstance(report, Failure):
            call = calls.recv_bytes()
            report = _run(rank, call)
            calls.send_bytes(_pickled(rank, report))
    except (EOFError, ConnectionError):
        pass  # The other end was closed: there is nothing left to do.
    except Exception as error:
        calls.send_bytes(_pickled(rank, _failed(rank, error)))
    _end_group()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        _end_group()


def _end_group() -> None:
    """End this process and all that it started, at once: a data loader's workers have inherited its connections, and
    as long as one of them lives, the other ranks do not see that this one is gone."""
    os.killpg(0, signal.SIGKILL)


def _join(rank: int, num_ranks: int, port: int, gpus: Gpus, silent_seconds: float) -> None:
    torch.set_num_threads(environment.num_threads(environment.num_cores() // num_ranks))
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    backend = choose_backend(environment.device_of(rank), num_ranks, gpus)
    Pulse(store, rank, num_ranks, limit_seconds=silent_seconds)
    if gpus == "shared":
        share_if_needed(store, rank, num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)


def choose_backend(place: int, num_places: int, gpus: Gpus = "own") -> str:
    """Choose the backend of one launcher's processes: NCCL too if there is a GPU for each; then this one takes its own.

    If GPUs are `shared`, there may be fewer than processes.
    """
    num_gpus = torch.cuda.device_count() if dist.is_nccl_available() and torch.cuda.is_available() else 0
    if not num_gpus or gpus == "none" or (num_places > num_gpus and gpus == "own"):
        return "gloo"
    torch.cuda.set_device(place % num_gpus)
    return "cpu:gloo,cuda:nccl"


def join_if_launched() -> None:
    """Under `torchrun`, start `torch.distributed` if the script has not.

    `torchrun` keeps one store for all attempts at a run, and ranks write there where they listen. One that comes back
    after a failure could read where another one was before; so every attempt has names of its own in the store.
    """
    place = environment.place_under_torchrun()
    if place is None or not dist.is_available():
        return
    _tell_once(place[1])
    if dist.is_initialized():
        return
    gpus: Gpus = "shared" if environment.wants_shared_gpus() else "own"
    if gpus == "own":
        check_one_each(find_gpus(), place[1])
    _end_with_launcher()
    environment.keep_streams_apart()
    environment.leave_faults_to_watch()
    store, device, size = next(rendezvous("env://"))
    rank = environment.rank_on(device)
    environment.name_attempt(agree_on_attempt(store, rank, size))
    backend = choose_backend(*place, gpus)
    Pulse(store_of_faults(store), rank, size, tells=True)
    named = PrefixStore(f"attempt {environment.attempt_name()}", store)
    if gpus == "shared":
        share_if_needed(named, rank, size)
    dist.init_process_group(backend, store=named, rank=rank, world_size=size)


def _end_with_launcher() -> None:
    """End this process when its agent is gone, however that ended: nothing would restart it, and its replacements would
    collide with it."""
    if not environment.is_from_standby():  # Otherwise it ends with the process that stands for it.
        threading.Thread(target=_look_for, args=(os.getppid(),), name="shardwise-agent", daemon=True).start()


def _look_for(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def is_first_to_tell(what: str = "") -> bool:
    """Under `torchrun`, whether no other rank of this attempt has asked. If the store does not answer, each is
    first."""
    master = environment.find_master()
    assert master is not None, "only torchrun has such a store"
    try:
        store = TCPStore(*master, is_master=False, wait_for_workers=False, timeout=_TELL_WITHIN)
        return bool(store.add(f"shardwise/told in attempt {environment.attempt_name()}{what}", 1) == 1)
    except RuntimeError:
        return True


def _tell_once(num_here: int) -> None:
    """Let a rank that ends because another has failed report that in one line: the failed one says where.

    It waits a moment before it ends, so that `torchrun` sees the failed one end first, and reports it as the cause.
    """
    before = sys.excepthook
    if getattr(before, "tells_once", False):
        return

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        rank = environment.rank_under_torchrun()
        is_anothers = isinstance(error, RankError) and error.rank not in (None, rank)
        # A rank on another machine has reported it there.
        is_here = isinstance(error, RankError) and _machine_of(error.rank or 0, num_here) == _machine_of(rank, num_here)
        is_told = is_anothers and is_here
        if isinstance(error, ShardwiseError) and not isinstance(error, RankError):
            is_told = not is_first_to_tell(error.problem)  # A refusal that all ranks raise alike.
        if not is_told:
            before(kind, error, trace)
            return
        assert isinstance(error, ShardwiseError), "it was told as one"
        line = error.problem.partition("\n    Traceback")[0].rstrip()
        print(f"rank {rank} stops: {line}", file=sys.stderr, flush=True)
        time.sleep(_LATER_SECONDS)

    tell.tells_once = True  # type: ignore[attr-defined]
    sys.excepthook = tell


def _machine_of(rank: int, num_here: int) -> int:
    return environment.device_of(rank) // num_here


def _run(rank: int, call: bytes) -> object:
    try:
        try:
            fn, args = pickle.loads(call)
        except (AttributeError, ImportError) as error:
            raise ShardwiseError(
                f"the function for the ranks is not found in their processes: {error}",
                remedy="move it to a file that can be imported; an interactive session or a notebook cannot",
            ) from None
        return (fn(*args),)
    except BaseException as error:
        return _failed(rank, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _failed(rank: int, error: BaseException) -> Failure:
    when, follows = time.monotonic(), isinstance(error, RankError) or _is_broken_connection(error)
    told = error if isinstance(error, RankError) else describe_failure(rank, error)
    return Failure(error=told, when=when, follows=follows)


def _is_broken_connection(error: BaseException) -> bool:
    """Whether this is what torch raises when another rank has gone away."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("gloo" in text or "nccl" in text or "pair closure" in text)


def _pickled(rank: int, report: object) -> bytes:
    try:
        return tensor_pickle.dumps(report)
    except Exception as error:
        wrong: Any = ShardwiseError(
            f"what rank {rank} returned cannot be sent back: {error}", remedy="return plain values and tensors"
        )
        return pickle.dumps(_failed(rank, wrong))
