"""Where to cut: one run of calls per stage, such that the slowest stage is as fast as possible."""

from collections.abc import Callable, Sequence
from functools import cache

from shardwise.errors import ShardwiseError, unknown
from shardwise.units import format_bytes

Cut = tuple[range, ...]

_NEVER = float("inf")


def best_cut(
    costs: Sequence[float],
    num_stages: int,
    *,
    received: Callable[[int, int], float] | None = None,
    speeds: Sequence[float] | None = None,
    stage_bytes: Callable[[int, int], float] | None = None,
    limit_bytes: float | None = None,
    inseparable: Sequence[tuple[int, int]] = (),
    reason: str = "that share what they do not return",
) -> Cut:
    """Return the cut whose slowest stage is fastest, and among those the most even one. Exact.

    A stage of calls `first` to `end - 1` costs the sum of its calls, plus `received(first, end)` for received values.
    `speeds` are those of each stage, 1.0 if None. `stage_bytes(first, end)` stays within `limit_bytes`. Calls of an
    inseparable pair stay on one stage; `reason` completes the error message "pairs of units ...".
    """
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    stage_speeds = [1.0] * num_stages if speeds is None else list(speeds)
    may_cut = [not any(first < at <= last for first, last in inseparable) for at in range(len(costs) + 1)]

    @cache
    def cost_of(first: int, end: int) -> float:
        if not (may_cut[first] and may_cut[end]):
            return _NEVER
        if limit_bytes is not None and stage_bytes is not None and stage_bytes(first, end) > limit_bytes:
            return _NEVER
        return total[end] - total[first] + (0.0 if received is None else received(first, end))

    def seconds(stage: int, first: int, end: int) -> float:
        return cost_of(first, end) / stage_speeds[stage]

    slowest, _ = _search(len(costs), num_stages, seconds, max)
    if slowest == _NEVER:
        if limit_bytes is None or stage_bytes is None:
            raise ShardwiseError(
                f"no cut of {len(costs)} units into {num_stages} stages keeps together {len(inseparable)}"
                f" {'pair' if len(inseparable) == 1 else 'pairs'} of units {reason}",
                remedy=f"fewer stages than {num_stages}",
            )
        largest = max(stage_bytes(call, call + 1) for call in range(len(costs)))
        raise ShardwiseError(
            f"no cut of {len(costs)} units into {num_stages} stages keeps every stage within"
            f" {format_bytes(limit_bytes)}: all together are {format_bytes(stage_bytes(0, len(costs)))}, the largest"
            f" alone {format_bytes(largest)}",
            remedy=f"more stages than {num_stages}, or a larger limit",
        )
    bound = slowest * (1 + 1e-9)

    def squared(stage: int, first: int, end: int) -> float:
        taken = seconds(stage, first, end)
        return taken * taken if taken <= bound else _NEVER

    return _search(len(costs), num_stages, squared, lambda before, stage: before + stage)[1]


def _search(
    num_calls: int, num_stages: int, price: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> tuple[float, Cut]:
    """Return the lowest price and its cut, by dynamic programming over (stages used, calls placed)."""
    best = [0.0] + [_NEVER] * num_calls
    back: list[list[int]] = []
    for stage in range(num_stages):
        after, choice = [_NEVER] * (num_calls + 1), [0] * (num_calls + 1)
        for end in range(stage + 1, num_calls - (num_stages - stage - 1) + 1):
            for first in range(stage, end):
                if best[first] == _NEVER:
                    continue
                joined = join(best[first], price(stage, first, end))
                if joined < after[end]:
                    after[end], choice[end] = joined, first
        best = after
        back.append(choice)
    stages: list[range] = []
    end = num_calls
    for choice in reversed(back):
        stages.append(range(choice[end], end))
        end = choice[end]
    return best[num_calls], tuple(reversed(stages))


def given_cut(cut: Sequence[int] | Sequence[str], names: Sequence[str], blocks: Sequence[int], num_stages: int) -> Cut:
    """Return the user's own cut: given by the units or blocks of each stage, or the name of each stage's first unit.

    `blocks` are the indices of the blocks among all calls. Units before the first block go with it, others with the
    block before them.
    """
    if len(cut) != num_stages:
        problem = f"the cut has {len(cut)} stages, but {num_stages} are asked for"
        raise ShardwiseError(problem, remedy=_example(names, num_stages))
    counts = [each for each in cut if isinstance(each, int)]
    starts = _starts_by_count(counts, names, blocks) if counts else _starts_by_name([str(each) for each in cut], names)
    ends = [*starts[1:], len(names)]
    return tuple(range(first, end) for first, end in zip(starts, ends, strict=True))


def _starts_by_count(counts: Sequence[int], names: Sequence[str], blocks: Sequence[int]) -> list[int]:
    before = [sum(counts[:stage]) for stage in range(len(counts))]
    if min(counts) < 1:
        problem = f"stage {counts.index(min(counts))} of the cut has {min(counts)} units"
    elif sum(counts) == len(names):
        return before
    elif sum(counts) == len(blocks):
        return [0, *(blocks[count] for count in before[1:])]
    else:
        problem = (
            f"the cut {', '.join(map(str, counts))} adds up to {sum(counts)},"
            f" but there are {len(names)} units, {len(blocks)} of them blocks"
        )
    raise ShardwiseError(problem, remedy=_example(names, len(counts)))


def _starts_by_name(cut: Sequence[str], names: Sequence[str]) -> list[int]:
    for each in cut:
        if each not in names:
            raise unknown("unit", each, names)
    starts = [names.index(each) for each in cut]
    if starts[0] != 0 or starts != sorted(set(starts)):
        raise ShardwiseError(
            f"the first units of the stages, {', '.join(cut)}, must begin with {names[0]} and go forward",
            remedy=f"cut=[{names[0]!r}, ...], in the order of the units: {', '.join(names)}",
        )
    return starts


def _example(names: Sequence[str], num_stages: int) -> str:
    share, more = divmod(len(names), num_stages)
    counts = [share + (stage < more) for stage in range(num_stages)]
    return f"cut={counts} (units: {', '.join(names)})"
