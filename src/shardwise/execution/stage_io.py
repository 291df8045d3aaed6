"""What is on its way between stages, as one rank holds it: values to their readers, gradients back to their makers."""

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.placement import Placement
from shardwise.stages.stage import Split, Values

#: The name of a value, its microbatch, and the stage that reads it.
_Key = tuple[str, int, int]


class _Delivery(NamedTuple):
    """A value that a stage makes for a reader, which may be on this rank."""

    name: str
    reader: int
    is_here: bool


class StageIO:
    """Values and gradients by name, microbatch and the stage that reads the value.

    A value is here from when a stage of this rank has made or received it until its reader has taken it or it is sent;
    what is for a stage of this rank is outside any graph. A gradient is here from when it came in from a reader, or was
    made by one of this rank, until its maker has taken it or it is sent.
    """

    def __init__(self, rank: int, placement: Placement, split: Split) -> None:
        self._split, self._placement = split, placement
        self._names: dict[tuple[int, int], tuple[str, ...]] = {}
        self._values: dict[_Key, Tensor] = {}
        self._gradients: dict[_Key, Tensor] = {}
        #: The values, with their readers, that gradients have come for on an accelerator.
        self._has_come: set[tuple[str, int]] = set()
        self._reads = {stage: split.reads[stage % split.num_stages] for stage in placement.stages[rank]}
        self._deliveries = {
            stage: [
                _Delivery(name, reader, placement.ranks[reader] == rank)
                for reader in placement.targets[stage]
                for name in self.names(stage, reader)
            ]
            for stage in placement.stages[rank]
        }

    @property
    def left(self) -> list[_Key]:
        """What nobody has taken."""
        return [*self._values, *self._gradients]

    def clear(self) -> None:
        self._values.clear()
        self._gradients.clear()

    def names(self, maker: int, reader: int) -> tuple[str, ...]:
        """The values between two stages. Where the model is held several times, both are of one copy."""
        found = self._names.get((maker, reader))
        if found is None:
            count = self._split.num_stages
            found = self._names[maker, reader] = self._split.between(maker % count, reader % count)
        return found

    def take_values(self, stage: int, microbatch: int) -> Values:
        """All that a stage reads."""
        return {name: self._values.pop((name, microbatch, stage)) for name in self._reads[stage]}

    def deliver(self, stage: int, microbatch: int, made: Values) -> None:
        """Hand what a stage has made to its readers."""
        for name, reader, is_here in self._deliveries[stage]:
            self._values[name, microbatch, reader] = cut_off(made[name]) if is_here else made[name]

    def take_gradients(self, stage: int, microbatch: int, name: str) -> list[Tensor]:
        """The gradients of a value that a stage has made, from those of its readers that have one."""
        found = []
        for reader in self._placement.targets[stage]:
            gradient = self._gradients.pop((name, microbatch, reader), None)
            if gradient is not None and self._is_there(gradient, (name, reader)):
                found.append(gradient)
        return found

    def _is_there(self, gradient: Tensor, edge: tuple[str, int]) -> bool:
        """Whether it is one, and no word that there is none. An accelerator is asked until there was one."""
        if edge in self._has_come:
            return True
        is_there = not _is_none(gradient)
        if is_there and gradient.device.type != "cpu":
            self._has_come.add(edge)
        return is_there

    def pass_back(self, stage: int, microbatch: int, inputs: Values) -> None:
        """Hand the gradients of what a stage has read to its makers."""
        for name, leaf in inputs.items():
            if leaf.requires_grad:
                # A maker whose values have no gradient leaves its weights alone, as one device does.
                gradient = leaf.grad if leaf.grad is not None else _none_like(leaf)
                self._gradients[name, microbatch, stage] = gradient
                leaf.grad = None

    def sender(self, send: Instruction) -> Callable[[], list[Tensor]]:
        """What gives the tensors of a SEND when it is run, in the order in which its RECV expects them.

        All is looked up that is known before, as in a receiver: on a rank that has waited, each look costs its way to
        memory.
        """
        held, keys = self._place_of(send)
        if send.kind is Kind.SEND_F:
            return lambda: [held.pop(key) for key in keys]
        return lambda: [held.pop(key) for key in keys if key in held]

    def receiver(
        self, receive: Instruction, wanted: Callable[[], Container[str]]
    ) -> Callable[[Sequence[Tensor]], None]:
        """What takes in what a RECV has received: tensors outside any graph.

        Of gradients they are those that `wanted` has, the names of the stage's values that want one.
        """
        held, keys = self._place_of(receive)

        def take(tensors: Sequence[Tensor]) -> None:
            here = keys if len(tensors) == len(keys) else [key for key in keys if key[0] in wanted()]
            for key, tensor in zip(here, tensors, strict=True):
                held[key] = tensor

        return take

    def _place_of(self, transfer: Instruction) -> tuple[dict[_Key, Tensor], list[_Key]]:
        """Where what a transfer carries is held, and under which keys: in one order on both of its ends."""
        kind, stage, microbatch, peer, _ = transfer
        assert peer is not None, f"{transfer} names no peer"
        maker, reader = (stage, peer) if kind in (Kind.SEND_F, Kind.RECV_B) else (peer, stage)
        held = self._values if kind in (Kind.SEND_F, Kind.RECV_F) else self._gradients
        return held, [(name, microbatch, reader) for name in self.names(maker, reader)]


def _none_like(leaf: Tensor) -> Tensor:
    """What is sent in place of a gradient where a value has none: zeros, each below zero."""
    return torch.zeros_like(leaf).neg_()


def _is_none(gradient: Tensor) -> bool:
    plain = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    if not plain.numel() or plain.reshape(-1)[0] != 0:
        return False
    return bool(plain.signbit().all()) and not bool(plain.any())


def cut_off(value: Tensor) -> Tensor:
    """The same numbers outside any graph, which want a gradient if they did inside."""
    return value.detach().requires_grad_(value.requires_grad)
