"""Time each unit by itself on this device, forward and backward.

FLOPs say little about the time of an operation on a given processor: a head from 512 to 8,192 channels runs at another
rate than the layers before it. With `measure=True` stages are cut by these times.
"""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.meta import has_meta
from shardwise.stages.split.switch import Inner, undisturbed
from shardwise.stages.split.unit_flow import UnitCall
from shardwise.stages.stage import Batch
from shardwise.torch_private import pytree

# The shortest of these runs counts: other load on the machine makes a run longer, never shorter.
_RUNS = 3


class Stopwatch:
    """Times each call of a unit once: the same calls are asked for again each time another unit is opened."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._names: Iterator[str] = iter(())
        self._units: dict[str, nn.Module] = {}

    def time(self, module: nn.Module, units: dict[str, nn.Module], example: Batch, calls: Sequence[UnitCall]) -> None:
        """Set the seconds of each call. The module and its gradients are unchanged afterwards."""
        if has_meta(module):
            raise ShardwiseError(
                "units are to be timed, but the module is on the meta device and has no weights to run with",
                remedy="measure=False, or a module that is built where it can run",
            )
        if any(call.name not in self._seconds for call in calls):
            args, kwargs = Signature(module).arguments(example)
            self._names, self._units = iter([call.name for call in calls]), units
            with undisturbed(module, units) as switch, switch.visited_by(self):
                module(*args, **kwargs)
        for call in calls:
            call.seconds = self._seconds[call.name]

    def call(self, unit: str, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit, and time it first if its time is not known yet."""
        name = next(self._names)
        if name not in self._seconds:
            weights: list[Tensor] = [each for each in self._units[unit].parameters() if each.requires_grad]
            self._seconds[name] = min(_seconds_of(inner, args, kwargs, weights) for _ in range(_RUNS))
        return inner(*args, **kwargs)


def _seconds_of(inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any], weights: list[Tensor]) -> float:
    """Time a forward and its backward on copies of the arguments."""
    copied_args, copied_kwargs = pytree.tree_map_only(Tensor, _copy, (args, kwargs))
    inputs = [each for each in pytree.tree_leaves((copied_args, copied_kwargs)) if isinstance(each, Tensor)]
    targets = [*(each for each in inputs if each.requires_grad), *weights]
    with torch.enable_grad():
        start = _now(weights or inputs)
        returned = inner(*copied_args, **copied_kwargs)
        made = [each for each in pytree.tree_leaves(returned) if isinstance(each, Tensor) and each.requires_grad]
        if made and targets:
            torch.autograd.grad(made, targets, [torch.ones_like(each) for each in made], allow_unused=True)
        return _now(weights or inputs) - start


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _now(tensors: Sequence[Tensor]) -> float:
    for device in {each.device for each in tensors if each.is_cuda}:
        torch.cuda.synchronize(device)
    return perf_counter()
