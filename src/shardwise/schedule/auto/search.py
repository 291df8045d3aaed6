"""Finds the best schedule for given times, hops and memory.

Candidates are the named schedules, so that the answer is never slower than one of them under the same memory; their
orders packed anew with the real times, with weight gradients in the gaps; orders between them, made from building
blocks of other spacings; and packings that follow no order. Except for the named schedules, all are tried on few
microbatches first, and the most promising on all.

    shardwise schedule auto --stages 3 --microbatches 5 --memory 2.5

    rank 0  F0 F1 F2 F3 .  f0 i0 w0 .  .  f1 i1 I0 w1 f2 i2 I1 W0 F4 w2 f3 i3 I2 W1 w3 f4 i4 I3 W2 w4 W3 I4 W4
    rank 1  .  F0 F1 F2 f0 F3 .  i0 w0 f1 I0 W0 i1 f2 w1 I1 i2 W1 f3 F4 I2 w2 i3 W2 f4 w3 I3 i4 W3 w4 I4 W4 .
    rank 2  .  .  F0 f0 F1 f1 F2 .  i0 I0 w0 f2 W0 i1 I1 F3 w1 f3 i2 I2 W1 F4 w2 f4 i3 I3 W2 w3 i4 I4 W3 w4 W4
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from shardwise.errors import ShardwiseError
from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.generators.building_block import repeat_block, spaced_block
from shardwise.schedule.instruction import Kind
from shardwise.schedule.packing import Packed, Policy, Sequences, pack
from shardwise.schedule.passes.backward import split_backward
from shardwise.schedule.placement import Placement, loop, vee
from shardwise.schedule.question import Question
from shardwise.schedule.schedule import Schedule
from shardwise.schedule.simulate import simulate
from shardwise.schedule.verify import peak_held
from shardwise.units import counted

#: The orders to start from. Schedules with two copies of the model are left out: `auto` never doubles the weights.
_NAMED = ("zb-v", "v-half", "v-min", "zb-h1", "zb-h2", "interleaved", "eager-1f1b", "1f1b", "looped-bfs", "gpipe")

#: Spacings of building blocks whose memory lies between V-Min's and a little over that of ZB-V; found by trying all
#: steps of 1 to 5 slots on 4 and 8 ranks and keeping those that were best for some memory.
_SPACINGS = (
    (1, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 1), (1, 2, 1, 2), (2, 2, 1, 1), (2, 2, 1, 2),
    (1, 3, 1, 1), (1, 1, 3, 1), (1, 3, 1, 4), (1, 1, 3, 2), (1, 4, 1, 2), (1, 3, 3, 4),
)  # fmt: skip

#: The most chunks of the model on a rank.
_MOST_CHUNKS = 2

#: A candidate is first tried on this many microbatches for each rank; those with the shortest spans and the soonest
#: ends are then tried on all.
_TRIAL_ROUNDS = 3
_NUM_FINALISTS = 4
_NUM_SOONEST = 2


#: An order to follow: that of a named schedule, or of a building block of such spacings.
_Order = str | tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A way to make a schedule of any number of microbatches: an order, if it follows one, and a policy."""

    placement: Placement
    policy: Policy
    order: _Order | None = None
    keeps_weights: bool = False

    def pack(self, question: Question, num_microbatches: int) -> Packed | None:
        policy = self.policy
        if self.order is not None:
            sequences = _sequences(self.order, question.num_ranks, num_microbatches, self.keeps_weights)
            policy = replace(policy, sequences=sequences)
        prices = question.prices(self.placement)
        return pack(self.placement, num_microbatches, prices, question.memory, policy)


_Found = tuple[_Candidate, Packed]


def auto(question: Question) -> Schedule:
    """Return the schedule with the shortest span that fits into memory; among equals, the one with the least makespan.

    A schedule that ends later than the best named one is taken only if no candidate matches the named ones in both span
    and makespan. The search ignores the slowdown of computation by transfers.
    """
    _check(question)
    holds_all = float(question.num_microbatches)
    memory = tuple(holds_all if limit == inf else limit for limit in question.memory)
    question = replace(question, memory=memory, slowdown=0.0)
    named = _pack_all(_named_candidates(question), question, question.num_microbatches)
    named += _overlapped(question)
    found = named + _finalists(_free_candidates(question), question)
    busiest = question.num_microbatches * max(_work(question))
    if min(packed.span for _, packed in found) > busiest * (1 + 1e-9):
        found += _finalists(_repacked_candidates(question), question)
    span, makespan = (min((_rounded(each)[part] for each in named), default=inf) for part in (0, 1))
    no_slower = [each for each in found if _rounded(each)[0] <= span and _rounded(each)[1] <= makespan]
    winner, packed = min(no_slower or found, key=_rounded)
    return Schedule.of("auto", winner.placement, question.num_microbatches, packed.orders)


def _overlapped(question: Question) -> list[_Found]:
    """Return DualPipeV, if an overlapped pair is faster than its two parts: packing cannot make pairs."""
    placement = vee(question.num_ranks)
    if (
        all(times.pair is None or times.pair >= times.total for times in question.times)
        or question.num_microbatches < 2 * question.num_ranks
        or not _is_allowed(placement, question)
    ):
        return []
    schedule = make_schedule("dualpipe-v", question.num_ranks, question.num_microbatches)
    held = [peak_held(schedule, rank, question.kept_for_weights)[0] for rank in range(question.num_ranks)]
    if any(most > limit for most, limit in zip(held, question.memory, strict=True)):
        return []
    prices = question.prices(placement)
    trace = simulate(schedule, prices)
    orders = [list(order) for order in schedule.orders]
    packed = Packed(orders=orders, span=trace.span, makespan=trace.makespan, pace=0.0)
    return [(_Candidate(placement=placement, policy=Policy()), packed)]


def _rounded(found: _Found) -> tuple[float, float]:
    """Span and makespan. A billionth of a step is rounding, not a difference."""
    return round(found[1].span, 9), round(found[1].makespan, 9)


def _pack_all(candidates: Iterable[_Candidate], question: Question, num_microbatches: int) -> list[_Found]:
    tried = ((candidate, candidate.pack(question, num_microbatches)) for candidate in candidates)
    return [(candidate, packed) for candidate, packed in tried if packed is not None]


def _finalists(candidates: Iterable[_Candidate], question: Question) -> list[_Found]:
    """Try all candidates on few microbatches, then those with the best extrapolated times on all microbatches."""
    count, trial = question.num_microbatches, min(question.num_microbatches, _TRIAL_ROUNDS * question.num_ranks)

    def expected(found: _Found) -> tuple[float, float]:
        _, packed = found
        more = (count - trial) * packed.pace
        return packed.span + more, packed.makespan + more

    tried = _pack_all(candidates, question, trial)
    if trial == count:
        return tried
    best = sorted(tried, key=expected)[:_NUM_FINALISTS]
    best += sorted(tried, key=lambda found: expected(found)[::-1])[:_NUM_SOONEST]
    return _pack_all(dict.fromkeys(candidate for candidate, _ in best), question, count)


def _work(question: Question) -> list[float]:
    """Return the seconds of one microbatch on each rank."""
    if len(question.times) == question.num_ranks:
        return [times.total for times in question.times]
    placement = next(each for each in _placements(question) if each.num_stages == len(question.times))
    return [sum(question.times[stage].total for stage in stages) for stages in placement.stages]


def _check(question: Question) -> None:
    if len(question.memory) != question.num_ranks:
        raise ShardwiseError(
            f"memory is given for {len(question.memory)} ranks of {question.num_ranks}", remedy="a limit for each rank"
        )
    if not _placements(question):
        raise ShardwiseError(
            f"times are given for {counted(len(question.times), 'stage')}, but auto cuts a model into at most "
            f"{_max_chunks(question) * question.num_ranks}",
            remedy=f"a line of times for each rank, {question.num_ranks} in all",
        )
    least = min(question.memory)
    if least < 1:
        raise ShardwiseError(
            f"rank {question.memory.index(least)} may hold {least:g} microbatch-stages, but every schedule holds 1",
            remedy="--memory 1",
        )


def _named_candidates(question: Question) -> Iterator[_Candidate]:
    """Yield the named schedules with their backwards split, which makes none of them slower."""
    for name in _NAMED:
        placement = _make(name, question.num_ranks, 1).placement
        if _is_allowed(placement, question):
            yield _Candidate(placement=placement, policy=Policy(), order=name, keeps_weights=True)


def _free_candidates(question: Question) -> Iterator[_Candidate]:
    """Packings that follow no order."""
    for placement in _placements(question):
        for gap_share in (0.0, 0.5, 1.0):
            for backward_first in (False, True):
                for deepest in (True, False) if placement.num_chunks > 1 else (True,):
                    policy = Policy(gap_share=gap_share, backward_first=backward_first, deepest_backward_first=deepest)
                    yield _Candidate(placement=placement, policy=policy)


def _repacked_candidates(question: Question) -> Iterator[_Candidate]:
    """Yield orders of named schedules, and of building blocks between them, with weight gradients in the gaps."""
    orders: list[tuple[_Order, tuple[int, ...]]] = [
        (name, (1, 3, 6) if name in ("v-min", "v-half") else (1,)) for name in _NAMED[:6]
    ]
    # With more memory than ZB-V needs, the tight blocks cannot win.
    spacings = _SPACINGS if min(question.memory) < question.num_ranks else _SPACINGS[-2:]
    orders += [(steps, (1, 3) if steps[:2] == (1, 1) else (1,)) for steps in spacings]
    for order, look_aheads in orders:
        placement = _make(order, question.num_ranks, 1).placement
        if not _is_allowed(placement, question):
            continue
        for look_ahead in look_aheads:
            for gap_share in (0.0, 0.5, 1.0):
                for patience in (0.0, 1.0) if look_ahead > 1 else (1.0,):
                    policy = Policy(gap_share=gap_share, look_ahead=look_ahead, patience=patience)
                    yield _Candidate(placement=placement, policy=policy, order=order)


def _make(order: _Order, num_ranks: int, num_microbatches: int) -> Schedule:
    if isinstance(order, str):
        return make_schedule(order, num_ranks, num_microbatches)
    return repeat_block("block", num_microbatches, spaced_block(num_ranks, order))


def _max_chunks(question: Question) -> int:
    """Return the pieces of the model that a rank may have."""
    return min(question.num_chunks or _MOST_CHUNKS, _MOST_CHUNKS)


def _placements(question: Question) -> list[Placement]:
    ranks = question.num_ranks
    return [each for each in (vee(ranks), loop(ranks, 2), loop(ranks)) if _is_allowed(each, question)]


def _is_allowed(placement: Placement, question: Question) -> bool:
    """Whether a placement has no more chunks than there may be, and the stages that the times are given for."""
    return placement.num_chunks <= _max_chunks(question) and len(question.times) in (
        placement.num_ranks,
        placement.num_stages,
    )


@lru_cache(maxsize=64)
def _sequences(order: _Order, num_ranks: int, num_microbatches: int, with_weights: bool) -> Sequences:
    """Return the order of each rank with backwards split, with or without the weight gradients."""
    split = split_backward(_make(order, num_ranks, num_microbatches))
    return tuple(tuple(each for each in mine if with_weights or each.kind is not Kind.W) for mine in split.orders)
