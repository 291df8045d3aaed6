"""The file form of a whole schedule: a few lines of what it is for, and a line of instructions for each rank.

    name: 1f1b
    microbatches: 2
    stages: 0 1

    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

`stages` is the rank of each stage. Where they apply there are also `pipes: 0 1 | 2 3`, `skips: 0>2 1>3`,
`ties: 0+3`, `steps: 3` and `staleness: 1`. Everything but the ranks may be left out by hand: then a stage lies where
its instructions stand, and there are as many microbatches as are named. `#` starts a comment.
"""

import re
from pathlib import Path

from shardwise.errors import ShardwiseError, unknown
from shardwise.schedule.instruction import COMPUTE, Instruction, Kind, parse, text_of
from shardwise.schedule.placement import Placement
from shardwise.schedule.schedule import Schedule

_KEYS = ("name", "microbatches", "stages", "pipes", "skips", "ties", "steps", "staleness")
_EXAMPLE = "rank 0: 0F0 0F1 0B0 0B1"


def print_schedule(schedule: Schedule) -> str:
    """Return the file form, which `read_schedule` reads back."""
    placement = schedule.placement
    lines = [
        f"name: {schedule.name}",
        f"microbatches: {schedule.num_microbatches}",
        f"stages: {' '.join(map(str, placement.ranks))}",
    ]
    if len(placement.pipes) > 1:
        lines.append("pipes: " + " | ".join(" ".join(map(str, pipe)) for pipe in placement.pipes))
    if placement.skips:
        lines.append("skips: " + " ".join(f"{maker}>{user}" for maker, user in placement.skips))
    if placement.ties:
        lines.append("ties: " + " ".join("+".join(map(str, tie)) for tie in placement.ties))
    if schedule.num_steps > 1:
        lines.append(f"steps: {schedule.num_steps}")
    if schedule.staleness:
        lines.append(f"staleness: {schedule.staleness}")
    lines.append("")
    lines += [f"rank {rank}: {' '.join(map(text_of, order))}" for rank, order in enumerate(schedule.orders)]
    return "\n".join(lines) + "\n"


def load_schedule(path: Path) -> Schedule:
    """Read a schedule from a file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ShardwiseError(
            f"the schedule file {path} cannot be read: {error.strerror if isinstance(error, OSError) else error}",
            remedy=f"shardwise schedule 1f1b --stages 4 --microbatches 8 --save {path.name}",
        ) from None
    return read_schedule(text, source=path.name)


def read_schedule(text: str, *, source: str = "schedule") -> Schedule:
    """Read a schedule from its file form. `source` is what its errors call it."""
    header: dict[str, tuple[int, str]] = {}
    orders: dict[int, list[Instruction]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        key, colon, value = line.partition("#")[0].partition(":")
        key, value = key.strip(), value.strip()
        if not key and not colon:
            continue
        where = f"{source}, line {number}"
        if not colon:
            raise ShardwiseError(f"{where}: '{key[:40]}' has no ':' after its key", remedy=_EXAMPLE)
        rank = re.fullmatch(r"rank (\d+)", key)
        if rank is not None:
            if int(rank[1]) in orders:
                raise ShardwiseError(f"{where}: rank {rank[1]} has a line already", remedy="one line for each rank")
            orders[int(rank[1])] = _read_order(value, f"{where}, rank {rank[1]}")
        elif key in _KEYS:
            header[key] = (number, value)
        else:
            error = unknown("key", key, [*_KEYS, "rank 0"])
            raise ShardwiseError(f"{where}: {error.problem}", remedy=error.remedy)
    if sorted(orders) != list(range(len(orders))) or not orders:
        raise ShardwiseError(
            f"{source}: ranks must be numbered from 0 without a gap, but there are {sorted(orders) or 'none'}",
            remedy=_EXAMPLE,
        )
    return _Header(source, header).schedule([orders[rank] for rank in range(len(orders))])


def _read_order(text: str, where: str) -> list[Instruction]:
    order = []
    for position, word in enumerate(text.split(), start=1):
        try:
            order.append(parse(word))
        except ShardwiseError as error:
            raise ShardwiseError(f"{where}, instruction {position}: {error.problem}", remedy=error.remedy) from None
    return order


class _Header:
    """The lines above the ranks, read when they are needed, with what is assumed where one is left out."""

    def __init__(self, source: str, lines: dict[str, tuple[int, str]]) -> None:
        self.source, self.lines = source, lines

    def schedule(self, orders: list[list[Instruction]]) -> Schedule:
        parts = [part for order in orders for instruction in order for part in instruction.parts]
        named = [part.microbatch for part in parts if part.kind in COMPUTE and part.kind is not Kind.STEP]
        num_steps = self._number("steps", 1)
        num_microbatches = self._number("microbatches", -(-(max(named, default=0) + 1) // num_steps))
        return Schedule.of(
            self.lines.get("name", (0, Path(self.source).stem))[1],
            self._placement(orders),
            num_microbatches,
            orders,
            num_steps=num_steps,
            staleness=self._number("staleness", 0, least=0),
        )

    def _placement(self, orders: list[list[Instruction]]) -> Placement:
        found: dict[int, int] = {}
        for rank, order in enumerate(orders):
            for instruction in order:
                for part in instruction.parts:
                    found.setdefault(part.stage, rank)
        num_stages = 1 + max(found, default=0)
        ranks = self._numbers("stages") or tuple(found.get(stage, 0) for stage in range(num_stages))
        if max(ranks) >= len(orders):
            raise ShardwiseError(
                f"{self.source}: a stage lies on rank {max(ranks)}, but there are {len(orders)} ranks",
                remedy=f"a line 'rank {max(ranks)}: ...'",
            )
        pipes = tuple(
            self._split("pipes", part, r"\s+") for part in self.lines.get("pipes", (0, ""))[1].split("|") if part
        )
        placement = Placement(ranks=ranks, pipes=pipes or (tuple(range(len(ranks))),))
        skips = [self._split("skips", word, ">") for word in self.lines.get("skips", (0, ""))[1].split()]
        ties = [self._split("ties", word, r"\+") for word in self.lines.get("ties", (0, ""))[1].split()]
        return placement.with_skips(*((maker, user) for maker, user in skips)).with_ties(*ties)

    def _numbers(self, key: str) -> tuple[int, ...]:
        return self._split(key, self.lines[key][1], r"\s+") if key in self.lines else ()

    def _split(self, key: str, text: str, separator: str) -> tuple[int, ...]:
        words = [word for word in re.split(separator, text.strip()) if word]
        if not all(word.isdecimal() for word in words) or (separator == ">" and len(words) != 2):
            example = {"pipes": "0 1 | 2 3", "skips": "0>2", "ties": "0+3"}.get(key, "0 1 2 3")
            line = self.lines[key][0]
            raise ShardwiseError(
                f"{self.source}, line {line}: '{text.strip()}' are not stages or ranks", remedy=f"{key}: {example}"
            )
        return tuple(map(int, words))

    def _number(self, key: str, default: int, least: int = 1) -> int:
        line, text = self.lines.get(key, (0, str(default)))
        if not text.isdecimal() or int(text) < least:
            raise ShardwiseError(
                f"{self.source}, line {line}: {key} must be a whole number of {least} or more, not '{text}'",
                remedy=f"{key}: {max(default, least)}",
            )
        return int(text)
