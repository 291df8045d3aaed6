"""The blocks on each rank, what they save at the peak, and their parameters.

Either for three typical ranks (first, middle, last), or for every rank of a plan.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardwise.cost.deal import Deal, are_dealt_whole, mix
from shardwise.cost.layouts import Layouts
from shardwise.cost.numbers import Floats, Ints
from shardwise.cost.pipeline import SCHEDULES, by_schedule
from shardwise.model.model import Block, Model
from shardwise.model.share import Share
from shardwise.schedule.catalogue import CATALOGUE
from shardwise.schedule.instruction import Kind
from shardwise.schedule.schedule import Schedule

#: The places of typical ranks' stages. The first and the last have embedding and head.
PLACES = ("first", "middle", "last")
_COPIES = np.array([CATALOGUE[name].num_weight_copies for name in SCHEDULES], dtype=np.float64)
# Schedules with all forwards first: saved activations grow with the number of microbatches, unlike in a shorter step.
_HOLDS_ALL = ("gpipe", "looped-bfs")


class Places(NamedTuple):
    """Some ranks of each candidate, as arrays of candidates x places (x kinds of layer).

    `layers`: the layers of each kind on a rank. `begins` and `ends`: whether it has the blocks before and after the
    layers. `kept_*`: the same at the peak of saved activations, counted once for each microbatch in flight.
    `in_flight`: the microbatches of a whole stage at that moment.
    """

    layers: Floats
    begins: Floats
    ends: Floats
    kept_layers: Floats
    kept_begins: Floats
    kept_ends: Floats
    in_flight: Floats


def layer_kinds(model: Model) -> list[tuple[Block, int]]:
    """Return the kinds of layers with their counts."""
    return [(block, count) for block, count in model.kinds if block.stack]


def ends_of(model: Model) -> tuple[list[Block], list[Block]]:
    """Return the blocks before the first layer, and all other blocks that are not layers."""
    first = next((index for index, block in enumerate(model.blocks) if block.stack), 0)
    return list(model.blocks[:first]), [block for block in model.blocks[first:] if not block.stack]


class _Held(NamedTuple):
    p: Floats
    v: Floats
    m: Floats
    rank: Floats


def _looped(of: _Held) -> Floats:
    return np.where(of.v > 1, (2 * (of.p - of.rank - 1) + (of.v - 1) * of.p + 1) / of.v, of.p - of.rank)


# Microbatches in flight. 1F1B holds one for each stage from its own to the last; interleaved holds chunks of
# 2(p-r-1) + (v-1)p + 1 microbatches. Zero bubble schedules hold activations until W: their forms assume M_W = M_B.
_IN_FLIGHT: Mapping[str, Callable[[_Held], Floats]] = {
    "1f1b": lambda of: of.p - of.rank,
    "gpipe": lambda of: of.m,
    "interleaved": _looped,
    "looped-bfs": lambda of: of.m,
    "zb-h1": lambda of: of.p,
    "zb-h2": lambda of: 2 * of.p - 1,
    "zb-v": lambda of: of.p,
    "v-half": lambda of: (of.p + 2) // 2,
    "v-min": lambda of: (of.p + 4) // 3,
    "dualpipe": lambda of: of.p + 1,
    "dualpipe-v": lambda of: of.p + 0.5,
    "eager-1f1b": lambda of: 2 * (of.p - of.rank) - 1,
    "chimera": lambda of: of.p,
    "hanayo": lambda of: of.p,
}


def in_flight(layouts: Layouts, rank: Floats) -> Floats:
    """Return the peak number of microbatches that a rank holds for its whole stage. `rank` counts from the first."""
    p, v, m = (each.astype(np.float64) for each in (layouts.pp, layouts.chunks, layouts.num_microbatches))
    return np.minimum(by_schedule(layouts.schedule, _IN_FLIGHT, _Held(p, v, m, rank)), m)


def in_flight_under(schedules: Ints, chunks: Ints, layouts: Layouts, ranks: Sequence[Floats]) -> Floats:
    """Return the same for some ranks under each of several schedules: candidates x ranks x schedules."""
    p, m = (each.astype(np.float64) for each in (layouts.pp, layouts.num_microbatches))
    found = np.empty((len(layouts), len(ranks), len(schedules)))
    for index, (code, number) in enumerate(zip(schedules, chunks, strict=True)):
        form = _IN_FLIGHT[SCHEDULES[code]]
        for place, rank in enumerate(ranks):
            found[:, place, index] = np.minimum(form(_Held(p, np.array(number, dtype=np.float64), m, rank)), m)
    return found


def typical_places(model: Model, layouts: Layouts, dealt: Deal) -> Places:
    """Return the first, a middle and the last rank of each candidate, with layers distributed as in `dealt`."""
    counts = np.array([count for _, count in layer_kinds(model)], dtype=np.float64)
    shares = counts / max(counts.sum(), 1.0)
    alone, copies = layouts.pp == 1, _COPIES[layouts.schedule]
    last = layouts.pp.astype(np.float64) - 1.0
    ranks = (np.zeros(len(layouts)), np.minimum(1.0, last), last)
    num_held = np.stack([in_flight(layouts, rank) for rank in ranks], axis=1)
    first = dealt.first + np.where(are_dealt_whole(layouts), 0.0, dealt.extra)
    held = np.stack([first, dealt.middle + dealt.extra, dealt.last], axis=1)
    held = np.where(alone[:, None], counts.sum(), held)
    one, lone, twice = np.ones(len(layouts)), alone.astype(np.float64), (copies > 1).astype(np.float64)
    begins = np.stack([one, lone, np.maximum(lone, twice)], axis=1)
    ends = np.stack([np.maximum(lone, twice), lone, one], axis=1)
    layers = held[:, :, None] * shares
    if len(counts) > 1:
        mixture = mix(model.layer_order, len(counts), dealt)
        more = mixture.layer * dealt.extra[:, None]
        on_first = mixture.first + np.where(are_dealt_whole(layouts)[:, None], 0.0, more)
        layers = np.where(
            alone[:, None, None], layers, np.stack([on_first, mixture.middle + more, mixture.last], axis=1)
        )
    # If the pipeline has two copies of the model, half of the microbatches go through each.
    through = num_held / copies[:, None]
    return Places(
        layers=layers * copies[:, None, None],
        begins=begins,
        ends=ends,
        kept_layers=layers * num_held[:, :, None],
        kept_begins=begins * through,
        kept_ends=ends * through,
        in_flight=num_held,
    )


def rank_places(model: Model, stage_layers: Sequence[int], schedule: Schedule, num_microbatches: int) -> Places:
    """Return every rank of one pipeline, whose stages have `stage_layers`. `schedule` may be of a shorter step."""
    counts = _stage_counts(model, stage_layers)
    num_stages = len(stage_layers)
    placement = schedule.placement
    longer = num_microbatches / schedule.num_microbatches if schedule.name in _HOLDS_ALL else 1.0
    rows: list[tuple[np.ndarray, float, float, np.ndarray, float, float, float]] = []
    for rank, stages in enumerate(placement.stages):
        own = [stage % num_stages for stage in stages]
        weights = {stage: float(counts[stage % num_stages].sum()) + 1.0 for stage in stages}
        kept = {stage: count * longer for stage, count in _fullest(schedule, rank, weights).items()}
        most = sum(kept.values()) * placement.share
        rows.append(
            (
                sum((counts[stage] for stage in own), np.zeros(counts.shape[1])),
                float(own.count(0)),
                float(own.count(num_stages - 1)),
                sum((counts[stage % num_stages] * count for stage, count in kept.items()), np.zeros(counts.shape[1])),
                sum((count for stage, count in kept.items() if stage % num_stages == 0), 0.0),
                sum((count for stage, count in kept.items() if stage % num_stages == num_stages - 1), 0.0),
                most,
            )
        )
    return Places(*(np.array([column]) for column in zip(*rows, strict=True)))


def _stage_counts(model: Model, stage_layers: Sequence[int]) -> np.ndarray:
    """Return the layers of each kind on each stage: stages x kinds."""
    kinds, order = layer_kinds(model), model.layer_order
    assert sum(stage_layers) == len(order), f"{stage_layers} add up to other than {len(order)} layers"
    counts = np.zeros((len(stage_layers), len(kinds)))
    begin = 0
    for stage, number in enumerate(stage_layers):
        for kind in order[begin : begin + number]:
            counts[stage, kind] += 1
        begin += number
    return counts


def _fullest(schedule: Schedule, rank: int, weights: dict[int, float]) -> dict[int, float]:
    """Return the microbatches in flight of each stage of a rank at the peak. They are kept until the backward ends."""
    under_way = dict.fromkeys(weights, 0.0)
    fullest, held, most = dict(under_way), 0.0, 0.0
    for instruction in schedule.orders[rank]:
        for each in (instruction,) if instruction[4] is None else instruction.parts:
            kind, stage = each[0], each[1]
            if kind is Kind.F:
                under_way[stage] += 1.0
                held += weights[stage]
            elif kind is not Kind.I:
                under_way[stage] -= 1.0
                held -= weights[stage]
        if held > most:
            most, fullest = held, dict(under_way)
    return fullest


class Counts(NamedTuple):
    """Parameters before ZeRO: of a rank on each place (candidates x places), of one layer, of embedding and head.

    `layer_expert` are the parameters of a layer's experts, which have fewer replicas. `some` are the same counts of
    trained parameters only, or None if all train.
    """

    dense: Floats
    expert: Floats
    layer: Floats
    layer_expert: Floats
    ends: Floats
    expert_replicas: Floats
    some: "Counts | None" = None

    @property
    def trained(self) -> "Counts":
        """Parameters with gradients and optimizer state."""
        return self if self.some is None else self.some

    @property
    def frozen(self) -> Floats:
        """Parameters with neither, on each place."""
        return self.dense + self.expert - self.trained.dense - self.trained.expert

    @property
    def fullest(self) -> "Counts":
        """The maximum over places, as a single place."""
        dense, expert = (each.max(axis=1, keepdims=True) for each in (self.dense, self.expert))
        return self._replace(dense=dense, expert=expert, some=None if self.some is None else self.some.fullest)

    def spread(self, layouts: Layouts, stage: int) -> Floats:
        """Return a rank's number of parameters if ZeRO shards them from this stage on. Experts have fewer replicas."""
        shared = self.dense / layouts.num_sharing[:, None] + self.expert / self.expert_replicas[:, None]
        return np.where(layouts.zero[:, None] >= stage, shared, self.dense + self.expert)


def count_blocks(model: Model, layouts: Layouts, places: Places, *, cuts_experts: bool = False) -> Counts:
    """Return a rank's parameters on each place. `cuts_experts`: tensor parallel ranks have a part of each expert."""
    counts = _count(model, layouts, places, cuts_experts=cuts_experts, trained=False)
    if not model.is_partly_frozen:
        return counts
    return counts._replace(some=_count(model, layouts, places, cuts_experts=cuts_experts, trained=True))


def _count(model: Model, layouts: Layouts, places: Places, *, cuts_experts: bool, trained: bool) -> Counts:
    some, kinds = layouts.distinct(("tp", "ep", "cp"))
    share = Share(tp=some.tp, ep=some.ep, cp=some.cp, expert_tp=some.tp if cuts_experts else 1)
    zero = np.zeros(len(some))
    layers = layer_kinds(model)
    num_layers = max(sum(count for _, count in layers), 1)
    dense, expert, layer, layer_expert = np.zeros_like(places.begins), np.zeros_like(places.begins), zero, zero
    for index, (block, count) in enumerate(layers):
        experts = zero + block.num_expert_parameters_on(share, trained=trained)
        others = zero + block.num_parameters_on(share, trained=trained) - experts
        dense = dense + places.layers[:, :, index] * others[kinds, None]
        expert = expert + places.layers[:, :, index] * experts[kinds, None]
        layer = layer + (others + experts) * (count / num_layers)
        layer_expert = layer_expert + experts * (count / num_layers)
    before, after = ends_of(model)
    begin = sum((zero + block.num_parameters_on(share, trained=trained) for block in before), zero)
    end = sum((zero + block.num_parameters_on(share, trained=trained) for block in after), zero)
    # A tied head and embedding are one tensor if both are on one rank.
    tied = np.minimum(begin, end) if model.ties else zero
    outside = places.begins * begin[kinds, None] + places.ends * end[kinds, None]
    outside = outside - places.begins * places.ends * tied[kinds, None]
    alike = layouts.replicas * (1 if cuts_experts else layouts.tp) / layouts.ep
    return Counts(
        dense + outside,
        expert,
        layer[kinds],
        layer_expert[kinds],
        (begin + end)[kinds],
        np.maximum(alike, 1.0),
    )
