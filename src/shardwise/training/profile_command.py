"""`shardwise profile`: measure some steps of a training run, compare them with the prediction, and suggest fixes."""

import argparse
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from shardwise.answer import Answer, Canvas
from shardwise.errors import ShardwiseError
from shardwise.explain.doctor.examine import examine
from shardwise.explain.doctor_command import render_findings
from shardwise.explain.report_command import (
    perfetto_beside,
    render_parts,
    render_streams,
    streams_as_data,
    write_report,
)
from shardwise.output import check_output
from shardwise.trace.run import Run
from shardwise.trace.stretches import parts_of_ranks
from shardwise.training import command as train_command
from shardwise.units import format_seconds
from shardwise.working import step_aside

if TYPE_CHECKING:
    from shardwise.ranks.gpus import Gpus
    from shardwise.training.profile import Measured

DESCRIPTION = """
Measure some steps of a training run: every instruction, wait and collective on
every rank, and on a GPU every kernel, collective and copy, by stream.

Takes the options of `shardwise train`, saves no checkpoint, and ends with a
report page and the findings of the doctor. --calibrate writes the measurements
as a cluster.toml for the planner.
"""

EXAMPLE = """
shardwise profile tiny --show
shardwise profile tiny --devices 1 --steps 2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    train_command.add_arguments(parser)
    parser.add_argument(
        "--steps", type=int, default=5, metavar="N", help="steps to measure, each also with a trace (default: 5)"
    )
    parser.add_argument("--calibrate", metavar="FILE", help="write the measurements as a cluster.toml")


def meant_by(option: str, value: str) -> str | None:
    """Return what to type instead of an unknown option."""
    return train_command.meant_by(option, value)


def run(arguments: argparse.Namespace) -> Answer:
    if arguments.steps < 1:
        raise ShardwiseError(f"--steps {arguments.steps}: it must be at least 1", remedy="--steps 5")
    if arguments.show:
        return train_command.run(arguments)
    if arguments.calibrate is not None:
        check_output(Path(arguments.calibrate), remedy="--calibrate cluster.toml")
    recipe = train_command.recipe_of(arguments)
    from shardwise.training.profile import measure, write_run  # Loads torch.
    from shardwise.training.run import count_devices

    asked = train_command.ask(arguments, recipe, count_devices())
    folder = _folder(arguments, recipe.name)
    job = asked.job(folder)
    gpus: Gpus = "shared" if arguments.share_gpus else "own"
    step_aside()  # The first rank draws its own progress bar.
    measured = measure(job, asked.num_devices, arguments.steps, gpus=gpus)
    if measured is None:  # Under torchrun, only the first rank reports.
        return Answer(data={}, render=lambda _: None)
    found_run = write_run(job, measured)
    page = folder / "report.html"
    write_report(found_run, page)
    if arguments.calibrate is not None:
        from shardwise.training.calibrate import calibrate

        calibrate(measured, Path(arguments.calibrate))
    answer = _answer(found_run, measured, page, arguments.calibrate)
    return replace(answer, data={**answer.data, "precision": job.plan.precision, "compiled": job.compile})


def _folder(arguments: argparse.Namespace, name: str) -> Path:
    """Return the folder for the profile. That of a training run is refused: its trace would be overwritten."""
    if arguments.folder is None:
        return next(path for n in count(1) if not (path := Path("runs") / f"profile-{name}-{n}").exists())
    folder = Path(arguments.folder)
    if (folder / "checkpoints").is_dir():
        raise ShardwiseError(
            f"{folder} is the folder of a training run, and a profile would overwrite its trace",
            remedy=f"--folder {folder}-profile",
        )
    return folder


def _answer(run: Run, measured: "Measured", page: Path, calibrated: str | None) -> Answer:
    found = examine(run)
    predicted = None if run.predicted is None else run.predicted.makespan
    data = {
        "run": str(page.parent),
        "step_seconds": median(measured.step_seconds),
        "traced_step_seconds": run.trace.makespan,
        "predicted_step_seconds": predicted,
        "tracing_cost": measured.tracing_cost,
        "tokens_per_second": measured.tokens / median(measured.step_seconds),
        "parts": [{str(part): seconds for part, seconds in rank.items()} for rank in parts_of_ranks(run.trace)],
        "streams": streams_as_data(run.trace),
        "reading_seconds": measured.reading_seconds,
        "links": [
            {
                "from": each.rank,
                "to": each.peer,
                "kind": each.kind,
                "messages": each.num_messages,
                "bytes": each.num_bytes,
            }
            for each in run.trace.traffic
        ],
        "findings": [{"kind": each.kind, "problem": each.problem, "fix": each.fix} for each in found],
        "page": str(page),
        "cluster": calibrated,
    }

    def render(canvas: Canvas) -> None:
        step, beside = format_seconds(median(measured.step_seconds)), ""
        if predicted is not None:
            beside = f"; its instructions alone, played, {format_seconds(predicted)}"
        canvas.print(
            f"{canvas.paint(f'a step takes {step}', 'bold')}, {data['tokens_per_second']:.0f} tokens/s "
            f"(median of {len(measured.step_seconds)}); the step shown took {format_seconds(run.trace.makespan)}"
            f"{beside}\n"
        )
        render_parts(canvas, run)
        render_streams(canvas, run)
        canvas.print()
        render_findings(canvas, run, found)
        written = [str(page), str(perfetto_beside(page)), *([calibrated] if calibrated else [])]
        canvas.print(f"\nwritten: {', '.join(written)}")

    return Answer(data=data, render=render)
