"""Run the same tasks one by one on one place and check that every written value is bitwise equal."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.dataflow.data import Data
from shardwise.dataflow.dispatch import Dispatcher
from shardwise.dataflow.launch import Call
from shardwise.dataflow.place import Kind
from shardwise.errors import ShardwiseError
from shardwise.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """How much was compared and found equal."""

    num_tasks: int
    num_values: int


def check(machine: Dispatcher, fn: Callable[[], object]) -> Checked:
    """Run a function's tasks as usual, then one by one on the first place from the same initial values, and compare."""
    before = {data: machine.get(data).cpu().clone() for data in machine.all_data() if data.valid_copies}
    calls: list[Call] = []
    machine.calls, machine.first_values = calls, before
    try:
        fn()
    finally:
        machine.calls = machine.first_values = None
    written = list(dict.fromkeys(data for call in calls for data in call.writes))
    found = {data: machine.get(data).cpu().clone() for data in written}
    expected = _one_by_one(machine, calls, before)
    for data in written:
        _compare(data, found[data], expected[data].cpu(), machine.places[0].name)
    return Checked(num_tasks=len(calls), num_values=len(written))


def _one_by_one(machine: Dispatcher, calls: list[Call], before: dict[Data, Tensor]) -> dict[Data, Tensor]:
    first = machine.places[0]
    tensors: dict[Data, Tensor] = {}
    for call in calls:
        # A host function expects its tensors on the host.
        device = torch.device("cpu") if machine.place(call.place).kind is Kind.HOST else first.device
        for data in (*call.reads, *call.writes):
            tensors[data] = _at(data, tensors, before, device)
        call.bind_with(tensors.__getitem__)()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return tensors


def _at(data: Data, tensors: dict[Data, Tensor], before: dict[Data, Tensor], device: torch.device) -> Tensor:
    known = tensors.get(data)
    if known is not None and known.device == device:
        return known
    made = data.view(torch.zeros(data.num_bytes, dtype=torch.uint8, device=device))
    value = before.get(data) if known is None else known
    if value is not None:
        made.copy_(value)
    return made


def _compare(data: Data, found: Tensor, expected: Tensor, place: str) -> None:
    one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (found, expected))
    differs = (one != other).view(data.num_bytes // max(1, found.element_size()), -1).any(dim=1) if one.numel() else one
    count = int(differs.sum())
    if count:
        raise ShardwiseError(
            f"{data.name} is not what its tasks give one by one on {place}: {count} of"
            f" {counted(found.numel(), 'number')} differ",
            remedy="reads= and writes= that say all that each task reads and writes",
        )
