"""Decide each call of a unit: run it, or return something in its place.

A module calls its units as always. Each unit has a gate in front of it, which asks the visitor, if there is one. So one
forward can serve every stage. Without a visitor the module behaves as before.

The gate sits where `Module.compile` puts its compiled call: hooks and subclasses keep working, nothing is left in
`state_dict`, and copies and pickles of the module come without it.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.stages.split.python_state import PythonState
from shardwise.stages.split.seed import seed_torch, seeded_alike
from shardwise.stages.split.write_guard import WriteGuard
from shardwise.torch_private import (
    backward_id,
    buffer_slots,
    get_compiled_call,
    parameter_slots,
    plain_call,
    set_compiled_call,
)

Inner = Callable[..., Any]


class Visitor(Protocol):
    """Decides about each call of a unit during one run of the module."""

    def call(self, unit: str, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class Gate:
    """The gate in front of one unit."""

    __slots__ = ("_is_part", "_switch", "again", "inner", "unit")

    def __init__(self, unit: str, inner: Inner, switch: "Switch") -> None:
        self.unit, self.inner, self._switch = unit, inner, switch
        #: The call for a rerun of the unit in a backward, by a checkpoint around it: as in its first run.
        self.again = inner
        self._is_part = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        local = self._switch.local
        visitor: Visitor | None = getattr(local, "visitor", None)
        if visitor is None:
            self._is_part = self._is_part or getattr(local, "is_visited", False)
            call = self.again if backward_id() >= 0 and not self._is_part else self.inner
            return call(*args, **kwargs)
        # No visitor during the call: a unit inside a unit is just a part of it.
        local.visitor, local.is_visited = None, True
        try:
            return visitor.call(self.unit, self.inner, args, kwargs)
        finally:
            local.visitor, local.is_visited = visitor, False

    # Not every module leaves its compiled call out of its copies and pickles (nn.LSTM does not). There it is None.
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class Switch:
    """The gates of one split module, and its current visitor. Each thread has its own visitor."""

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self.local = threading.local()
        #: The state before a run without side effects.
        self.noted: Noted | None = None
        self.gates: dict[str, Gate] = {}
        self.before = {name: get_compiled_call(unit) for name, unit in units.items()}
        for name, unit in units.items():
            self.gates[name] = Gate(name, self.before[name] or plain_call(unit), self)
            set_compiled_call(unit, self.gates[name])

    @contextmanager
    def visited_by(self, visitor: Visitor) -> Iterator[None]:
        """Let a visitor decide about every call of a unit in this thread."""
        before = getattr(self.local, "visitor", None)
        self.local.visitor = visitor
        try:
            yield
        finally:
            self.local.visitor = before


def uncompiled() -> AbstractContextManager[None]:
    """Run compiled code eagerly. Otherwise the modes that watch a run would be compiled with it, op by op."""
    # Without the compiler in the process nothing is compiled, and it takes a second to import.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


class Noted:
    """A snapshot of a module before a run: tensors, attributes, random numbers. `restore` puts them back.

    It serves the next run too if nothing has changed since: taking it again costs as much as a forward.
    """

    def __init__(self, module: nn.Module, *others: Any, tells_writes: bool = False) -> None:
        self._tensors = [
            (slots, key, each, each.clone() if _is_written(owner, slots) and not each.is_meta else each)
            for owner in module.modules()
            for slots in (buffer_slots(owner), parameter_slots(owner))
            for key, each in slots.items()
            if isinstance(each, Tensor)
        ]
        #: Buffers that are None so far.
        self._empty = [
            (slots, key)
            for owner in module.modules()
            for slots in (buffer_slots(owner),)
            for key, each in slots.items()
            if each is None
        ]
        self.devices = {each.device for _, _, each, _ in self._tensors if each.is_cuda}
        self.state = PythonState(module, *others)
        self.guard = WriteGuard(module, tells=tells_writes)

    def restore(self) -> None:
        self.state.restore()
        self.guard.restore()
        for slots, key in self._empty:
            slots[key] = None
        for slots, key, each, value in self._tensors:
            slots[key] = each  # A forward may have replaced it.
            if value is not each:
                each.data.copy_(value)  # Through `data`, so that the version counter does not change.


@contextmanager
def undisturbed(
    module: nn.Module,
    units: Mapping[str, nn.Module],
    *others: Any,
    tells_writes: bool = False,
    noted: Noted | None = None,
    draws_alike: bool = False,
) -> Iterator[Switch]:
    """Yield a switch for runs without side effects: gates, tensors, attributes and generators are restored afterwards.

    Torch draws the same on every rank, as ranks may run a module together; if it `draws_alike`, so do Python and NumPy.
    With `tells_writes` its guard records which parameters were written. `noted` is the snapshot of an earlier run
    without units, of the same module and `others`.
    """
    switch = Switch(units)
    with seeded_alike() if draws_alike else nullcontext():
        # Taken with the gates in place, so that they do not count as changes.
        switch.noted = noted = noted or Noted(module, *others, tells_writes=tells_writes)
        try:
            with torch.random.fork_rng(noted.devices), torch.no_grad(), uncompiled(), noted.guard.guarding():
                seed_torch(0)
                yield switch
        finally:
            noted.restore()
            for name, unit in units.items():
                assert get_compiled_call(unit) is switch.gates[name], f"another gate stands in front of that of {name}"
                set_compiled_call(unit, switch.before[name])


def _is_written(owner: nn.Module, slots: Mapping[str, Any]) -> bool:
    """Whether a forward may write to these tensors: buffers, and embeddings with `max_norm`."""
    return slots is buffer_slots(owner) or getattr(owner, "max_norm", None) is not None
