"""How stages are computed: what a forward keeps for its backward, and in which precision.

What is recomputed is run again with the random numbers that it had (dropout drops the same) and without a trace in the
buffers (batch norm counts a microbatch once):

    layer by layer    inside of the backward, each layer when its turn has come (`stages/recompute.py`)
    a whole stage     before a backward that is run in two halves. The forward still builds its graph, with nothing
                      saved in it: that is how it is known which values will want a gradient.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from shardwise.planner.plan import FP8_SCALES, Plan
from shardwise.schedule.schedule import Schedule
from shardwise.stages.split.seed import python_draws, set_python_draws

#: What is not in 8 bits under fp8 is in bf16.
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, **dict.fromkeys(FP8_SCALES, torch.bfloat16)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePolicy:
    """How stages are computed. `autocast` is the type that matmuls and the like run in, if not the parameters' own.

    In fp16 small gradients vanish unless the loss is multiplied, which is its owner's business: given as a sum and a
    count, both are, and the mean stays (`training/precision.py`).
    """

    recompute: Literal["none", "layers", "stage"] = "none"
    #: Whether matmuls and attention of what is recomputed are kept.
    selective: bool = False
    autocast: torch.dtype | None = None

    @staticmethod
    def of(plan: Plan, schedule: Schedule | None = None, *, casts: bool = True) -> "ComputePolicy":
        """That of a plan. Without `casts` a module is computed in the types that it has."""
        how: Literal["layers", "stage"] = "stage" if schedule is not None and schedule.splits_backward else "layers"
        return ComputePolicy(
            recompute="none" if plan.recompute == "none" else how,
            selective=plan.recompute == "selective",
            autocast=_AUTOCAST.get(plan.precision) if casts else None,
        )

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Where forwards and losses are computed. Backwards are not: they follow their forward's types."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)


@dataclass(frozen=True, slots=True)
class RngState:
    """The states of the random number generators at one moment, and of buffers and attributes that forwards write."""

    cpu: Tensor
    devices: list[int]
    on_devices: list[Tensor]
    #: Of Python and NumPy.
    python: Any
    left: list[tuple[dict[str, Any], str, Any]]

    @staticmethod
    def now(tensors: Iterable[Any], written: Iterable[tuple[dict[str, Any], str]] = ()) -> "RngState":
        """The state on the CPU and on the devices of these tensors; `written` is where modules keep what is written."""
        left = [(slots, key, _copied(slots.get(key, _NOTHING))) for slots, key in written]
        return RngState(torch.get_rng_state(), *get_device_states(*tensors), python_draws(), left)

    @contextmanager
    def again(self, buffers: Iterable[Tensor]) -> Iterator[None]:
        """The same random numbers once more. Afterwards they go on as if nothing had been, and so do the buffers."""
        before = [(buffer, buffer.clone()) for buffer in buffers]
        newest = [(slots, key, slots.get(key, _NOTHING)) for slots, key, _ in self.left]
        drawn = python_draws()
        for slots, key, older in self.left:
            _put(slots, key, _copied(older))  # The forward may write to it again.
        with torch.random.fork_rng(devices=self.devices):
            torch.set_rng_state(self.cpu)
            set_device_states(self.devices, self.on_devices)
            set_python_draws(self.python)
            try:
                yield
            finally:  # It may be broken off, when all that is wanted of it is there.
                set_python_draws(drawn)
                for slots, key, each in newest:
                    _put(slots, key, each)
                for buffer, value in before:
                    # Through `data`, unseen by autograd: batch norm saves its statistics for a backward that never
                    # reads them.
                    buffer.data.copy_(value)


#: What stands where nothing was.
_NOTHING = object()


def _copied(each: Any) -> Any:
    # Nothing counts up in the result of an operation: it is made anew in every forward.
    return each.detach().clone() if isinstance(each, Tensor) and each.grad_fn is None else each


def _put(slots: dict[str, Any], key: str, each: Any) -> None:
    if each is _NOTHING:
        slots.pop(key, None)
    else:
        slots[key] = each


def saving_nothing() -> AbstractContextManager[Any]:
    """Where graphs are built for their shape alone, and no backward can be run."""
    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, _unpack)


def _unpack(_: None) -> Tensor:
    raise AssertionError("a forward that is to be recomputed was not")
