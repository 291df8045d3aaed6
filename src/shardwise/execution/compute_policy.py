"""How stages are computed: activation recomputation and precision.

A recomputation uses the random numbers of the original forward (dropout drops the same elements) and leaves buffers
unchanged (batch norm counts a microbatch once):

    layer by layer    inside the backward, each layer when the backward reaches it (`stages/recompute.py`)
    a whole stage     before a backward that runs in two halves. The original forward still builds its graph, with no
                      saved tensors: the graph tells which values require a gradient.
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
from shardwise.stages.split.python_draws import python_draws, set_python_draws

#: Under fp8, operations that are not in 8 bits run in bf16.
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, **dict.fromkeys(FP8_SCALES, torch.bfloat16)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePolicy:
    """How stages are computed. `autocast` is the type for matmuls and similar; None uses the parameters' own types.

    In fp16, small gradients underflow unless the loss is scaled. The provider of the loss does that: of a loss given as
    sum and count it scales both, so the mean is unchanged (`training/precision.py`).
    """

    recompute: Literal["none", "layers", "stage"] = "none"
    #: Whether results of matmuls and attention are kept, and only the rest is recomputed.
    selective: bool = False
    autocast: torch.dtype | None = None

    @staticmethod
    def of(plan: Plan, schedule: Schedule | None = None, *, casts: bool = True) -> "ComputePolicy":
        """Return the policy of a plan. Without `casts`, a module is computed in its own types."""
        how: Literal["layers", "stage"] = "stage" if schedule is not None and schedule.splits_backward else "layers"
        return ComputePolicy(
            recompute="none" if plan.recompute == "none" else how,
            selective=plan.recompute == "selective",
            autocast=_AUTOCAST.get(plan.precision) if casts else None,
        )

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the autocast context for forwards and losses. Backwards need none: they use their forward's types."""
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)


@dataclass(frozen=True, slots=True)
class RngState:
    """A snapshot of the random number generators, and of the buffers and attributes that forwards write to."""

    cpu: Tensor
    devices: list[int]
    on_devices: list[Tensor]
    #: The generators of Python and NumPy.
    python: Any
    left: list[tuple[dict[str, Any], str, Any]]

    @staticmethod
    def now(tensors: Iterable[Any], written: Iterable[tuple[dict[str, Any], str]] = ()) -> "RngState":
        """Take a snapshot for the CPU and the devices of these tensors; `written` are the slots forwards write to."""
        left = [(slots, key, _copied(slots.get(key, _NOTHING))) for slots, key in written]
        return RngState(torch.get_rng_state(), *get_device_states(*tensors), python_draws(), left)

    @contextmanager
    def again(self, buffers: Iterable[Tensor]) -> Iterator[None]:
        """Draw the same random numbers inside this context. On exit, restore the generators and buffers."""
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
            finally:  # A recomputation may stop early, as soon as it has made all that is needed.
                set_python_draws(drawn)
                for slots, key, each in newest:
                    _put(slots, key, each)
                for buffer, value in before:
                    # Through `data`, unseen by autograd: batch norm saves its statistics for a backward that never
                    # reads them.
                    buffer.data.copy_(value)


#: Marks a slot that was empty.
_NOTHING = object()


def _copied(each: Any) -> Any:
    # The result of an operation is no running state: every forward makes it anew. So it needs no copy.
    return each.detach().clone() if isinstance(each, Tensor) and each.grad_fn is None else each


def _put(slots: dict[str, Any], key: str, each: Any) -> None:
    if each is _NOTHING:
        slots.pop(key, None)
    else:
        slots[key] = each


def saving_nothing() -> AbstractContextManager[Any]:
    """Return a context in which graphs save no tensors: they have their structure, but no backward can run."""
    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, _unpack)


def _unpack(_: None) -> Tensor:
    raise AssertionError("a forward that is to be recomputed was not")
