"""What a search found, as a person reads it and as data."""

from shardwise.answer import Canvas
from shardwise.planner.drawing import draw_head, draw_memory, draw_others, draw_reasons, draw_seconds
from shardwise.planner.search.findings import Findings
from shardwise.planner.search.tally import Tally

_REFUSED = {
    "divisibility": "do not divide heads, layers, sequence or batch",
    "topology": "have tensor parallel groups that straddle nodes",
    "model": "cut layers of which nobody knows how",
    "engines": "are not run by the engines yet",
}
_SHOWN = 3


def draw(found: Findings, canvas: Canvas) -> None:
    """The best plan with everything about it, and what was not chosen."""
    draw_head(found.best, canvas)
    canvas.print()
    draw_seconds(found.best, canvas)
    canvas.print()
    draw_memory(found.best, canvas)
    canvas.print()
    draw_reasons(found.best, canvas)
    canvas.print()
    draw_others(found.best, found.others, canvas)
    canvas.print()
    for line in tally_lines(found.tally):
        canvas.print(canvas.paint(line, "dim"))


def tally_lines(tally: Tally) -> list[str]:
    """How many candidates fell to what, as sentences."""
    lines = [f"{tally.considered:,} candidates, {tally.priced:,} priced, {tally.fitting:,} of them fit."]
    fallen = [f"{count:,} {_REFUSED[reason]}" for reason, count in tally.refused.most_common()]
    if tally.slower:
        fallen.append(f"{tally.slower:,} are slower by a bound")
    if fallen:
        lines.append(f"Of the others {', '.join(fallen)}.")
    total = sum(tally.memory.values())
    if total:
        parts = [
            f"{part} on the {place} stage ({count:,})" for (place, part), count in tally.memory.most_common(_SHOWN)
        ]
        lines.append(f"{total:,} do not fit, most for {', '.join(parts)}.")
    return lines


def tally_data(tally: Tally) -> dict[str, object]:
    """The same for `--json`."""
    return {
        "considered": tally.considered,
        "priced": tally.priced,
        "fitting": tally.fitting,
        "slower": tally.slower,
        "refused": dict(tally.refused),
        "memory": [
            {"stage": place, "part": part, "count": count} for (place, part), count in tally.memory.most_common()
        ],
    }
