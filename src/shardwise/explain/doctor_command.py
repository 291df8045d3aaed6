"""`shardwise doctor`: find what slows a run down, with numbers, what to type against it, and the expected gain."""

import argparse
from collections.abc import Sequence

from shardwise.answer import Answer, Canvas
from shardwise.explain.doctor.case import Finding
from shardwise.explain.doctor.examine import examine
from shardwise.explain.runs_by_name import find_run
from shardwise.trace.run import Run
from shardwise.units import format_percent

DESCRIPTION = """
Find what slows a run down: slow stages and ranks, bubbles, exposed
communication, waits for data, memory. Each finding has numbers as evidence,
something to type, and the predicted gain, from a simulation of the trace with
that change.

RUN is a folder written by `shardwise train` or `shardwise profile`, a trace,
or a plan, whose schedule is simulated.
"""

EXAMPLE = """
shardwise doctor pp=4,microbatches=8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, a trace, or a plan")


def run(arguments: argparse.Namespace) -> Answer:
    found_run = find_run(arguments.run)
    found = examine(found_run)
    data = {"run": found_run.name, "step": found_run.trace.makespan, "findings": [_as_data(each) for each in found]}
    return Answer(data=data, render=lambda canvas: render_findings(canvas, found_run, found))


def _as_data(finding: Finding) -> dict[str, object]:
    return {
        "kind": finding.kind,
        "problem": finding.problem,
        "evidence": finding.evidence,
        "fix": finding.fix,
        "gain": finding.gain_seconds,
        "about": finding.about,
        "ranks": list(finding.ranks),
    }


def render_findings(canvas: Canvas, run: Run, found: Sequence[Finding]) -> None:
    """Draw the findings, the most serious first."""
    step = run.trace.makespan
    if not found:
        canvas.print(f"{canvas.paint(run.name, 'bold')}: nothing was found that holds it up")
        return
    canvas.print(f"{canvas.paint(run.name, 'bold')}: {len(found)} {'finding' if len(found) == 1 else 'findings'}")
    for number, finding in enumerate(found, 1):
        canvas.print()
        canvas.print(f"{number}. {canvas.paint(finding.problem, 'bold')}")
        canvas.print(f"   {finding.evidence}")
        canvas.print(f"   try: {canvas.paint(finding.fix, 'cyan')}")
        if finding.gain_seconds is not None and step > 0:
            share = format_percent(finding.gain_seconds / step)
            canvas.print(f"   predicted gain: {run.time(finding.gain_seconds)}, {share} of the step")
        elif finding.about:
            canvas.print(f"   {finding.about}")
