"""The file form of a whole schedule: a few header lines, and a line of instructions for each rank.

    name: 1f1b
    microbatches: 2
    stages: 0 1

    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1

`stages` is the rank of each stage. Where they apply there are also `pipes: 0 1 | 2 3`, `skips: 0>2 1>3`,
`ties: 0+3`, `steps: 3` and `staleness: 1`. In a file written by hand, all header lines are optional: then a stage is on
the rank that has its instructions, and the number of microbatches follows from them. `#` starts a comment.
"""

import re
from pathlib import Path

from shardwise.errors import ShardwiseError, unknown
from shardwise.schedule.instruction import COMPUTE, Instruction, Kind, parse
from shardwise.schedule.placement import Placement
from shardwise.schedule.question import read_file
from shardwise.schedule.schedule import Schedule

_EXAMPLE = "rank 0: 0F0 0F1 0B0 0B1"
_EXAMPLES = {
    "name": "1f1b",
    "microbatches": "8",
    "stages": "0 1 2 3",
    "pipes": "0 1 | 2 3",
    "skips": "0>2 1>3",
    "ties": "0+3",
    "steps": "3",
    "staleness": "1",
}


def print_schedule(schedule: Schedule) -> str:
    """Return the file form, which `read_schedule` reads back."""
    placement = schedule.placement
    lines = [
        f"name: {schedule.name}",
        f"microbatches: {schedule.num_microbatches}",
        f"stages: {' '.join(map(str, placement.ranks))}",
    ]
    if placement.pipes != (tuple(range(placement.num_stages)),):
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
    lines += [f"rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(schedule.orders)]
    return "\n".join(lines) + "\n"


def load_schedule(path: Path) -> Schedule:
    """Read a schedule from a file."""
    remedy = "shardwise schedule 1f1b --stages 4 --microbatches 8 --save 1f1b.schedule, which writes one"
    return read_schedule(read_file(path, f"the schedule file {path}", remedy), source=path.name)


def read_schedule(text: str, *, source: str = "schedule") -> Schedule:
    """Read a schedule from its file form. `source` is what its errors call it."""
    header: dict[str, tuple[int, str]] = {}
    orders: dict[int, list[Instruction]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        key, colon, value = line.partition("#")[0].partition(":")
        key, value = " ".join(key.split()), value.strip()
        where = f"{source}, line {number}"
        if not colon:
            if key:
                raise ShardwiseError(f"{where}: '{_shortened(key)}' has no ':' after its key", remedy=_EXAMPLE)
            continue
        rank = re.fullmatch(r"rank (\d{1,6})", key)
        if key in header or (rank is not None and int(rank[1]) in orders):
            raise ShardwiseError(f"{where}: '{key}' has a line already", remedy=f"one line '{key}: ...'")
        if rank is not None:
            orders[int(rank[1])] = _read_order(value, f"{where}, rank {rank[1]}")
        elif key in _EXAMPLES:
            header[key] = (number, value)
        else:
            error = unknown("key", _shortened(key), [*_EXAMPLES, "rank 0"])
            raise ShardwiseError(f"{where}: {error.problem}", remedy=error.remedy or _EXAMPLE)
    if sorted(orders) != list(range(len(orders))) or not orders:
        found = ", ".join(map(str, sorted(orders))) or "none"
        raise ShardwiseError(
            f"{source}: ranks must be numbered from 0 without a gap; found: {found}",
            remedy=f"a line '{_EXAMPLE}', and one for each other rank",
        )
    return _Header(source, header).schedule([orders[rank] for rank in range(len(orders))])


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


def _read_order(text: str, where: str) -> list[Instruction]:
    order = []
    for position, word in enumerate(text.split(), start=1):
        try:
            # No instruction is so long. An error message needs little of it, and int() refuses very long numbers.
            order.append(parse(word if len(word) <= 60 else _shortened(word)))
        except ShardwiseError as error:
            problem = f"{where}, instruction {position}: {error.problem}"
            raise ShardwiseError(problem, remedy=error.remedy or "2F0, 1I3, 0SEND_F2>1 or 2STEP0") from None
    return order


class _Header:
    """The header lines, read when they are needed, with the default for each that is left out."""

    def __init__(self, source: str, lines: dict[str, tuple[int, str]]) -> None:
        self.source, self.lines = source, lines

    def schedule(self, orders: list[list[Instruction]]) -> Schedule:
        parts = [part for order in orders for instruction in order for part in instruction.parts]
        named = [part.microbatch for part in parts if part.kind in COMPUTE and part.kind is not Kind.STEP]
        num_steps = self._number("steps", 1)
        return Schedule.of(
            self._text("name") or Path(self.source).stem,
            self._placement(orders),
            self._number("microbatches", -(-(max(named, default=0) + 1) // num_steps)),
            orders,
            num_steps=num_steps,
            staleness=self._number("staleness", 0, least=0),
        )

    def _placement(self, orders: list[list[Instruction]]) -> Placement:
        ranks = self._stages("stages", self._text("stages")) or self._found_ranks(orders)
        odd = set(ranks) ^ set(range(len(orders)))
        if odd:
            what = "holds a stage but has no line" if min(odd) in ranks else "has a line but holds no stage"
            raise ShardwiseError(
                f"{self.source}: rank {min(odd)} {what}", remedy=f"a line 'rank {min(odd)}: ...' and a stage for it"
            )
        placement = Placement(ranks=ranks, pipes=self._pipes(len(ranks)))
        skips = [self._stages("skips", word, ">") for word in self._text("skips").split()]
        ties = [self._stages("ties", word, "+") for word in self._text("ties").split()]
        try:
            placement = placement.with_skips(*((maker, user) for maker, user in skips))
        except ShardwiseError as error:
            raise self._wrong("skips", error.problem) from None
        try:
            return placement.with_ties(*ties)
        except ShardwiseError as error:
            raise self._wrong("ties", error.problem) from None

    def _found_ranks(self, orders: list[list[Instruction]]) -> tuple[int, ...]:
        """Infer the rank of each stage from the rank that has its instructions."""
        found: dict[int, int] = {}
        for rank, order in enumerate(orders):
            for instruction in order:
                for part in instruction.parts:
                    found.setdefault(part.stage, rank)
        missing = next((stage for stage in range(max(1, len(found))) if stage not in found), None)
        if missing is not None:
            raise ShardwiseError(
                f"{self.source}: stages must be numbered from 0 without a gap, but stage {missing} has no instruction",
                remedy=_EXAMPLE,
            )
        return tuple(found[stage] for stage in range(len(found)))

    def _pipes(self, num_stages: int) -> tuple[tuple[int, ...], ...]:
        if "pipes" not in self.lines:
            return (tuple(range(num_stages)),)
        pipes = tuple(self._stages("pipes", part) for part in self._text("pipes").split("|"))
        named = sorted(stage for pipe in pipes for stage in pipe)
        if named != list(range(num_stages)) or len({len(pipe) for pipe in pipes}) > 1:
            raise self._wrong("pipes", f"pipes must be equally long and have each of the {num_stages} stages once")
        return pipes

    def _text(self, key: str) -> str:
        return self.lines.get(key, (0, ""))[1]

    def _stages(self, key: str, text: str, mark: str | None = None) -> tuple[int, ...]:
        words = text.split(mark)
        if not all(word.isdecimal() and len(word) <= 6 for word in words) or (mark == ">" and len(words) != 2):
            raise self._wrong(key, f"'{_shortened(text)}' are not {'ranks' if key == 'stages' else 'stages'}")
        return tuple(map(int, words))

    def _number(self, key: str, default: int, least: int = 1) -> int:
        text = self._text(key) if key in self.lines else str(default)
        if not text.isdecimal() or len(text) > 9 or int(text) < least:
            raise self._wrong(key, f"{key} must be a whole number from {least} to 999999999, not '{_shortened(text)}'")
        return int(text)

    def _wrong(self, key: str, problem: str) -> ShardwiseError:
        line = f", line {self.lines[key][0]}" if key in self.lines else ""
        return ShardwiseError(f"{self.source}{line}: {problem}", remedy=f"{key}: {_EXAMPLES[key]}")
