"""What is on its way between stages, as one rank holds it: values to their readers, gradients back to their makers."""

from collections.abc import Callable, Container, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.runtime.stage import Split, Values
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.placement import Placement


class _Delivery(NamedTuple):
    """A value that a stage makes for a reader, which may be on this rank."""

    name: str
    reader: int
    is_here: bool


class Between:
    """Values and gradients by name, microbatch and the stage that reads the value.

    A value is here from when a stage of this rank has made or received it until its reader has taken it or it is sent;
    what is for a stage of this rank is outside any graph. A gradient is here from when it came in from a reader, or was
    made by one of this rank, until its maker has taken it or it is sent.
    """

    def __init__(self, rank: int, placement: Placement, split: Split) -> None:
        self._split, self._placement = split, placement
        self._names: dict[tuple[int, int], tuple[str, ...]] = {}
        self._values: dict[tuple[str, int, int], Tensor] = {}
        self._gradients: dict[tuple[str, int, int], Tensor] = {}
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
    def left(self) -> list[tuple[str, int, int]]:
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
        keys = ((name, microbatch, reader) for reader in self._placement.targets[stage])
        return [self._gradients.pop(key) for key in keys if key in self._gradients]

    def pass_back(self, stage: int, microbatch: int, inputs: Values) -> None:
        """Hand the gradients of what a stage has read to its makers."""
        for name, leaf in inputs.items():
            if leaf.requires_grad:
                gradient = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
                self._gradients[name, microbatch, stage] = gradient
                leaf.grad = None

    def outgoing(self, send: Instruction) -> list[Tensor]:
        """The tensors that a SEND sends, in the order in which the RECV expects them."""
        return self.sender(send)()

    def sender(self, send: Instruction) -> Callable[[], list[Tensor]]:
        """What gives the tensors of a SEND when it is run, with all looked up that is known before."""
        assert send.peer is not None, f"{send} names no peer"
        if send.kind is Kind.SEND_F:
            held, names, reader = self._values, self.names(send.stage, send.peer), send.peer
        else:
            held, names, reader = self._gradients, self.names(send.peer, send.stage), send.stage
        keys = [(name, send.microbatch, reader) for name in names]
        if send.kind is Kind.SEND_F:
            return lambda: [held.pop(key) for key in keys]
        return lambda: [held.pop(key) for key in keys if key in held]

    def incoming_values(self, receive: Instruction, tensors: Iterable[Tensor]) -> None:
        """Take in what a RECV_F has received: tensors outside any graph."""
        assert receive.peer is not None, f"{receive} names no peer"
        for name, tensor in zip(self.names(receive.peer, receive.stage), tensors, strict=True):
            self._values[name, receive.microbatch, receive.stage] = tensor

    def incoming_gradients(self, receive: Instruction, tensors: Iterable[Tensor], wanted: Container[str]) -> None:
        """Take in what a RECV_B has received: gradients of those of the stage's values that want one."""
        assert receive.peer is not None, f"{receive} names no peer"
        names = [name for name in self.names(receive.stage, receive.peer) if name in wanted]
        for name, tensor in zip(names, tensors, strict=True):
            self._gradients[name, receive.microbatch, receive.peer] = tensor


def cut_off(value: Tensor) -> Tensor:
    """The same numbers outside any graph, which want a gradient if they did inside."""
    return value.detach().requires_grad_(value.requires_grad)
