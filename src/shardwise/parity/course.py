"""The record of a training: the tensors of each step, by the names of the original module.

It includes the parameters as a forward used them, and the order of their use.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from shardwise.torch_private import parameter_slots

#: The steps at which tensors are recorded. Losses and norms always are.
Looks = Literal["every step", "last step", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step. Gradients are those before clipping, of the mean over the whole batch.

    `used` are the weights that its first forward used, `weights` those after the step. Both are empty if not recorded.
    """

    loss: float
    norm: float
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    used: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """All steps, as one process recorded them.

    `evaluations` are the losses of the held-out batch, by the step after which it was evaluated. One device records
    `first_use`, the parameters in the order in which a forward first uses them, and `num_dropping`, the number of
    modules with dropout. A rank records `held`, the stage and the share of each parameter that it holds; `digest`, of
    every bit of them; the number of buckets of its gradients; `updated_by`, its optimizers; `left_whole`, the reasons
    why tensor parallelism did not split layers; and the number of modules that used kernels.
    """

    steps: Sequence[Step]
    first_use: Sequence[str] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    evaluations: Mapping[int, float] = field(default_factory=dict)
    num_buckets: int = 0
    updated_by: str = ""
    left_whole: Mapping[str, str] = field(default_factory=dict)
    num_dropping: int = 0
    num_with_kernels: int = 0


def are_looked_at(looks: Looks, step: int, num_steps: int) -> bool:
    """Return whether the tensors of a step are recorded."""
    return looks == "every step" or (looks == "last step" and step == num_steps - 1)


def own_names(module: nn.Module) -> set[str]:
    """Return the names of parameters and buffers: for each its first name."""
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


class Uses:
    """Records a module's parameters whenever one of its submodules that has some is called.

    `found` has each parameter's value at its first use, in the order of use. A parameter that other ranks hold, or that
    is not gathered, is not recorded.
    """

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Uses":
        return self  # A copy of the module that is made for its shapes keeps these hooks.

    @contextmanager
    def of(self, module: nn.Module) -> Iterator["Uses"]:
        """Record within this context."""
        names = {id(each): name for name, each in module.named_parameters()}
        handles = []
        for owner in module.modules():
            own = {key: names[id(each)] for key, each in parameter_slots(owner).items() if each is not None}
            if own:
                handles.append(owner.register_forward_pre_hook(partial(self._note, own)))
        try:
            yield self
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, own: dict[str, str], owner: nn.Module, args: Any) -> None:
        del args
        for key, name in own.items():
            parameter = parameter_slots(owner)[key]
            is_here = parameter is not None and not parameter.is_meta and parameter.untyped_storage().size()
            if parameter is not None and is_here and name not in self.found:
                self.found[name] = parameter.detach().clone()
