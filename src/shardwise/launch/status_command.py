"""`shardwise status`: the status of a run, wherever it was started."""

import argparse
from dataclasses import asdict
from pathlib import Path

from shardwise.answer import Answer, Canvas, table
from shardwise.launch.run_status import RunStatus, status_of
from shardwise.trace.history import Start
from shardwise.trace.journal import Event
from shardwise.units import format_seconds

DESCRIPTION = """
Show the state of a run: whether it is running, which rank is on which host and
since when, the last step and checkpoint, and why each earlier start ended.
Reads the folder of the run, and asks Slurm or Kubernetes if the run was
submitted there.
"""

EXAMPLE = """
shardwise status runs/first
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run")


def run(arguments: argparse.Namespace) -> Answer:
    status = status_of(Path(arguments.run))
    data = asdict(status)
    data["num_restarts"] = max(0, len(status.starts) - 1)
    return Answer(data=data, render=lambda canvas: draw(status, canvas))


def draw(status: RunStatus, canvas: Canvas) -> None:
    """Draw a few lines, and a table of starts."""
    step = "" if status.step is None else f", step {status.step}"
    canvas.print(f"{canvas.paint(status.folder, 'bold')}: {canvas.paint(status.state, 'bold')}{step}")
    if status.job is not None:
        said = "" if status.job_state is None else f": {status.job_state.lower()}"
        reason = "" if status.job_reason is None else f" ({status.job_reason})"
        canvas.print(f"{status.on} job {status.job}{said}{reason}")
    saved = "none yet" if status.checkpoint is None else f"{status.checkpoint}, saved {status.checkpoint_when}"
    canvas.print(f"last checkpoint: {saved}")
    if status.copy_step is not None:
        where = "one machine" if len(status.copy_nodes) == 1 else f"{len(status.copy_nodes)} machines"
        canvas.print(f"last copy in memory: step {status.copy_step}, made {status.copy_when}, on {where}")
    if status.copies_problem is not None:
        canvas.print(f"copies: {status.copies_problem}")
    if not status.starts:
        return
    last = status.starts[-1]
    canvas.print(f"plan {last.plan}, since {last.when}")
    for host, ranks in last.hosts.items():
        devices = [str(place["device"]) for place in last.places if place["host"] == host]
        canvas.print(f"  {host}: {_ranks(ranks)} on {', '.join(sorted(set(devices)))}")
    for each in status.slow:
        canvas.print(f"{canvas.paint('slow:', 'bold yellow')} {_slow(each)}")
    for each in status.corrupt:
        canvas.print(f"{canvas.paint('wrong numbers:', 'bold yellow')} step {each.get('step')}: {each.get('what')}")
    if status.left_out:
        canvas.print(f"left out: {', '.join(status.left_out)}")
    if len(status.starts) > 1:
        canvas.print(f"restarted {len(status.starts) - 1} times:" if len(status.starts) > 2 else "restarted once:")
        table(("started", "from step", "to step", "plan", "hosts", "ended"), map(_row, status.starts), canvas)


def _row(start: Start) -> tuple[object, ...]:
    return (
        start.when,
        f"{start.step} ({start.source})" if start.source else start.step,
        "-" if start.end_step is None else start.end_step,
        start.plan,
        ", ".join(start.hosts),
        start.why or "it runs",
    )


def _slow(event: Event) -> str:
    seconds = [format_seconds(float(event.get(key, 0.0))) for key in ("seconds", "others_seconds")]
    return (
        f"rank {event['rank']} on {event.get('host')} since {event['when']}, by {event['cause']}:"
        f" {seconds[0]} of a step, others {seconds[1]}"
    )


def _ranks(ranks: list[int]) -> str:
    """Return `ranks 0 to 7`, or each of a few that are not consecutive."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"
