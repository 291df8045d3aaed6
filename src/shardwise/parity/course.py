"""How a training went: what there was at each step, by the names of the original module.

And what parameters were when a forward used them, and in which order it did.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from shardwise.torch_private import parameter_slots

#: At which steps tensors are looked at. Losses and norms are always.
Looks = Literal["every step", "last step", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step. Gradients are those before clipping, of the mean over the whole batch.

    `used` are the weights as its first forward found them, `weights` those after it. What was not looked at is empty.
    """

    loss: float
    norm: float
    gradients: Mapping[str, Tensor] = field(default_factory=dict)
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    used: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """All steps as one process saw them.

    `evaluations` are the losses of the batch that is held out, by the step after which it was looked at. One device
    knows `first_use`, the parameters in the order in which a forward first uses them, and `num_dropping`, how many
    modules drop at random. Of those that a rank holds, `held` says of which stage they are and how much of each is
    here, and `digest` is of every bit; it knows in how many buckets its gradients were summed, `updated_by` which
    optimizer its weights were, why layers were `left_whole` by tensor parallelism, and how many modules computed by
    kernels.
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
    """Whether the tensors of a step are looked at."""
    return looks == "every step" or (looks == "last step" and step == num_steps - 1)


def own_names(module: nn.Module) -> set[str]:
    """The names of parameters and buffers, each of its first name alone."""
    return {name for name, _ in (*module.named_parameters(), *module.named_buffers())}


class Uses:
    """Looks at a module's parameters whenever one of its modules that has some is called.

    `found` is what each was at its first use, in the order of these. A parameter that others hold, or that is not
    gathered, is not used.
    """

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> "Uses":
        return self  # A copy of the module, for its shapes alone, has the same hooks.

    @contextmanager
    def of(self, module: nn.Module) -> Iterator["Uses"]:
        """Look while something is run."""
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
