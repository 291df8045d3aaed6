"""A program that trains elsewhere: what of a plan it can express, how that is written, and how it is read back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cost.software import Software
from shardwise.errors import ShardwiseError
from shardwise.planner.composition import Rule
from shardwise.planner.plan import Plan

#: What a rule that takes another value for one key may have: the key, and what it becomes.
Instead = Callable[[Plan], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training step as a program is told of it. What a text does not say is None."""

    plan: Plan
    batch: int | None
    sequence: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a text leaves to the machine and the model: how many devices there are, and how many layers."""

    num_devices: int
    num_layers: int

    def replicas(self, **axes: int) -> int:
        """The data parallel ranks that are left beside other axes."""
        others = 1
        for size in axes.values():
            others *= max(size, 1)
        if self.num_devices % others:
            said = " x ".join(f"{name}={size}" for name, size in axes.items())
            raise ShardwiseError(
                f"{said} = {others} ranks do not divide the {self.num_devices} devices of the cluster",
                remedy=f"a cluster of {others} devices or a multiple of it",
            )
        return self.num_devices // others


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One program. `rules` are what it cannot express and what it does instead; `fixed` are searches worth a try.

    Layers of each stage are written always where it `names_layers`, and never where it has no pipelines (None); else
    where they are not all alike.
    """

    name: str
    title: str
    file: str
    rules: Sequence[Rule]
    fixed: Sequence[Mapping[str, Any]]
    software: Software
    write: Callable[[Job], str]
    read: Callable[[str, Machine], Job]
    names_layers: bool | None = None

    def problems(self, plan: Plan) -> list[str]:
        """What of a plan it cannot express, a sentence each."""
        return [problem for problem, _ in self._steps(plan)]

    def nearest(self, plan: Plan) -> Plan:
        """The plan, or the nearest that it can express."""
        for _, changed in self._steps(plan):
            plan = changed
        return plan

    def with_layers(self, plan: Plan, layers: tuple[int, ...]) -> Plan:
        """The plan with the layers of each stage, where the program has to be told."""
        if plan.pp == 1 or self.names_layers is None:
            return replace(plan, layers=None)
        return replace(plan, layers=layers if self.names_layers or len(set(layers)) > 1 else None)

    def _steps(self, plan: Plan) -> Iterator[tuple[str, Plan]]:
        # What one rule takes away may be what another would give back, so each is asked twice at most.
        for rule in (*self.rules, *self.rules):
            if rule.applies(plan):
                problem, plan = rule.problem(plan), rule.instead(plan)
                yield problem, plan
        assert not any(rule.applies(plan) for rule in self.rules), f"{self.name} cannot express its own {plan}"


def samples(job: Job) -> int:
    """Samples of a microbatch on one replica."""
    plan = job.plan
    return max((job.batch or plan.dp * plan.microbatches) // (plan.dp * plan.microbatches), 1)


def without_pipelines(plan: Plan) -> Plan:
    """The same devices with replicas for stages."""
    return replace(plan, dp=plan.dp * plan.pp, pp=1, schedule="1f1b", chunks=None, layers=None, order="pp-dp-cp-tp")


def rule(name: str, applies: Callable[[Plan], Any], problem: str, instead: Instead) -> Rule:
    """A rule whose sentence has the plan's own values in it: `{plan.zero}`."""
    return Rule(
        name=name,
        applies=lambda plan: bool(applies(plan)),
        problem=lambda plan: problem.format(plan=plan),
        instead=instead,
    )


def accumulations(batch: int | None, size: int, replicas: int) -> int:
    """How many microbatches of `size` make a batch on so many replicas."""
    if batch is None:
        return 1
    if batch % (size * replicas):
        raise ShardwiseError(
            f"a batch of {batch} is no whole number of microbatches of {size} on {replicas} replicas",
            remedy=f"a batch of {-(-batch // (size * replicas)) * size * replicas}",
        )
    return batch // (size * replicas)
