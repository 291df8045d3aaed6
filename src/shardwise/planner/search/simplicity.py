"""How far a plan is from a plain one, as a factor on its seconds: what is out of the ordinary has to pay for itself.

No prediction tells a few per cent apart, and what cannot be told apart is not worth another axis. So the answer is the
plainest of all that are within 3 % of the fastest: the one with the least seconds times this factor. Every axis in use
has to gain 3 %, and so has every doubling beyond what people run (pipelines of more than 16 ranks, tensor parallelism
beyond the fast links; contexts of fewer than 4,096 positions on a rank count as four). What is on the host has to gain
as much as three axes, and as four if it crosses with every microbatch; everything else that a person would have to
explain has to gain 1 %.

Two things are doubted: before plans are compared with the fastest they count as slower than they are predicted. What
is on the host does by 9 or 12 %: nobody publishes a run with it where one fits without. Contexts of fewer than 4,096
positions on a rank do by up to 3 %: no published run has them. Pipelines are published up to 64 ranks, with steps as
well predicted as those of others, so deep ones are not doubted; nor is tensor parallelism over a network.

A factor is a product of what axes, recomputation, schedule, ZeRO and the host each add, so that bounds of candidates
that are not complete may be multiplied by what is known of theirs.
"""

import numpy as np

from shardwise.cost.layouts import Layouts
from shardwise.cost.numbers import Floats, Ints
from shardwise.cost.pipeline import SCHEDULES
from shardwise.planner.question import Question
from shardwise.schedule.catalogue import CATALOGUE

#: Plans whose seconds are no further apart are as fast as each other, as far as can be told.
BAND = 0.03
#: What an axis has to gain, and what else a person would have to explain.
AXIS, ODDITY = 0.03, 0.01
#: The least that the host adds, if anything is there.
ANY_HOST = (1.0 + AXIS) ** 3
_DEEP, _SHORT, _MANY_CHUNKS = 16, 4096, 4
# No published run has contexts so short on a rank.
_SHORT_COUNTS = 4.0
# How far schedules are from plain; those that are not named are further than all of these.
_PLAINNESS = {"1f1b": 0, "gpipe": 1, "interleaved": 1, "looped-bfs": 2, "zb-h1": 2}
_ODD = np.array([_PLAINNESS.get(name, 3) + 2 * (CATALOGUE[name].num_weight_copies > 1) for name in SCHEDULES])


def handicap(question: Question, layouts: Layouts) -> Floats:
    """The factor of complete candidates."""
    found = of_axes(question, layouts) * of_schedules(layouts.schedule, layouts.chunks)
    return found * of_zeros(layouts.zero, layouts.zero_group) * of_host(layouts)


def doubt(question: Question, layouts: Layouts) -> Floats:
    """The part of it that is asked before plans count as equally fast: of the host, and of what nobody has shown."""
    return unproven(question, layouts) * of_host(layouts)


def unproven(question: Question, layouts: Layouts) -> Floats:
    """What is asked of contexts that are shorter than any that was published: as of one axis, however short."""
    return _factor(np.minimum(_shortness(question, layouts), 1.0), 0.0)


def of_axes(question: Question, layouts: Layouts) -> Floats:
    """What axes and recomputation add. Experts are shared out in every plan for a mixture, and are no axis here."""
    deep, wide, short = _beyond(question, layouts)
    axes = sum((size > 1).astype(np.float64) for size in (layouts.tp, layouts.pp, layouts.cp))
    odd = (layouts.recompute > 0) * (1 + (layouts.recompute_share < 1)) + (layouts.order > 0)
    return _factor(axes + deep + wide + _SHORT_COUNTS * short, odd)


def _beyond(question: Question, layouts: Layouts) -> tuple[Floats, Floats, Floats]:
    """How often pipelines, tensor parallelism and contexts were doubled or halved beyond what people run."""
    domain = min(pool.domain for pool in question.cluster.pools)
    return _doublings(layouts.pp / _DEEP), _doublings(layouts.tp / domain), _shortness(question, layouts)


def _shortness(question: Question, layouts: Layouts) -> Floats:
    return np.where(layouts.cp > 1, _doublings(_SHORT * layouts.cp / question.sequence), 0.0)


def of_schedules(code: Ints, chunks: Ints) -> Floats:
    """What schedules add. One rank has 1F1B, which adds nothing."""
    return _factor(0.0, _ODD[code] + _doublings(chunks / _MANY_CHUNKS))


def of_zeros(zero: Ints, group: Ints) -> Floats:
    """What sharing out all weights, or states in groups of replicas, adds."""
    return _factor(0.0, (zero == 3).astype(np.float64) + (group != 0))


def of_host(layouts: Layouts) -> Floats:
    """What the host adds: weights and activations cross with every microbatch, optimizer state once a step."""
    often = (layouts.offload_parameters > 0) | (layouts.offload_activations > 0)
    return np.where(often, _factor(4.0, 0.0), np.where(layouts.offload_optimizer > 0, ANY_HOST, 1.0))


def _doublings(ratio: Floats) -> Floats:
    return np.asarray(np.log2(np.maximum(ratio, 1.0)))


def _factor(axes: Floats | float, odd: Floats | float) -> Floats:
    return np.asarray((1.0 + AXIS) ** axes * (1.0 + ODDITY) ** odd)
