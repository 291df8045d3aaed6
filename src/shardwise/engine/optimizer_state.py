"""The optimizers of all ranks as one state: assemble whole entries from pieces, and cut pieces from whole entries.

    a rank's optimizer has         over replicas (ZeRO)      over experts (ep), layers (tp)      over stages (pp)
    pieces, flattened         ──   one after the other  ──   as the parameter is joined     ──   all names
    whole matrices of its own ──   one owner has each   ──   joined already                 ──   all names

An entry that is not elementwise (a count of steps) is the same in all pieces, and is taken from the first.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.sharded import Sharded
from shardwise.states.compact_adamw import adopt_state, portable_state
from shardwise.states.data_parallel import DataParallel
from shardwise.states.optimizers.state import (
    States,
    check_shapes,
    check_states,
    groups_of,
    is_of_each_number,
    joined_states,
    load_settings,
    on_cpu,
    plain_settings,
    taken,
)
from shardwise.states.optimizers.updates import Updated

#: Gathers the values of all ranks of this rank's group of that name; without a name, of all ranks.
Gather = Callable[..., list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """The optimizer state of one piece of a weight. `each` has the keys of elementwise entries."""

    start: int
    each: frozenset[str]
    is_joined: bool
    state: Mapping[str, Any]

    def told(self) -> "_Piece":
        return replace(self, state=on_cpu(self.state))


class OptimizerState:
    """All optimizers, under the names of the original module. All ranks call it alike.

    `parameters` are those of this rank's stages, `shapes` those of the whole, `order` all names in the module's order.
    `home_of` says where the state of a weight lives.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        data: DataParallel,
        sharded: Sharded,
        shapes: Mapping[str, torch.Size],
        order: Sequence[str],
        gather: Gather,
        home_of: Callable[[nn.Parameter], torch.device],
    ) -> None:
        self._parameters, self._data, self._sharded = parameters, data, sharded
        self._shapes, self._order, self._gather, self._home_of = shapes, order, gather, home_of
        self._names: dict[Tensor, str] = {each.weight: each.name for each in data.updates.updated}

    def whole(self) -> dict[str, Any]:
        """Return the state of all optimizers, on every rank; state held by other ranks is on the CPU."""
        mine = self.part(joins=True)
        told = {**mine, "state": {name: on_cpu(each) for name, each in mine["state"].items()}}
        return joined_states([*self._gather(told, "pp"), mine], self._order)

    def part(self, *, joins: bool = False) -> dict[str, Any]:
        """Return the state for this rank's stages: this rank's parts, or with `joins` from the parts of all."""
        groups = groups_of(self._data.updates.optimizers, self._names)
        every = self._pieces()
        if self._data.sharing.zero:
            groups = [group for part in self._gather(groups, "gradients") for group in part]
        found = {name: self._combined(name, every[name], joins=joins) for name in self._parameters if name in every}
        return joined_states([{"state": found, "param_groups": groups}], self._order)

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state of all parameters; a rank uses that of its pieces."""
        check_states(state, self._order)
        check_shapes(state["state"], {each.name: self._shapes[each.name] for each in self._data.updates.updated})
        load_settings(self._data.updates.optimizers, self._names, state["param_groups"])
        self._share_settings()
        for updated in self._data.updates.updated:
            updated.optimizer.state.pop(updated.weight, None)
        self.put(state["state"])

    def _share_settings(self) -> None:
        """Give groups without parameters on this rank the settings that they have on other ranks.

        Ranks must have equal settings, and a loaded state may have those of this rank only."""
        every = [
            ((number, place), group)
            for number, optimizer in enumerate(self._data.updates.optimizers)
            for place, group in enumerate(optimizer.param_groups)
        ]
        mine = {key: plain_settings(group) for key, group in every if group["params"]}
        found = {key: settings for part in self._gather(mine) for key, settings in part.items()}
        for key, group in every:
            if not group["params"]:
                group.update(found.get(key, {}))

    def states_of(self, names: Collection[str]) -> dict[str, dict[str, Any]]:
        """Return the whole state of some parameters of this rank's stages. Ranks that hold parts call this alike."""
        every = self._pieces(names)
        return {name: self._combined(name, every[name], joins=True) for name in names if name in every}

    def put(self, states: States) -> None:
        """Load the state of some parameters."""
        for updated in self._data.updates.updated:
            if updated.name in states:
                mine = {key: self._cut(updated, each) for key, each in states[updated.name].items()}
                home = self._home_of(updated.weight)
                found = taken(mine, updated.weight, updated.optimizer, home)
                adopt_state(updated.optimizer, updated.weight, found)

    def _pieces(self, names: Collection[str] | None = None) -> dict[str, list[_Piece]]:
        """Return the pieces of all replicas, in order and each once, by parameter; of all parameters, or of some."""
        kinds: dict[str, dict[str, list[_Piece]]] = {"gradients": {}, "expert_gradients": {}}
        for updated in self._data.updates.updated:
            is_wanted = names is None or updated.name in names
            state = portable_state(updated.optimizer, updated.weight) if is_wanted else {}
            if state:
                each = frozenset(key for key, value in state.items() if is_of_each_number(value, updated.weight))
                piece = _Piece(start=updated.start, each=each, is_joined=updated.is_joined, state=state)
                kind = "expert_gradients" if self._is_expert(updated.name) else "gradients"
                kinds[kind].setdefault(updated.name, []).append(piece)
        if not self._data.sharing.zero:
            return {name: pieces for mine in kinds.values() for name, pieces in mine.items()}
        found: dict[str, dict[int, _Piece]] = {}
        for kind, mine in kinds.items():
            told = {name: [piece.told() for piece in pieces] for name, pieces in mine.items()}
            for part in self._gather(told, kind):
                for name, pieces in part.items():
                    found.setdefault(name, {}).update({piece.start: piece for piece in pieces})
        return {name: [pieces[start] for start in sorted(pieces)] for name, pieces in found.items()}

    def _combined(self, name: str, pieces: Sequence[_Piece], *, joins: bool) -> dict[str, Any]:
        """Return the state of a parameter from its pieces."""
        first, found = pieces[0], {}
        for key in first.state:
            value = first.state[key]
            if key in first.each and not first.is_joined:
                value = torch.cat([piece.state[key].reshape(-1) for piece in pieces]).view(
                    self._data.wholes.shape_of(name)
                )
            if joins and not first.is_joined:
                value = self._joined(name, value, is_piece=key in first.each)
            found[key] = value
        return found

    def _joined(self, name: str, value: Any, *, is_piece: bool) -> Any:
        """Return an entry of the whole parameter's state from those of tensor and expert parallel ranks."""
        if not isinstance(value, Tensor):
            return value
        if is_piece:
            return self._sharded.gather(name, value)
        experts = self._sharded.experts
        return experts.gather(name, value) if experts is not None and value.dim() else value

    def _is_expert(self, name: str) -> bool:
        return self._sharded.experts is not None and name in self._sharded.experts.parameters

    def _cut(self, updated: Updated, value: Any) -> Any:
        """Return this rank's piece of an entry."""
        if not isinstance(value, Tensor):
            return value
        name, weight, experts = updated.name, updated.weight, self._sharded.experts
        is_of_each = value.shape == self._shapes[name]
        if is_of_each and not updated.is_joined:
            value = self._sharded.local(name, value)
        elif experts is not None and value.dim() and not updated.is_joined:
            value = experts.local(name, value)
        if is_of_each:
            flat = value.reshape(-1)
            value = flat[updated.start : updated.start + weight.numel()].view(weight.shape)
        return value
