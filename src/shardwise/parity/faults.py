"""Fault injection, to verify that a check detects faults: bugs that other frameworks have shipped.

Each is injected at one place of an engine that is ready to train, into one tensor if possible. A plan for which a fault
is not possible is refused before any launch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from shardwise.errors import ShardwiseError, unknown
from shardwise.parity import breaking
from shardwise.parity.ranks import Break
from shardwise.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The target of a fault. `length` is that of sequences. `vocabulary` is None for modules without one."""

    plan: Plan
    module: nn.Module
    num_steps: int
    vocabulary: int | None
    length: int | None

    @property
    def replicas(self) -> int:
        return self.plan.dp * self.plan.cp

    @property
    def is_tied(self) -> bool:
        named = len(list(self.module.named_parameters(remove_duplicate=False)))
        return named > len(list(self.module.named_parameters()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault: `says` describes it; `refuses` returns why it is not possible, and a plan or option for which it is."""

    says: str
    refuses: Callable[[Subject], tuple[str, str] | None]
    breaks: Break


def _no_reduction(subject: Subject) -> tuple[str, str] | None:
    if subject.replicas > 1 or subject.plan.tp > 1 or (subject.plan.pp > 1 and subject.is_tied):
        return None
    why = "nothing is summed over ranks: there are no replicas, no tensor parallel ranks and no tied stages"
    return why, "--plan dp=2"


def _no_shard(subject: Subject) -> tuple[str, str] | None:
    if subject.plan.tp > 1 or subject.plan.ep > 1 or subject.plan.zero:
        return None
    return "every tensor is whole where it is held", "--plan tp=2, or --plan dp=2,zero=1"


def _no_padding(subject: Subject) -> tuple[str, str] | None:
    plan, words, length = subject.plan, subject.vocabulary, subject.length
    if plan.tp > 1 and words is not None and words % plan.tp:
        return None
    if plan.cp > 1 and length is not None and length % (2 * plan.cp):
        return None
    if plan.tp > 1 and words is not None:
        return f"a vocabulary of {words} divides by tp={plan.tp}, so nothing is padded", "--model gpt2"
    return "nothing is padded without tp (a vocabulary) or cp (a sequence)", "--plan tp=2"


def _no_gather(subject: Subject) -> tuple[str, str] | None:
    if not subject.plan.zero:
        why = f"weights are whole on all replicas under zero={subject.plan.zero}, so none is gathered"
        return why, "--plan dp=2,zero=3"
    if subject.num_steps < 2:
        return "a stale weight shows from the second step on, and there is 1", "--steps 2"
    return None


FAULTS: Mapping[str, Fault] = {
    "unscaled-gradients": Fault(
        says="gradients are not divided by what the loss is summed over",
        refuses=lambda subject: None,  # noqa: ARG005 - every plan divides
        breaks=breaking.unscale,
    ),
    "missing-reduction": Fault(
        says="one gradient is not summed over the ranks", refuses=_no_reduction, breaks=breaking.forget_a_sum
    ),
    "swapped-shard": Fault(says="a rank has the shard of its neighbour", refuses=_no_shard, breaks=breaking.swap),
    "unmasked-padding": Fault(says="padding counts in the loss", refuses=_no_padding, breaks=breaking.unmask),
    "stale-gather": Fault(
        says="weights of other ranks are not gathered again after a step",
        refuses=_no_gather,
        breaks=breaking.keep_stale,
    ),
}


def get_fault(name: str, subject: Subject) -> Fault:
    """Return the fault of a name, if it can be injected there."""
    if name not in FAULTS:
        error = unknown("fault", name, FAULTS)
        raise ShardwiseError(error.problem, remedy=f"--inject {error.remedy or next(iter(FAULTS))}")
    reason = FAULTS[name].refuses(subject)
    if reason is not None:
        why, remedy = reason
        raise ShardwiseError(f"{name} cannot be injected under {subject.plan}: {why}", remedy=remedy)
    return FAULTS[name]
