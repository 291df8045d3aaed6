"""Values in transit between stages, as one rank holds them: activations to readers, gradients back to makers."""

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
    """A value that a stage makes for a reading stage. `is_here`: the reader is on this rank."""

    name: str
    reader: int
    is_here: bool


class StageIO:
    """Values and gradients, keyed by name, microbatch and the stage that reads the value.

    A value is held from when a stage of this rank made or received it until its reader takes it or it is sent. Values
    for a stage of this rank are outside any graph. A gradient is held from when it was received from a reader, or made
    by a reader of this rank, until its maker takes it or it is sent.
    """

    def __init__(self, rank: int, placement: Placement, split: Split) -> None:
        self._split, self._placement = split, placement
        self._names: dict[tuple[int, int], tuple[str, ...]] = {}
        self._values: dict[_Key, Tensor] = {}
        self._gradients: dict[_Key, Tensor] = {}
        #: Values, with their readers, that a real gradient has arrived for on an accelerator.
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
        """Keys of the values and gradients that are still held."""
        return [*self._values, *self._gradients]

    def clear(self) -> None:
        self._values.clear()
        self._gradients.clear()

    def names(self, maker: int, reader: int) -> tuple[str, ...]:
        """Return the names of the values between two stages, which belong to one copy of the model."""
        found = self._names.get((maker, reader))
        if found is None:
            count = self._split.num_stages
            found = self._names[maker, reader] = self._split.between(maker % count, reader % count)
        return found

    def take_values(self, stage: int, microbatch: int) -> Values:
        """Remove and return all values that a stage reads."""
        return {name: self._values.pop((name, microbatch, stage)) for name in self._reads[stage]}

    def deliver(self, stage: int, microbatch: int, made: Values) -> None:
        """Store the values that a stage made, for its readers."""
        for name, reader, is_here in self._deliveries[stage]:
            self._values[name, microbatch, reader] = cut_off(made[name]) if is_here else made[name]

    def take_gradients(self, stage: int, microbatch: int, name: str) -> list[Tensor]:
        """Remove and return the gradients of a value that a stage made, from those readers that have one."""
        found = []
        for reader in self._placement.targets[stage]:
            gradient = self._gradients.pop((name, microbatch, reader), None)
            if gradient is not None and self._is_there(gradient, (name, reader)):
                found.append(gradient)
        return found

    def _is_there(self, gradient: Tensor, edge: tuple[str, int]) -> bool:
        """Whether this is a gradient, not the marker of an absent one (`_none_like`).

        On an accelerator the check synchronizes, so it is skipped for an edge once a real gradient has come.
        """
        if edge in self._has_come:
            return True
        is_there = not _is_none(gradient)
        if is_there and gradient.device.type != "cpu":
            self._has_come.add(edge)
        return is_there

    def pass_back(self, stage: int, microbatch: int, inputs: Values) -> None:
        """Store the gradients of the values that a stage read, for their makers."""
        for name, leaf in inputs.items():
            if leaf.requires_grad:
                # A maker whose values have no gradient must not touch its weights' `grad`, as on one device.
                gradient = leaf.grad if leaf.grad is not None else _none_like(leaf)
                self._gradients[name, microbatch, stage] = gradient
                leaf.grad = None

    def sender(self, send: Instruction) -> Callable[[], list[Tensor]]:
        """Return a function that gives the tensors of a SEND at run time, in the order that its RECV expects.

        Keys are looked up in advance, as in `receiver`: on a rank that has just waited, each lookup is a cache miss.
        """
        held, keys = self._place_of(send)
        if send.kind is Kind.SEND_F:
            return lambda: [held.pop(key) for key in keys]
        return lambda: [held.pop(key) for key in keys if key in held]

    def receiver(
        self, receive: Instruction, wanted: Callable[[], Container[str]]
    ) -> Callable[[Sequence[Tensor]], None]:
        """Return a function that stores the tensors of a RECV; they are outside any graph.

        For gradients, only values that require one are received: `wanted` returns their names.
        """
        held, keys = self._place_of(receive)

        def take(tensors: Sequence[Tensor]) -> None:
            here = keys if len(tensors) == len(keys) else [key for key in keys if key[0] in wanted()]
            for key, tensor in zip(here, tensors, strict=True):
                held[key] = tensor

        return take

    def _place_of(self, transfer: Instruction) -> tuple[dict[_Key, Tensor], list[_Key]]:
        """Return the dictionary that holds the tensors of a transfer, and their keys, in one order on both ends."""
        kind, stage, microbatch, peer, _ = transfer
        assert peer is not None, f"{transfer} names no peer"
        maker, reader = (stage, peer) if kind in (Kind.SEND_F, Kind.RECV_B) else (peer, stage)
        held = self._values if kind in (Kind.SEND_F, Kind.RECV_F) else self._gradients
        return held, [(name, microbatch, reader) for name in self.names(maker, reader)]


def _none_like(leaf: Tensor) -> Tensor:
    """Return the marker that is sent in place of an absent gradient: negative zeros (-0.0) in its shape."""
    return torch.zeros_like(leaf).neg_()


def _is_none(gradient: Tensor) -> bool:
    plain = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    if not plain.numel() or plain.reshape(-1)[0] != 0:
        return False
    return bool(plain.signbit().all()) and not bool(plain.any())


def cut_off(value: Tensor) -> Tensor:
    """Detach a value from its graph, keeping `requires_grad`."""
    return value.detach().requires_grad_(value.requires_grad)
