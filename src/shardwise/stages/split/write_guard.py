"""Restore the parameters that a forward writes to (an EMA teacher, clamped weights) after a trial."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.split.sources import storage_of
from shardwise.torch_private import EagerDispatchMode, parameter_slots, schema_of, version_of

#: Parameters with fewer bytes than this in total are copied before a run: that is faster than watching its operations.
_FEW_BYTES = 2**24
_STRIDED = torch.ops.aten.as_strided.default
_COPIED_TYPES = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


class Rewritten(NamedTuple):
    """A parameter that a forward wrote to, and the sum of its new values.

    `how` is `memory` (its storage was replaced), `in place`, or `data` (written through `.data`). `in_glue`: written
    outside units. `settles`: written through `.data`, and later forwards write the same values again. `moves`: later
    forwards write others, and compute something else with them.
    """

    how: str
    total: float
    in_glue: bool = False
    settles: bool = False
    moves: bool = False


class WriteGuard(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Copies a parameter before the first write to its storage, and restores it at the end.

    A write through `parameter.data` does not change the version counter, so writes are found by storage. If it does not
    matter which were written (`tells` is false) and all are small, all are copied at once, without watching operations.
    """

    def __init__(self, module: nn.Module, *, tells: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: Every parameter, with its current data and version.
        self._homes = {name: (each, each.data, version_of(each)) for name, each in _parameters(module)}
        self._places = {name: storage_of(home) for name, (_, home, _) in self._homes.items()}
        self._names: dict[int, list[str]] = {}
        self._copies: dict[str, Tensor] = {}
        self.tells = tells
        self._looks = tells or not self._are_few()
        if self._looks:
            for name, place in self._places.items():
                self._names.setdefault(place, []).append(name)
        else:
            self._copies = {name: home.clone() for name, (_, home, _) in self._homes.items()}

    def guarding(self) -> AbstractContextManager[Any]:
        """Return the context for the run."""
        return self if self._looks else nullcontext()

    def _are_few(self) -> bool:
        homes = [home for _, home, _ in self._homes.values()]
        are_plain = all(
            type(each) is Tensor and each.layout is torch.strided and each.dtype in _COPIED_TYPES for each in homes
        )
        return are_plain and sum(each.numel() * each.element_size() for each in homes) < _FEW_BYTES

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is _STRIDED and self.tells:
            self._check_offset(args, kwargs)
        schema = schema_of(func)
        if schema.is_mutable:
            for position, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[position] if position < len(args) else kwargs.get(argument.name)
                    for each in given if isinstance(given, (list, tuple)) else (given,):
                        self._keep(each)
        return func(*args, **kwargs)

    def _check_offset(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an offset from the start of the storage: in an engine, parameters share one storage."""
        offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
        names = self._names.get(storage_of(args[0]), ())
        if offset is not None and names:
            raise ShardwiseError(
                f"the forward reads {names[0]} by as_strided with a storage_offset of {offset}, which counts from where"
                " its memory begins, and an engine has parameters there one after the other",
                remedy="as_strided without storage_offset, which begins with the tensor; or weight.diagonal(),"
                " weight.unfold(...)",
            )

    def _keep(self, target: Any) -> None:
        names = self._names.get(storage_of(target), ()) if isinstance(target, Tensor) else ()
        for name in names:
            if name not in self._copies:
                self._copies[name] = self._homes[name][1].clone()

    @property
    def written(self) -> dict[str, Rewritten]:
        """The parameters written so far."""
        assert self._looks, "whoever asks which were written says so before the run"
        found = {}
        for name, (parameter, _, version) in self._homes.items():
            is_elsewhere = storage_of(parameter) != self._places[name]
            if is_elsewhere or name in self._copies:
                how = "memory" if is_elsewhere else "in place" if version_of(parameter) != version else "data"
                found[name] = Rewritten(how, float(parameter.detach().sum(dtype=torch.float64)))
        return found

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all parameters."""
        for name, (parameter, home, _) in self._homes.items():
            if not self._is_at_home(name, parameter, home):
                parameter.data = home
        for name, value in self._copies.items():
            # Through `data`, so that the version counter does not change.
            home = self._homes[name][1]
            if self._looks or not torch.equal(home, value):
                home.copy_(value)

    def _is_at_home(self, name: str, parameter: Tensor, home: Tensor) -> bool:
        # Comparing addresses takes a quarter of the time. `home` is alive, so no other tensor can have its address.
        if not self._looks:
            return parameter.data_ptr() == home.data_ptr()
        return storage_of(parameter) == self._places[name]


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield all parameters except those of modules with `max_norm`, which are known to be written to."""
    for prefix, owner in module.named_modules():
        if getattr(owner, "max_norm", None) is None:
            for key, each in parameter_slots(owner).items():
                if each is not None and not each.is_meta:
                    yield f"{prefix}.{key}" if prefix else key, each
