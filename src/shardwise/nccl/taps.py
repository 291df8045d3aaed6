"""Hooks in `torch.distributed`, at all operations of process groups, that record them while `recording` is active.

A process has no other way to communicate, whichever of our files calls it. Outside of `recording` no hook is installed.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.nccl.program import Operation, Transfer
from shardwise.nccl.recorder import RecordedWork, Recorder
from shardwise.nccl.touches import TouchMode
from shardwise.ranks import objects
from shardwise.ranks.backend_exchange import BackendExchange
from shardwise.torch_private import GET_BACKEND, GROUP_METHODS, GroupBackend, storage_id

#: Threads of ours that ask groups for nothing but to end.
_WATCH = "shardwise-watch"
_REDUCTIONS = ("sum", "max", "min", "product", "avg")

#: Puts something in the place of an attribute of a class or a module; it is given what was there.
Instead = Callable[[Any, str, Callable[[Any], Any]], None]


@contextmanager
def put_instead() -> Iterator[Instead]:
    """Replace attributes within the context."""
    with ExitStack() as stack:

        def instead(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            own = vars(owner).get(name)
            setattr(owner, name, make(getattr(owner, name)))
            stack.callback(delattr, owner, name) if own is None else stack.callback(setattr, owner, name, own)

        yield instead


@contextmanager
def recording(*, rehearses: bool = True, limit_seconds: float = 60.0) -> Iterator[Recorder]:
    """Record the operations of this process's groups within the context; accessed memory within `touching` only."""
    recorder = Recorder(rehearses=rehearses, limit_seconds=limit_seconds)
    with put_instead() as instead:
        for method, kind in GROUP_METHODS.items():
            if hasattr(dist.ProcessGroup, method):
                instead(dist.ProcessGroup, method, partial(_noted_collective, recorder, kind))
        for owner in (dist.ProcessGroup, GroupBackend):
            instead(owner, "send", partial(_noted_transfer, recorder, is_send=True))
            instead(owner, "recv", partial(_noted_transfer, recorder, is_send=False))
        instead(dist.ProcessGroup, GET_BACKEND, partial(_noted_backend, recorder))
        instead(dist, "new_group", partial(_noted_group, recorder))
        instead(dist, "all_gather_object", partial(_noted_objects, recorder))
        instead(objects, "gather", partial(_noted_objects, recorder))
        instead(dist, "batch_isend_irecv", partial(_noted_batch, recorder))
        instead(torch.UntypedStorage, "resize_", partial(_noted_resize, recorder))
        for name in ("_start_shards", "_start_all", "_start_gather"):
            instead(BackendExchange, name, partial(_noted_channel, recorder))
        yield recorder


def touching(recorder: Recorder) -> TouchMode:
    """Return a context in which the memory that operations read and write is recorded too."""
    return TouchMode(recorder.memories, recorder.sees_touches)


def _is_noted(recorder: Recorder, handle: Any) -> bool:
    if not recorder.listens() or recorder.number_of(handle) is None:
        return False
    return threading.current_thread().name != _WATCH


def _noted_collective(recorder: Recorder, kind: str, call: Any) -> Any:
    def noted(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_noted(recorder, group):
            return call(group, *args, **kwargs)
        number = recorder.number_of(group)
        assert number is not None, "it is known"
        operation, tensors = _described(recorder, kind, number, args, kwargs)
        place = recorder.issue(operation, tensors)
        recorder.agree(operation)
        with recorder.silent():
            held = [tensor for tensor, _ in tensors]
            return RecordedWork(recorder, [call(group, *args, **kwargs)], place, held)

    return noted


def _described(
    recorder: Recorder, kind: str, number: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Operation, list[tuple[Tensor, bool]]]:
    """Return an operation as a group receives it, and its tensors: True marks those that it writes."""
    flat = [each for one in args[:2] for each in _tensors_of(one)]
    first = flat[0] if flat else None
    fields: dict[str, Any] = {"kind": kind, "communicator": number, "on_host": recorder.is_on_host(number, first)}
    if first is None:
        return Operation(**fields), []
    given = flat[-1]
    fields |= {"count": given.numel(), "dtype": str(given.dtype).removeprefix("torch.")}
    if kind in ("all_gather", "reduce_scatter", "all_to_all"):
        output, given = args[0], args[1]
        # What is written is written last, where the two overlap.
        tensors = [(given, False), (output, True)]
        fields["count"] = given.numel()
        if kind == "all_to_all":
            fields |= _splits(output, given, args, len(recorder.members_of(number)))
    elif kind == "all_gather_list":
        tensors = [(given, False), *((each, True) for each in flat[:-1])]
    elif kind in ("gather", "scatter"):
        written, read = ([*_tensors_of(each)] for each in args[:2])
        tensors = [*((each, False) for each in read), *((each, True) for each in written)]
        fields["count"] = (read if kind == "gather" else written)[0].numel()  # Only the root has the others.
    else:
        tensors = [(each, True) for each in flat]
    fields["root"] = next((each.rootRank for each in (*args, *kwargs.values()) if hasattr(each, "rootRank")), None)
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        options = next((each for each in (*args, *kwargs.values()) if hasattr(each, "reduceOp")), None)
        operator = dist.ReduceOp.SUM if options is None else options.reduceOp
        known = (name for name in _REDUCTIONS if operator == getattr(dist.ReduceOp, name.upper()))
        fields["reduction"] = next(known, "another")
    return Operation(**fields), tensors


def _splits(output: Tensor, given: Tensor, args: Sequence[Any], size: int) -> dict[str, tuple[int, ...]]:
    """Return how many elements go to each member, and how many come from it."""

    def counts(tensor: Tensor, rows: Sequence[int]) -> tuple[int, ...]:
        width = prod(tensor.shape[1:])
        return tuple(each * width for each in rows) if rows else (tensor.numel() // size,) * size

    return {"received": counts(output, args[2]), "sent": counts(given, args[3])}


def _tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors_of(each)


def _noted_transfer(recorder: Recorder, call: Any, *, is_send: bool) -> Any:
    def noted(handle: Any, tensors: list[Tensor], peer: int, *rest: Any) -> Any:
        if not _is_noted(recorder, handle):
            return call(handle, tensors, peer, *rest)
        number = recorder.number_of(handle)
        assert number is not None, "it is known"
        on_host = recorder.is_on_host(number, tensors[0])
        tag = rest[0] if rest else 0
        transfer = _transfer(recorder, number, tensors[0], peer, is_send=is_send, tag=tag)
        operation = Operation(
            kind="send" if is_send else "receive", communicator=number, transfers=(transfer,), on_host=on_host
        )
        place = recorder.issue(operation, [(tensors[0], not is_send)])
        recorder.agree(operation)
        with recorder.silent():
            return RecordedWork(recorder, [call(handle, tensors, peer, *rest)], place)

    return noted


def _transfer(recorder: Recorder, number: int, tensor: Tensor, peer: int, *, is_send: bool, tag: int) -> Transfer:
    members = recorder.members_of(number)
    return Transfer(
        is_send=is_send,
        peer=members[peer],
        count=tensor.numel(),
        dtype=str(tensor.dtype).removeprefix("torch."),
        tag=tag,
    )


def _noted_batch(recorder: Recorder, call: Any) -> Any:
    """Sends and receives that NCCL begins together; gloo does so one by one, and that is not noted."""

    def noted(wanted: list[Any]) -> Any:
        number = recorder.number_of(wanted[0].group) if recorder.listens() else None
        if number is None:
            return call(wanted)
        transfers = [
            _transfer(recorder, number, each.tensor, each.group_peer, is_send=each.op is dist.isend, tag=each.tag)
            for each in wanted
        ]
        on_host = recorder.is_on_host(number, wanted[0].tensor)
        operation = Operation(kind="batch", communicator=number, transfers=tuple(transfers), on_host=on_host)
        place = recorder.issue(operation, [(each.tensor, each.op is not dist.isend) for each in wanted])
        recorder.agree(operation)
        with recorder.silent():
            return [RecordedWork(recorder, call(wanted), place)]

    return noted


def _noted_group(recorder: Recorder, call: Any) -> Any:
    def noted(
        ranks: list[int] | None = None, timeout: timedelta | None = None, backend: str | None = None, **rest: Any
    ) -> Any:
        members = list(range(dist.get_world_size())) if ranks is None else ranks
        number = recorder.make(members, "gloo" if backend == "gloo" else "nccl")
        if recorder.rehearses:
            backend, timeout = "gloo", recorder.limit
        with recorder.silent():
            handle = call(ranks, timeout=timeout, backend=backend, **rest)
        if dist.get_rank() in members:
            recorder.know_group(handle, number)
        return handle

    return noted


def _noted_objects(recorder: Recorder, call: Any) -> Any:
    def noted(*args: Any, **kwargs: Any) -> Any:
        with recorder.objects():
            return call(*args, **kwargs)

    return noted


def _noted_backend(recorder: Recorder, call: Any) -> Any:
    def noted(group: Any, device: torch.device) -> Any:
        backend = call(group, device)
        recorder.know_backend(backend, group)
        return backend

    return noted


def _noted_channel(recorder: Recorder, call: Any) -> Any:
    """The channel of an exchange tells which data it is (`ranks/exchange.py`). NCCL sees the order of calls alone."""

    def noted(exchange: BackendExchange, *given: Any) -> Any:
        recorder.carries = f"channel {given[-1]}"
        try:
            return call(exchange, *given)
        finally:
            recorder.carries = ""

    return noted


def _noted_resize(recorder: Recorder, call: Any) -> Any:
    def noted(storage: torch.UntypedStorage, size: int) -> Any:
        if size < storage.nbytes():
            recorder.memories.empty(storage_id(storage))
        elif size:
            recorder.memories.take(storage_id(storage), size)
        return call(storage, size)

    return noted
