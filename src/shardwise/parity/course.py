"""How a training went: what there was at each step, by the names of the original module."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

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

    `first_use` are the parameters in the order in which a forward first uses them, which one device knows. Of those
    that a rank holds, `held` says of which stage they are and how much of each is here, and `digest` is of every bit.
    """

    steps: Sequence[Step]
    first_use: Sequence[str] = ()
    held: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""


def are_looked_at(looks: Looks, step: int, num_steps: int) -> bool:
    """Whether the tensors of a step are looked at."""
    return looks == "every step" or (looks == "last step" and step == num_steps - 1)
