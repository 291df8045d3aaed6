"""Another training program: what it can express of a plan, and how plans are written and read."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cost.software import Software
from shardwise.errors import ShardwiseError
from shardwise.planner.composition import Rule
from shardwise.planner.plan import Plan

#: The substitute of a rule: maps a plan to one that the program can express.
Instead = Callable[[Plan], Plan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training step as a program describes it. What a text does not say is None."""

    plan: Plan
    batch: int | None
    sequence: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a text leaves to the machine and the model: the numbers of devices and of layers."""

    num_devices: int
    num_layers: int

    def replicas(self, **axes: int) -> int:
        """Return the data parallel ranks that the other axes leave."""
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
    """One program. `rules` say what it cannot express and what it does instead; `fixed` are searches worth trying.

    The layers of each stage are always written if it `names_layers`, never if it has no pipelines (None), and otherwise
    if they differ.
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
        """Return what the program cannot express of a plan, a sentence each."""
        return [problem for problem, _ in self._steps(plan)]

    def nearest(self, plan: Plan) -> Plan:
        """Return the plan, or the nearest that the program can express."""
        for _, changed in self._steps(plan):
            plan = changed
        return plan

    def with_layers(self, plan: Plan, layers: tuple[int, ...]) -> Plan:
        """Return the plan with the layers of each stage, if the program needs them."""
        if plan.pp == 1 or self.names_layers is None:
            return replace(plan, layers=None)
        return replace(plan, layers=layers if self.names_layers or len(set(layers)) > 1 else None)

    def _steps(self, plan: Plan) -> Iterator[tuple[str, Plan]]:
        # The substitute of one rule may need another rule, so each is applied up to twice.
        for rule in (*self.rules, *self.rules):
            if rule.applies(plan):
                problem, plan = rule.problem(plan), rule.instead(plan)
                yield problem, plan
        assert not any(rule.applies(plan) for rule in self.rules), f"{self.name} cannot express its own {plan}"


def samples(job: Job) -> int:
    """Return the samples of a microbatch on one replica."""
    plan = job.plan
    return max((job.batch or plan.dp * plan.microbatches) // (plan.dp * plan.microbatches), 1)


def without_pipelines(plan: Plan) -> Plan:
    """Return a plan for the same devices with replicas in place of stages."""
    return replace(plan, dp=plan.dp * plan.pp, pp=1, schedule="1f1b", chunks=None, layers=None, order="pp-dp-cp-tp")


def rule(name: str, applies: Callable[[Plan], Any], problem: str, instead: Instead) -> Rule:
    """Return a rule whose sentence may contain values of the plan: `{plan.zero}`."""
    return Rule(
        name=name,
        applies=lambda plan: bool(applies(plan)),
        problem=lambda plan: problem.format(plan=plan),
        instead=instead,
    )


def accumulations(batch: int | None, size: int, replicas: int) -> int:
    """Return how many microbatches of `size` make a batch on this many replicas."""
    if batch is None:
        return 1
    if batch % (size * replicas):
        raise ShardwiseError(
            f"a batch of {batch} is no whole number of microbatches of {size} on {replicas} replicas",
            remedy=f"a batch of {-(-batch // (size * replicas)) * size * replicas}",
        )
    return batch // (size * replicas)
