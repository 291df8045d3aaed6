"""Memory of one plan on every rank, whether it fits, and the seconds of its step.

The search prices thousands of candidates by typical ranks and closed forms. An account of one plan is exact: with its
layers on every stage, each rank's memory in the order of its own instructions, and a simulation of the schedule.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.cost.constants import CONSTANTS
from shardwise.cost.layouts import BALANCE, CONTEXT, ORDERS, RECOMPUTE, Layouts
from shardwise.cost.memory import StepBytes, fitting_odds, step_bytes
from shardwise.cost.pipeline import SCHEDULES
from shardwise.cost.places import layer_kinds, rank_places
from shardwise.cost.play import end_weights, play, share_layers, short_schedule
from shardwise.cost.stage import Pieces, Pricer
from shardwise.cost.step import HOST_TAKEN, Estimate, spread
from shardwise.errors import ShardwiseError
from shardwise.model.operations import Router
from shardwise.planner.plan import AXES, Plan, largest_divisor
from shardwise.planner.question import Question
from shardwise.schedule.schedule import Schedule
from shardwise.units import counted

# Parts of the closed forms that a simulation of the pipeline replaces.
_IN_PIPELINE = ("compute", "recompute", "tp", "cp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBytes:
    """Peak bytes of the ranks at one place of the pipeline, by part. All their replicas have the same."""

    place: int
    num_ranks: int
    parts: Mapping[str, float]
    on_host: float
    capacity: float

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def headroom(self) -> float:
        """Free bytes; negative if the rank does not fit."""
        return self.capacity - self.total


@dataclass(frozen=True, kw_only=True)
class Account:
    """A priced plan: seconds of a step with their 90 % interval and their parts, and every rank's bytes."""

    question: Question
    plan: Plan
    layers: tuple[int, ...]
    seconds: float
    low: float
    high: float
    parts: Mapping[str, float]
    ranks: tuple[RankBytes, ...]
    #: Bytes that all ranks of a node keep on its host, and the bytes that the host has for them.
    host_bytes: float
    host_capacity: float

    @property
    def text(self) -> str:
        """The plan as it can be typed."""
        return typed(self.question, self.plan)

    @cached_property
    def fullest(self) -> RankBytes:
        """The rank with the least free memory."""
        return min(self.ranks, key=lambda rank: rank.headroom)

    @property
    def fits(self) -> bool:
        return self.fullest.total <= self.question.room and self.host_bytes <= self.host_capacity

    @property
    def odds(self) -> float:
        """Probability that the plan fits, from the error of our predictions of memory."""
        if self.question.device.architecture == "cpu":
            return float(self.fits)  # On CPUs there is no fragmentation, and a tensor's bytes are exact.
        return fitting_odds(self.fullest.total, self.fullest.capacity)

    @property
    def microbatch(self) -> int:
        return self.question.batch // (self.plan.dp * self.plan.microbatches)

    @property
    def tokens_per_second(self) -> float:
        return self.question.batch * self.question.sequence / self.seconds


def typed(question: Question, plan: Plan) -> str:
    """Return the short form of a plan with its precision: on GPUs, a text without one stands for 16 bits."""
    is_said = plan.precision != Plan().precision or question.device.architecture == "cpu"
    return str(plan) if is_said else f"{plan},precision={plan.precision}"


def account(question: Question, plan: Plan) -> Account:
    """Return the account of a plan. It must use all devices of the cluster and divide the batch."""
    check_question(question, plan)
    layouts = layouts_of(question, plan)
    pricer = _slowest(question, plan)
    pieces = pricer.pieces(layouts)
    found = question.price(layouts, pricer.software, pieces)
    stages = stage_layers(question, plan, pieces)
    parts = _played(pricer, layouts, plan, pieces, stages, found)
    seconds = sum(parts.values())
    has_experts = any(isinstance(each, Router) for block, _ in question.model.kinds for each in block.operations)
    arrays = {name: np.array([part]) for name, part in parts.items()}
    wide = spread(
        arrays, np.array([seconds]), has_experts=has_experts, device=pricer.pool.device, software=pricer.software
    )
    width = float(wide[0])
    held = _rank_bytes(question, plan, layouts, stages, pricer)
    node = question.cluster.pools[0].node
    return Account(
        question=question,
        plan=plan,
        layers=stages,
        seconds=seconds,
        low=seconds / (1 + width),
        high=seconds * (1 + width),
        parts=parts,
        ranks=_ranks(question, plan, held),
        host_bytes=float(held.host[0]) * node.devices_per_node,
        host_capacity=HOST_TAKEN * node.host.memory_bytes,
    )


def check_question(question: Question, plan: Plan) -> None:
    """Refuse a plan for another number of devices, another batch, or more stages or ranks than layers or experts."""
    devices = question.cluster.num_devices
    if plan.num_ranks != devices:
        sizes = " x ".join(f"{axis}={getattr(plan, axis)}" for axis in ("dp", "tp", "pp", "cp"))
        fitting = devices * plan.dp // plan.num_ranks
        is_whole = fitting >= 1 and devices * plan.dp % plan.num_ranks == 0
        raise ShardwiseError(
            f"the plan is for {sizes} = {counted(plan.num_ranks, 'rank')}, but {question.cluster} has "
            f"{counted(devices, 'device')}",
            remedy=f"dp={fitting}" if is_whole else f"axes that multiply to {devices}",
        )
    step = plan.dp * plan.microbatches
    if question.batch % step:
        below = question.batch - question.batch % step
        fewer = largest_divisor(question.batch // plan.dp, plan.microbatches) if question.batch % plan.dp == 0 else None
        raise ShardwiseError(
            f"a batch of {question.batch} cannot be divided over dp={plan.dp} x microbatches={plan.microbatches}"
            f" = {step}",
            remedy=f"--batch {below or step}" + (f", or microbatches={fewer}" if fewer else ""),
        )
    if plan.schedule == "pipedream-2bw":
        raise ShardwiseError(
            "schedule=pipedream-2bw trains with weights that are one step old, and its step is not priced",
            remedy="schedule=1f1b",
        )
    if question.num_experts % plan.ep and question.cuts_layers:  # In a traced module, experts are unknown.
        raise ShardwiseError(
            f"{question.model.name} {question.experts_text}, which ep={plan.ep} cannot share out",
            remedy=f"ep={largest_divisor(question.num_experts, plan.ep)}",
        )
    num_layers = question.model.num_layers
    stages = plan.num_stages or plan.pp
    if plan.pp > 1 and stages > num_layers:
        raise ShardwiseError(
            f"pp={plan.pp} with {counted(plan.num_chunks or 1, 'chunk')} on a rank makes {stages} stages, but "
            f"{question.model.name} has {counted(num_layers, 'layer')}",
            remedy=f"pp={max(num_layers // (plan.num_chunks or 1), 1)}",
        )
    if plan.layers is not None and sum(plan.layers) != num_layers:
        raise ShardwiseError(
            f"layers adds up to {sum(plan.layers)}, but {question.model.name} has {num_layers}",
            remedy="leave layers out, and they are balanced",
        )


def layouts_of(question: Question, *plans: Plan) -> Layouts:
    """Return layouts with the plans as the only candidates."""
    rows = [_columns_of(question, plan) for plan in plans]
    return Layouts.of(**{name: [row[name] for row in rows] for name in rows[0]}, balance=BALANCE.index("ranks"))


def _columns_of(question: Question, plan: Plan) -> dict[str, float]:
    schedule = "1f1b" if plan.schedule == "auto" else plan.schedule
    per_stage = -(-question.model.num_layers // plan.pp)
    share = 1.0 if plan.recompute_layers is None else min(plan.recompute_layers / max(per_stage, 1), 1.0)
    return {
        **{axis: getattr(plan, axis) for axis in AXES},
        "chunks": _stages_of(plan) // plan.pp,
        "microbatch": question.batch // (plan.dp * plan.microbatches),
        "num_microbatches": plan.microbatches,
        "zero": plan.zero,
        "zero_group": plan.zero_group or 0,
        "recompute": RECOMPUTE.index(plan.recompute),
        "recompute_share": share,
        "sequence_parallel": plan.sp,
        "schedule": SCHEDULES.index(schedule),
        "context": CONTEXT.index(plan.context),
        "order": ORDERS.index(plan.order),
        "offload_optimizer": plan.offload.optimizer,
        "offload_parameters": plan.offload.parameters,
        "offload_activations": plan.offload.activations,
    }


def stage_layers(question: Question, plan: Plan, pieces: Pieces) -> tuple[int, ...]:
    """Return the layers of each stage: the plan's, or balanced by the time of layers, embedding and head."""
    num_layers, num_stages = question.model.num_layers, _stages_of(plan)
    if plan.layers is not None:
        return plan.layers
    if num_stages == 1 or num_layers == 0:
        return (num_layers,)
    counts = [count for _, count in layer_kinds(question.model)]
    ends = end_weights(pieces, num_layers, counts)
    return share_layers(num_layers, _schedule(plan).placement.ranks[:num_stages], *ends)


def _schedule(plan: Plan) -> Schedule:
    """Return the plan's schedule, or that of a shorter step. What `auto` finds is not known yet: at worst 1F1B."""
    if plan.schedule == "auto":
        return short_schedule(
            "interleaved" if _stages_of(plan) > plan.pp else "1f1b", plan.pp, plan.microbatches, plan.chunks
        )
    return short_schedule(plan.schedule, plan.pp, plan.microbatches, plan.chunks)


def _stages_of(plan: Plan) -> int:
    return plan.num_stages or plan.pp * (plan.chunks or 1)


def _slowest(question: Question, plan: Plan) -> Pricer:
    """Return the pricer of the slowest pool, which sets the pace."""
    software, layouts = question.software_in(plan.precision), layouts_of(question, plan)
    pricers = [
        Pricer(model=question.model, pool=pool, software=software, constants=CONSTANTS, sequence=question.sequence)
        for pool in question.cluster.pools
    ]
    return pricers[0] if len(pricers) == 1 else max(pricers, key=lambda each: _work(each, layouts))


def _work(pricer: Pricer, layouts: Layouts) -> float:
    """Return the seconds of one microbatch on a layer of each kind, embedding and head, to compare pools."""
    kinds, begin, end = pricer.pieces(layouts)
    return sum(float(work.total[0]) for work in (*kinds, begin, end))


def _played(
    pricer: Pricer, layouts: Layouts, plan: Plan, pieces: Pieces, stages: tuple[int, ...], found: Estimate
) -> dict[str, float]:
    """Return the parts of a step, those of the pipeline by simulation, or by closed forms if that takes too long."""
    parts = {name: float(part[0]) for name, part in found.parts.items()}
    if plan.pp == 1 or plan.schedule == "auto":
        return parts
    played = play(pricer, layouts, plan.schedule, plan.chunks, stages, pieces)
    if played is None:
        return parts
    inside = sum(parts[name] for name in _IN_PIPELINE)
    scale = played.work / inside
    parts |= {name: parts[name] * scale for name in _IN_PIPELINE}
    idle = played.seconds - played.work
    hops = min(parts["hops"], idle)
    return {**parts, "bubble": idle - hops, "hops": hops}


def ends_of(found: Account) -> tuple[float, float]:
    """Return how many layers take as long as the embedding, and as the head, under the plan of an account."""
    pieces = _slowest(found.question, found.plan).pieces(layouts_of(found.question, found.plan))
    model = found.question.model
    return end_weights(pieces, model.num_layers, [count for _, count in layer_kinds(model)])


def hold(question: Question, plan: Plan) -> tuple[RankBytes, ...]:
    """Return the bytes of every rank of a plan, without the seconds of its step."""
    layouts, pricer = layouts_of(question, plan), _slowest(question, plan)
    stages = plan.layers or stage_layers(question, plan, pricer.pieces(layouts))
    return _ranks(question, plan, _rank_bytes(question, plan, layouts, stages, pricer))


def _rank_bytes(question: Question, plan: Plan, layouts: Layouts, stages: tuple[int, ...], pricer: Pricer) -> StepBytes:
    places = rank_places(question.model, stages, _schedule(plan), plan.microbatches)
    return step_bytes(
        question.model, question.device, layouts, places, sequence=question.sequence, software=pricer.software
    )


def _ranks(question: Question, plan: Plan, held: StepBytes) -> tuple[RankBytes, ...]:
    on_host = sum(held.on_host.values(), np.zeros(()))
    return tuple(
        RankBytes(
            place=place,
            num_ranks=plan.num_ranks // plan.pp,
            parts={name: float(part[0, place]) for name, part in held.parts.items()},
            on_host=float(on_host[0, place]),
            capacity=float(question.device.memory_bytes),
        )
        for place in range(plan.pp)
    )
