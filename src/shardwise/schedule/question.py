"""What a user asks of a schedule: how many ranks and microbatches, how long everything takes, how much memory there is.

Everything a user types comes through here, is checked here, and leaves as numbers.
"""

import json
import re
from dataclasses import dataclass
from math import inf
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.schedule.catalogue import check_counts
from shardwise.schedule.placement import Placement
from shardwise.schedule.prices import Prices, StageTimes, stage_prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One setting, for which schedules are made, priced and compared.

    `times` has an entry for each rank or for each stage; `memory[rank]` is in microbatch-stages, inf for no limit.
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
        """What instructions cost on this placement."""
        if len(self.times) not in (placement.num_ranks, placement.num_stages):
            raise ShardwiseError(
                f"times are given for {len(self.times)} stages, but there are {placement.num_ranks} ranks and "
                f"{placement.num_stages} stages",
                remedy=f"a line for each of the {placement.num_ranks} ranks",
            )
        return stage_prices(
            placement,
            self.times,
            hops=self.hops,
            kept_for_weights=self.kept_for_weights,
            slowdown=self.slowdown,
        )

    @property
    def limits_memory(self) -> bool:
        return any(limit < inf for limit in self.memory)


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
    if times is not None and stage_times is not None:
        raise ShardwiseError("--times and --stage-times both say how long stages take", remedy="one of the two")
    if not 0 <= kept_for_weights <= 1:
        raise ShardwiseError(
            f"the part of an activation kept for W is {kept_for_weights:g}, but a part is between 0 and 1",
            remedy="--kept-for-weights 1",
        )
    if not 0 <= slowdown < inf:
        raise ShardwiseError(f"a slowdown of {slowdown:g} is not 0 or more", remedy="--slowdown 0.1")
    if stage_times is not None:
        all_times = read_stage_times(Path(stage_times), num_ranks, pair)
    else:
        all_times = (read_times(times or "1,1,1", what="--times", pair=pair),) * num_ranks
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


def read_times(text: str, *, what: str, pair: float | None = None) -> StageTimes:
    """Read `F,I,W`."""
    numbers = _numbers(text, what=what, example="1,1.2,0.8")
    if len(numbers) != 3:
        raise ShardwiseError(
            f"{what} has {len(numbers)} of the three times F,I,W: '{text}'", remedy=f"{what} 1,1.2,0.8"
        )
    forward, input_gradient, weight_gradient = numbers
    return StageTimes(forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient, pair=pair)


def read_stage_times(path: Path, num_ranks: int, pair: float | None = None) -> tuple[StageTimes, ...]:
    """Read a file with a line `F,I,W` for each rank (or each stage), or the same as a JSON list of lists."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ShardwiseError(
            f"the stage times in {path} cannot be read: {reason}",
            remedy=f"a file with {num_ranks} lines like 1,1.2,0.8",
        ) from None
    rows = _json_rows(text, path) if text.lstrip().startswith("[") else _text_rows(text)
    times = tuple(read_times(row, what=f"{path.name}, {where}", pair=pair) for where, row in rows)
    if not times or len(times) % num_ranks:
        raise ShardwiseError(
            f"{path.name} has times for {len(times)} stages, but there are {num_ranks} ranks",
            remedy=f"{num_ranks} lines like 1,1.2,0.8, one for each rank",
        )
    return times


def _text_rows(text: str) -> list[tuple[str, str]]:
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        row = line.partition("#")[0].strip()
        if row and not re.fullmatch(r"f[\s,;]+i[\s,;]+w", row, flags=re.IGNORECASE):
            rows.append((f"line {number}", row))
    return rows


def _json_rows(text: str, path: Path) -> list[tuple[str, str]]:
    try:
        entries = json.loads(text)
        rows = [[entry[key] for key in "FIW"] if isinstance(entry, dict) else list(entry) for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise ShardwiseError(
            f"{path.name} is no JSON list of times: {error}", remedy="[[1, 1.2, 0.8], [1, 1.2, 0.8]]"
        ) from None
    return [(f"stage {number}", ",".join(map(str, row))) for number, row in enumerate(rows)]


def _read_hops(text: str | None, num_ranks: int) -> tuple[float, ...]:
    if text is None:
        return ()
    hops = _numbers(text, what="--hop", example="0.05")
    if len(hops) not in (1, num_ranks - 1):
        raise ShardwiseError(
            f"--hop has {len(hops)} times, but there are {num_ranks - 1} boundaries between {num_ranks} ranks",
            remedy="--hop 0.05, or a time for each boundary",
        )
    return hops


def _read_memory(text: str | None, num_ranks: int) -> tuple[float, ...]:
    if text is None:
        return (inf,) * num_ranks
    memory = _numbers(text, what="--memory", example=str(num_ranks))
    if len(memory) not in (1, num_ranks):
        raise ShardwiseError(
            f"--memory has {len(memory)} limits for {num_ranks} ranks",
            remedy=f"--memory {num_ranks}, or a limit for each rank",
        )
    return memory if len(memory) == num_ranks else memory * num_ranks


def _numbers(text: str, *, what: str, example: str) -> tuple[float, ...]:
    words = [word for word in re.split(r"[\s,;]+", text.strip()) if word]
    numbers = []
    for word in words or [""]:
        try:
            number = float(word)
        except ValueError:
            raise ShardwiseError(f"{what}: '{word}' is no number", remedy=f"{what} {example}") from None
        if not 0 <= number < inf:
            raise ShardwiseError(f"{what}: {word} is not 0 or more", remedy=f"{what} {example}")
        numbers.append(number)
    return tuple(numbers)
