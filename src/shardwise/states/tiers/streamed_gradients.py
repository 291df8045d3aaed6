"""Gradients of streamed blocks: copied to the host during the backward, and set as the parameters' `grad` at its end.

    compute   backward of 3 | backward of 2 | backward of 1 | backward of 0 |
    out                       g3              g2              g1              g0 | parameter.grad

A gradient leaves the device as soon as autograd has computed it. The host waits once, at the end of `backward()`, and
sets each parameter's `grad`. If a parameter has a gradient already, the host adds the new one to it.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.dataflow.deferred_free import DeferredFree
from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Event
from shardwise.states.tiers.copy_streams import CopyStreams
from shardwise.states.tiers.disk import DiskWriter
from shardwise.states.tiers.streamed_block import BlockParameter, StreamedBlock
from shardwise.torch_private import accumulated_hooks, gradient_hooks


class _HostRun:
    """Memory on the host for the gradients of one block. Gradients that are added up take turns with a second one."""

    def __init__(self, block: StreamedBlock, machine: Machine) -> None:
        self._block, self._machine = block, machine
        self._turns: list[dict[nn.Parameter, Tensor]] = []

    @property
    def is_on_disk(self) -> bool:
        """Whether this memory is a file's."""
        return self._block.scratch is not None

    def host(self, parameter: nn.Parameter) -> Tensor:
        """Return where a gradient may be written: not where the parameter's current one is."""
        taken = None if parameter.grad is None else parameter.grad.data_ptr()
        for views in self._turns:
            if views[parameter].data_ptr() != taken:
                return views[parameter]
        if self._block.scratch is not None:
            memory = self._block.scratch.take_memory()
        else:
            memory = self._machine.pinned((self._block.num_bytes,), torch.uint8)
        self._turns.append(self._block.views(memory))
        return self._turns[-1][parameter]


class StreamedGradients:
    """The gradients of some blocks in transit to the host. At most `most_bytes` of them wait on the device."""

    def __init__(self, machine: Machine, most_bytes: int, one_at_a_time: AbstractContextManager[Any]) -> None:
        self._machine, self._one_at_a_time = machine, one_at_a_time
        self._arriving: dict[nn.Parameter, tuple[Tensor, Event]] = {}
        self._leaving = DeferredFree(most_bytes)
        #: Writes gradients of blocks on disk. It is made with the first one, for the largest possible.
        self._writer: DiskWriter | None = None
        self._largest_bytes = 0

    def watch(self, block: StreamedBlock, copies: CopyStreams) -> None:
        """Take over the gradients of a block's parameters on the device from now on."""
        run = _HostRun(block, self._machine)
        if block.scratch is not None:
            self._largest_bytes = max(self._largest_bytes, *(each.packed.num_bytes for each in block.members), 0)
        for member in block.members:
            if not member.packed.dtype.is_floating_point and not member.packed.dtype.is_complex:
                continue
            take = partial(self._take, member, run, copies)
            member.on_device.requires_grad_()  # A frozen parameter may be trained later.
            member.on_device.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            member.on_device.requires_grad_(member.parameter.requires_grad)

    def settle(self) -> None:
        """Wait for copies in progress, and give each parameter its gradient."""
        with self._one_at_a_time, torch.no_grad():
            self._leaving.wait()
            for parameter in list(self._arriving):
                self._settle(parameter)

    def drop(self) -> None:
        """Drop the gradients of an interrupted backward."""
        with self._one_at_a_time:
            self._leaving.wait()
            self._arriving.clear()

    def close(self) -> None:
        """Give out the gradients that have arrived, and end the thread that writes to disk."""
        self.settle()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _take(self, member: BlockParameter, run: _HostRun, copies: CopyStreams, on_device: Tensor) -> None:
        assert on_device.grad is not None, "autograd calls when it has made one"
        gradient, on_device.grad = on_device.grad.detach().contiguous(), None
        with self._one_at_a_time, torch.no_grad():
            if member.parameter in self._arriving:  # From a backward inside this one: recomputed parts.
                self._settle(member.parameter)
            host = run.host(member.parameter)
            if run.is_on_disk:
                self._writer = self._writer or DiskWriter(self._machine, self._largest_bytes)
                left, arrived = self._writer.write(host.view(-1), gradient.view(-1), copies)
            else:
                left = arrived = copies.to_host(host, gradient)
            self._arriving[member.parameter] = host, arrived
            self._leaving.hold(left, gradient)
            self._leaving.sweep()

    def _settle(self, parameter: nn.Parameter) -> None:
        gradient, event = self._arriving.pop(parameter)
        event.wait()
        give(parameter, gradient)


def give(parameter: Tensor, gradient: Tensor) -> None:
    """Do what autograd does when it has a parameter's gradient: call the user's hooks, and add it up."""
    for hook in gradient_hooks(parameter).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    for hook in accumulated_hooks(parameter).values():
        hook(parameter)
