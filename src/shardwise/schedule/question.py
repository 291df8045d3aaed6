"""What a user asks of a schedule: how many ranks and microbatches, how long everything takes, how much memory there is.

Everything a user types comes through here, is checked here, and leaves as numbers.
"""

import json
import re
from dataclasses import dataclass
from math import inf, isnan, nan
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.schedule.catalogue import check_counts
from shardwise.schedule.placement import Placement
from shardwise.schedule.prices import Prices, StageTimes, stage_prices
from shardwise.units import counted

#: Beyond this an answer takes minutes.
_MOST_RANKS = 1024

#: Beyond these, sums of times lose digits that a drawing shows. Any unit can be chosen, so they are not needed.
_LEAST, _MOST = 1e-12, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One setting, for which schedules are made, priced and compared.

    `times` has an entry for each rank or for each stage; `memory[rank]` is in microbatch-stages, inf for no limit.
    `num_chunks` is for schedules that support several numbers; `auto` uses at most that many, and at most two.
    """

    num_ranks: int
    num_microbatches: int
    times: tuple[StageTimes, ...]
    hops: tuple[float, ...] = ()
    memory: tuple[float, ...]
    kept_for_weights: float = 1.0
    slowdown: float = 0.0
    num_chunks: int | None = None

    def prices(self, placement: Placement) -> Prices:
        """Return the prices of instructions on a placement."""
        if len(self.times) not in (placement.num_ranks, placement.num_stages):
            raise ShardwiseError(
                f"times are given for {counted(len(self.times), 'stage')}, but the schedule has "
                f"{counted(placement.num_stages, 'stage')} on {counted(placement.num_ranks, 'rank')}",
                remedy=f"a line of times for each rank, {placement.num_ranks} in all",
            )
        return stage_prices(
            placement, self.times, hops=self.hops, kept_for_weights=self.kept_for_weights, slowdown=self.slowdown
        )


def make_question(
    *,
    num_ranks: int,
    num_microbatches: int,
    times: str | None = None,
    stage_times: str | None = None,
    pair: float | None = None,
    hop: str | None = None,
    memory: str | None = None,
    kept_for_weights: float = 1.0,
    slowdown: float = 0.0,
    num_chunks: int | None = None,
) -> Question:
    """Check what was typed and return it as numbers."""
    check_counts(num_ranks, num_microbatches)
    if num_ranks > _MOST_RANKS:
        raise ShardwiseError(f"{num_ranks} stages: at most {_MOST_RANKS} are played", remedy=f"--stages {_MOST_RANKS}")
    if num_chunks is not None and num_chunks < 1:
        raise ShardwiseError(f"{num_chunks} chunks: a rank has at least 1", remedy="--chunks 2")
    if times is not None and stage_times is not None:
        raise ShardwiseError("--times and --stage-times both say how long stages take", remedy="only one of them")
    if not 0 <= kept_for_weights <= 1:
        raise ShardwiseError(
            f"the part of an activation kept for W is {kept_for_weights:g}, but a part is between 0 and 1",
            remedy="--kept-for-weights 1",
        )
    if not 0 <= slowdown <= 100:
        raise ShardwiseError(f"a slowdown of {slowdown:g} is not between 0 and 100", remedy="--slowdown 0.1")
    if stage_times is not None:
        all_times = read_stage_times(Path(stage_times), num_ranks, pair)
    else:
        all_times = (read_times("1,1,1" if times is None else times, pair),) * num_ranks
    return Question(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        times=all_times,
        hops=_read_hops(hop, num_ranks),
        memory=_read_memory(memory, num_ranks),
        kept_for_weights=kept_for_weights,
        slowdown=slowdown,
        num_chunks=num_chunks,
    )


def read_times(text: str, pair: float | None = None) -> StageTimes:
    """Read `F,I,W` from the command line."""
    return _times(_words(text), "--times", "--times 1,1.2,0.8", pair)


def read_stage_times(path: Path, num_ranks: int, pair: float | None = None) -> tuple[StageTimes, ...]:
    """Read a file with a line `F,I,W` for each rank (or each stage), or the same as a JSON list."""
    remedy = f"a file with {counted(num_ranks, 'line')} like 1,1.2,0.8"
    text = read_file(path, f"the stage times in {path}", remedy)
    rows = _json_rows(text, path) if text.lstrip().startswith(("[", "{")) else _text_rows(text)
    times = tuple(_times(row, f"{path.name}, {where}", "1,1.2,0.8", pair) for where, row in rows)
    if not times or len(times) % num_ranks:
        raise ShardwiseError(
            f"{path.name} has times for {counted(len(times), 'stage')}, but there "
            f"{'is' if num_ranks == 1 else 'are'} {counted(num_ranks, 'rank')}",
            remedy=f"{counted(num_ranks, 'line')} like 1,1.2,0.8, one for each rank",
        )
    return times


def read_file(path: Path, what: str, remedy: str) -> str:
    """Return the text of a user's file. `what` is its name in errors."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ShardwiseError(f"{what} cannot be read: {reason}", remedy=remedy) from None


def _text_rows(text: str) -> list[tuple[str, list[str]]]:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        row = _words(line.partition("#")[0])
        if row and [word.upper() for word in row] != ["F", "I", "W"]:
            rows.append((f"line {number}", row))
    return rows


def _json_rows(text: str, path: Path) -> list[tuple[str, list[str]]]:
    """Return a list with `[1, 1.2, 0.8]` or `{"F": 1, "I": 1.2, "W": 0.8}` for each stage."""
    try:
        entries = json.loads(text)
        if not isinstance(entries, list):
            raise ValueError("it is one object")
    except (ValueError, RecursionError) as error:
        raise ShardwiseError(
            f"{path.name} is not a JSON list of times: {error}", remedy="[[1, 1.2, 0.8], [1, 1.2, 0.8]]"
        ) from None
    rows = []
    for number, entry in enumerate(entries):
        values = [entry[key] for key in "FIW"] if isinstance(entry, dict) and set(entry) == set("FIW") else entry
        if not isinstance(values, list):
            raise ShardwiseError(
                f"{path.name}, stage {number}: {json.dumps(entry)[:40]} is not a list of times",
                remedy='[1, 1.2, 0.8] or {"F": 1, "I": 1.2, "W": 0.8}',
            )
        rows.append((f"stage {number}", [str(value) for value in values]))
    return rows


def _times(words: list[str], what: str, remedy: str, pair: float | None) -> StageTimes:
    numbers = [_number(word, what, remedy) for word in words]
    if len(numbers) != 3:
        raise ShardwiseError(
            f"{what}: there are three times, F,I,W, but '{','.join(words)}' has {len(words)}", remedy=remedy
        )
    try:
        return StageTimes(forward=numbers[0], input_gradient=numbers[1], weight_gradient=numbers[2], pair=pair)
    except ShardwiseError as error:
        raise ShardwiseError(f"{what}: {error.problem}", remedy=error.remedy) from None


def _read_hops(text: str | None, num_ranks: int) -> tuple[float, ...]:
    if text is None:
        return ()
    hops = tuple(_number(word, "--hop", "--hop 0.05") for word in _words(text) or [""])
    if len(hops) not in (1, num_ranks - 1):
        raise ShardwiseError(
            f"--hop has {len(hops)} times, but between {counted(num_ranks, 'rank')} the number of boundaries is "
            f"{num_ranks - 1}",
            remedy="--hop 0.05, or a time for each boundary",
        )
    return hops


def _read_memory(text: str | None, num_ranks: int) -> tuple[float, ...]:
    if text is None:
        return (inf,) * num_ranks
    remedy = f"--memory {num_ranks}, or a limit for each rank"
    memory = tuple(inf if word.lower() == "inf" else _number(word, "--memory", remedy) for word in _words(text) or [""])
    if len(memory) not in (1, num_ranks):
        raise ShardwiseError(f"--memory has {len(memory)} limits for {counted(num_ranks, 'rank')}", remedy=remedy)
    return memory if len(memory) == num_ranks else memory * num_ranks


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[\s,;]+", text) if word]


def _number(word: str, what: str, remedy: str) -> float:
    try:
        number = float(word)
    except ValueError:
        number = nan
    if isnan(number):
        raise ShardwiseError(f"{what}: '{word}' is not a number", remedy=remedy)
    if number < 0:
        raise ShardwiseError(f"{what}: {word} is below 0", remedy=remedy)
    if number != 0 and not _LEAST <= number <= _MOST:
        raise ShardwiseError(f"{what}: {word} is neither 0 nor between {_LEAST:g} and {_MOST:g}", remedy=remedy)
    return number
