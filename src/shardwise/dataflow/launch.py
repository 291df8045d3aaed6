"""A task: a function or a kernel that was prepared once, and one call of it.

A `Launch` is everything that is known about a function itself; each call looks it up instead of deriving it again. A
`Call` is one task: the arguments, which may contain data, and what it reads and writes.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from shardwise.dataflow.access import Access, find_accesses, is_kernel
from shardwise.dataflow.data import Data
from shardwise.dataflow.streams import Run
from shardwise.errors import ShardwiseError

# Triton's interpreter keeps the current program in process-wide state, so only one kernel may run at a time.
_INTERPRETER = threading.Lock()


class Launch:
    """A function, kernel or module, with what the machine knows about it."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn
        self.is_kernel = is_kernel(fn)
        self.is_module = isinstance(fn, nn.Module)
        self.is_interpreted = self.is_kernel and _innermost(fn).__class__.__name__ == "InterpretedFunction"
        self.kernel = _name_of(fn)
        self.run: Any = fn.run if self.is_kernel else None
        if self.is_interpreted:
            self.run = partial(_run_interpreted, fn.run)
        self.key: object = getattr(fn, "__code__", self.kernel)  # Stable for a function that is created anew each time.
        self.lock = threading.Lock()  # A module has one set of weights at a time, so it runs at one place at a time.
        self.members: dict[str, Data] | None = None  # A module's parameters and buffers, made on first use.
        self.names: Sequence[str] = ()
        #: For a kernel whose accesses were found: for each argument its position, whether it is read and stored to.
        self.positions: tuple[tuple[int, bool, bool], ...] | None = None
        self.stores: Sequence[bool] = ()  # For the same kernel: whether each argument is stored to.
        self.problem = "only a Triton kernel's source says it"
        if self.is_kernel:
            self.names = tuple(self.fn.arg_names)
            found = find_accesses(fn)
            if isinstance(found, str):
                self.problem = found
            else:
                # Even an argument that is never used has to be a tensor at the right place.
                accesses = [found.get(name, Access(reads=False, writes=False)) for name in self.names]
                self.positions = tuple((number, each.reads, each.writes) for number, each in enumerate(accesses))
                self.stores = tuple(each.writes for each in accesses)

    def bound(self, tensors: Sequence[Any], options: dict[str, Any], grid: Any) -> Run:
        """Return a kernel bound to its arguments, ready to launch."""
        return partial(self.run, *tensors, grid=grid, warmup=False, **options)


@dataclass(slots=True, eq=False)
class Call:
    """One task."""

    launch: Launch
    args: tuple[Any, ...]
    options: dict[str, Any]
    grid: Any
    place: str
    code: CodeType  # The code and the line that submitted it.
    line: int
    name: str
    seconds: float | None
    reads: Sequence[Data] = ()
    writes: Sequence[Data] = ()
    into: tuple[Data, ...] = ()
    members: Mapping[str, Data] = field(default_factory=dict)  # A module's parameters and buffers.

    def bind(self, place: int) -> Run:
        """Return the run with the data among the arguments replaced by the tensors of a place."""
        launch = self.launch
        if launch.is_kernel:
            tensors = [each.copies[place].tensor if type(each) is Data else each for each in self.args]  # type: ignore[union-attr]
            if tuple in map(type, tensors):
                tensors = _replaced(tensors, lambda data: data.copies[place].tensor)  # type: ignore[union-attr]
            return launch.bound(tensors, self.options, self.grid)
        return self.bind_with(lambda data: data.copies[place].tensor)  # type: ignore[union-attr]

    def bind_with(self, tensor_of: Callable[[Data], Tensor]) -> Run:
        """Return the run with the data among the arguments replaced by `tensor_of`."""
        launch = self.launch
        args = _replaced(self.args, tensor_of)
        options = {name: _replaced(each, tensor_of) for name, each in self.options.items()}
        if launch.is_kernel:
            return launch.bound(args, options, self.grid)
        targets = [tensor_of(data) for data in self.into]
        if launch.is_module:
            members = {name: tensor_of(data) for name, data in self.members.items()}
            fn: Callable[..., object] = partial(_run_module, launch, members)
        else:
            fn = launch.fn
        return partial(_run_function, fn, args, options, targets)


def set_accesses(call: Call, reads: Sequence[Data] | None, writes: Sequence[Data] | None) -> None:
    """Set what a call reads and writes: as declared, or as found in its kernel's source."""
    launch = call.launch
    if launch.is_kernel and reads is None and writes is None and launch.positions is not None:
        _set_found(call, launch.positions)
        return
    used = list(dict.fromkeys(_data_in((call.args, tuple(call.options.values())))))
    if launch.is_module or (call.into and reads is None):
        written = list(writes or ())
        members = list(call.members.values())
        call.reads = [*(data for data in used if data not in written), *members, *(reads or ())]
        # It is unknown how a module uses its buffers, so they count as both read and written.
        buffers = [name for name, _ in launch.fn.named_buffers()] if launch.is_module else []
        call.writes = [*written, *call.into, *(call.members[name] for name in buffers)]
        return
    if reads is None and writes is None and used:
        raise ShardwiseError(
            f"what {launch.kernel} reads and writes is not known: {launch.problem}",
            remedy=f"reads=[{used[0].name}, ...], writes=[...], or into= for what it returns",
        )
    call.reads, call.writes = list(reads or ()), [*(writes or ()), *call.into]
    for data in used:
        if data not in call.reads and data not in call.writes:
            raise ShardwiseError(
                f"{data.name} is an argument of {call.name} but is declared neither as read nor as written",
                remedy=f"reads=[{data.name}] or writes=[{data.name}]",
            )


def _set_found(call: Call, positions: tuple[tuple[int, bool, bool], ...]) -> None:
    reads, writes = [], []
    args = call.args
    num_args = len(args)
    for position, is_read, is_written in positions:
        if position >= num_args:
            break
        given = args[position]
        alone = type(given) is Data
        for data in (given,) if alone else _data_in(given) if type(given) is tuple else ():
            # For a tuple it is only known how some element is accessed: an element without a value is not read.
            if data.has_value or (is_read and alone) or not (alone or is_written):
                # A kernel may store to part of an argument only. The rest has to be kept, so the value is fetched.
                reads.append(data)
                if is_written:
                    writes.append(data)
            else:
                writes.append(data)
    call.reads, call.writes = reads, writes


def by_position(
    launch: Launch, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move data that were given to a kernel by name to their positions among the arguments, where possible."""
    for each in options.values():
        if type(each) is Data:
            break
    else:
        return args, options
    options, found = dict(options), list(args)
    for name in launch.names[len(args) :]:
        if name not in options:
            break
        found.append(options.pop(name))
    return tuple(found), options


def _data_in(value: Any) -> list[Data]:
    if type(value) is Data:
        return [value]
    if isinstance(value, list | tuple):
        return [data for each in value for data in _data_in(each)]
    if type(value) is dict:
        return [data for each in value.values() for data in _data_in(each)]
    return []


def _replaced(value: Any, tensor_of: Callable[[Data], Tensor]) -> Any:
    if type(value) is Data:
        return tensor_of(value)
    if isinstance(value, list | tuple):
        parts = [_replaced(each, tensor_of) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # A named tuple takes each.
    if type(value) is dict:
        return {name: _replaced(each, tensor_of) for name, each in value.items()}
    return value


def _run_interpreted(run: Callable[..., object], *args: Any, **options: Any) -> None:
    with _INTERPRETER:
        run(*args, **options)


def _run_module(launch: Launch, members: dict[str, Tensor], *args: Any, **options: Any) -> Any:
    with launch.lock:
        return functional_call(launch.fn, members, args, options)


def _run_function(
    fn: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], targets: list[Tensor]
) -> None:
    made = fn(*args, **options)
    if not targets:
        return
    values = made if isinstance(made, list | tuple) else (made,)
    if len(values) != len(targets):
        raise ShardwiseError(f"it returned {len(values)} values, but into= names {len(targets)}")
    for target, value in zip(targets, values, strict=True):
        if target.shape != value.shape or target.dtype != value.dtype:
            raise ShardwiseError(
                f"it returned {list(value.shape)} of {value.dtype}, but into= is {list(target.shape)} of {target.dtype}"
            )
        target.copy_(value)


def _innermost(fn: Any) -> Any:
    """Return the kernel inside autotuning and heuristics."""
    while is_kernel(getattr(fn, "fn", None)):
        fn = fn.fn
    return fn


def _name_of(fn: Any) -> str:
    inner = _innermost(fn)
    inner = getattr(inner, "fn", inner)
    return getattr(inner, "__name__", type(inner).__name__)
