"""The handicap of a complex plan, as a factor on its seconds: what is out of the ordinary has to pay for itself.

Predictions do not resolve a few per cent, and a difference below that is not worth another axis. So the answer is the
simplest plan within 3 % of the fastest: the one with the least seconds times this factor. Every axis in use has to gain
3 %, and so has every doubling beyond common practice (pipelines of more than 16 ranks, tensor parallelism beyond the
fast links; a context of fewer than 4,096 positions on a rank counts as four). Offload has to gain as much as three
axes, and as four if it moves data with every microbatch. Any other choice that needs an explanation has to gain 1 %.

Two things are doubted: such plans count as slower than predicted before they are compared with the fastest. Offload
counts as slower by 9 or 12 %: no published run uses it where the model fits without. Contexts of fewer than 4,096
positions on a rank count as slower by up to 3 %: no published run has them. Pipelines of up to 64 ranks are published,
and their steps are predicted as well as others, so deep pipelines are not doubted; nor is tensor parallelism over a
network.

The factor is a product of factors for axes, recomputation, schedule, ZeRO and offload. So bounds of incomplete
candidates can be multiplied by the factors that are already known.
"""

import numpy as np

from shardwise.cost.layouts import Layouts
from shardwise.cost.numbers import Floats, Ints
from shardwise.cost.pipeline import SCHEDULES
from shardwise.planner.question import Question
from shardwise.schedule.catalogue import CATALOGUE

#: Plans whose seconds differ by no more than this count as equally fast.
BAND = 0.03
#: What an axis has to gain, and any other choice that needs an explanation.
AXIS, ODDITY = 0.03, 0.01
#: The least factor of any offload.
ANY_HOST = (1.0 + AXIS) ** 3
_DEEP, _SHORT, _MANY_CHUNKS = 16, 4096, 4
# Each halving of a short context on a rank counts as this many axes: no published run has one.
_SHORT_COUNTS = 4.0
# The complexity of schedules; others are more complex than all of these.
_PLAINNESS = {"1f1b": 0, "gpipe": 1, "interleaved": 1, "looped-bfs": 2, "zb-h1": 2}
_ODD = np.array([_PLAINNESS.get(name, 3) + 2 * (CATALOGUE[name].num_weight_copies > 1) for name in SCHEDULES])


def handicap(question: Question, layouts: Layouts) -> Floats:
    """Return the factor of complete candidates."""
    found = of_axes(question, layouts) * of_schedules(layouts.schedule, layouts.chunks)
    return found * of_zeros(layouts.zero, layouts.zero_group) * of_host(layouts)


def doubt(question: Question, layouts: Layouts) -> Floats:
    """Return the part of the factor that applies before plans count as equally fast: for offload and short contexts."""
    return unproven(question, layouts) * of_host(layouts)


def unproven(question: Question, layouts: Layouts) -> Floats:
    """Return the factor of contexts shorter than any published: that of one axis, however short."""
    return _factor(np.minimum(_shortness(question, layouts), 1.0), 0.0)


def of_axes(question: Question, layouts: Layouts) -> Floats:
    """Return the factor of axes and recomputation. Expert parallelism is common to all mixtures and not counted."""
    deep, wide, short = _beyond(question, layouts)
    axes = sum((size > 1).astype(np.float64) for size in (layouts.tp, layouts.pp, layouts.cp))
    odd = (layouts.recompute > 0) * (1 + (layouts.recompute_share < 1)) + (layouts.order > 0)
    return _factor(axes + deep + wide + _SHORT_COUNTS * short, odd)


def _beyond(question: Question, layouts: Layouts) -> tuple[Floats, Floats, Floats]:
    """Return how often pipelines, tensor parallelism and contexts are doubled or halved beyond common practice."""
    domain = min(pool.domain for pool in question.cluster.pools)
    return _doublings(layouts.pp / _DEEP), _doublings(layouts.tp / domain), _shortness(question, layouts)


def _shortness(question: Question, layouts: Layouts) -> Floats:
    return np.where(layouts.cp > 1, _doublings(_SHORT * layouts.cp / question.sequence), 0.0)


def of_schedules(code: Ints, chunks: Ints) -> Floats:
    """Return the factor of schedules. One rank has 1F1B, whose factor is 1."""
    return _factor(0.0, _ODD[code] + _doublings(chunks / _MANY_CHUNKS))


def of_zeros(zero: Ints, group: Ints) -> Floats:
    """Return the factor of ZeRO-3, and of ZeRO in groups of replicas."""
    return _factor(0.0, (zero == 3).astype(np.float64) + (group != 0))


def of_host(layouts: Layouts) -> Floats:
    """Return the factor of offload: weights and activations move with every microbatch, optimizer state once a step."""
    often = (layouts.offload_parameters > 0) | (layouts.offload_activations > 0)
    return np.where(often, _factor(4.0, 0.0), np.where(layouts.offload_optimizer > 0, ANY_HOST, 1.0))


def _doublings(ratio: Floats) -> Floats:
    return np.asarray(np.log2(np.maximum(ratio, 1.0)))


def _factor(axes: Floats | float, odd: Floats | float) -> Floats:
    return np.asarray((1.0 + AXIS) ** axes * (1.0 + ODDITY) ** odd)
