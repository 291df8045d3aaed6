"""Draws docs/pictures/dataflow.svg: a pipeline over four places, on links where a copy takes half as long as a task."""

from dataclasses import replace
from pathlib import Path

from shardwise.dataflow.links import Link
from shardwise.dataflow.machine import Machine
from shardwise.testing.flows import SIZE, pipeline
from shardwise.trace.svg import to_svg

PLACES = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
PICTURE = Path(__file__).with_suffix(".svg")


def draw() -> str:
    """The picture's text. Time is reckoned, so it is the same on every computer."""
    with Machine(PLACES, links=Link(bytes_per_second=4 * SIZE * SIZE / 0.5)) as machine:
        pipeline(machine, PLACES, 1.0)
        report = machine.report("pipeline")
    # The host and the disk, which come last, compute nothing.
    devices = replace(report.trace, num_ranks=len(PLACES))
    return to_svg(devices, title="Four layers at four places, eight microbatches; a copy takes half as long as a task")


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
