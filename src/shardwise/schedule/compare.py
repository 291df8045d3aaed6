"""All schedules for one setting, side by side."""

from shardwise.answer import Answer, Canvas, table
from shardwise.errors import ShardwiseError
from shardwise.schedule.catalogue import CATALOGUE
from shardwise.schedule.outcome import Outcome, make, names, play_out
from shardwise.schedule.question import Question
from shardwise.units import counted, format_number, format_percent


def compare(question: Question) -> Answer:
    """Make and play every schedule; those that cannot be made for the question are listed with the reason."""
    outcomes: list[tuple[str, Outcome]] = []
    refused: list[tuple[str, str]] = []
    for name in names():
        try:
            outcomes.append((name, play_out(make(name, question), question)))
        except ShardwiseError as error:
            refused.append((name, error.problem.splitlines()[0]))
            if len(refused) == len(names()):
                raise  # What even `auto` cannot do, nothing can.
    outcomes.sort(key=lambda entry: (entry[1].span, entry[1].makespan))
    data = {
        "num_stages": question.num_ranks,
        "num_microbatches": question.num_microbatches,
        "schedules": [_row(name, outcome) for name, outcome in outcomes],
        "refused": [{"name": name, "why": why} for name, why in refused],
    }
    return Answer(data=data, render=lambda canvas: _render(outcomes, refused, question, canvas))


def _row(name: str, outcome: Outcome) -> dict[str, object]:
    return {
        "name": name,
        "makespan": outcome.makespan,
        "span": outcome.span,
        "bubble": outcome.bubble,
        "peak_activations": outcome.peaks,
        "num_chunks": outcome.schedule.placement.num_chunks,
        "num_transfers": outcome.num_transfers,
        "num_weight_copies": _weight_copies(name),
        "num_instructions": outcome.schedule.num_instructions,
    }


def _weight_copies(name: str) -> int:
    if name == "auto":
        return 1
    return CATALOGUE[name].num_weight_copies + (name == "pipedream-2bw")


def _render(
    outcomes: list[tuple[str, Outcome]], refused: list[tuple[str, str]], question: Question, canvas: Canvas
) -> None:
    stages, microbatches = counted(question.num_ranks, "stage"), counted(question.num_microbatches, "microbatch")
    canvas.print(f"{stages}, {microbatches}, shortest span first")
    canvas.print()
    columns = ["schedule", "makespan", "span", "bubble", "holds", "weights", "chunks", "sends", "idea"]
    rows = [
        [
            name,
            format_number(outcome.makespan, 6),
            format_number(outcome.span, 6),
            format_percent(outcome.bubble),
            format_number(max(outcome.peaks), 4),
            f"{_weight_copies(name)}x",
            outcome.schedule.placement.num_chunks,
            outcome.num_transfers,
            CATALOGUE[name].idea if name in CATALOGUE else "made for these times and this memory",
        ]
        for name, outcome in outcomes
    ]
    table(columns, rows, canvas)
    canvas.print()
    canvas.print("holds: microbatch-stages on the fullest rank; weights: copies of the parameters")
    for name, why in refused:
        canvas.print(f"{canvas.paint('left out', 'dim')} {name}: {why}")
