"""`shardwise convert`: our checkpoints to Hugging Face's folders, and back."""

import argparse
from pathlib import Path

from shardwise.answer import Answer, Canvas, table
from shardwise.errors import ShardwiseError
from shardwise.units import counted, format_bytes

DESCRIPTION = """Make a Hugging Face folder of a run or of one of its checkpoints, or a checkpoint of a Hugging Face
folder: whichever SOURCE is, TARGET is the other. Weights go over tensor by tensor.
"""

EXAMPLE = """
shardwise convert --families
shardwise train tiny --devices 1 --folder runs/tiny
shardwise convert runs/tiny tiny-hf
shardwise convert tiny-hf tiny-again --dtype bf16
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="a run, a checkpoint, or a Hugging Face folder")
    parser.add_argument("target", nargs="?", metavar="TARGET", help="a folder that is not there yet")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="the type of the weights (as they are)")
    parser.add_argument("--families", action="store_true", help="say which families of models there are")


def run(arguments: argparse.Namespace) -> Answer:
    if arguments.families:
        return _families()
    for name in ("source", "target"):
        if getattr(arguments, name) is None:
            raise ShardwiseError(f"{name.upper()} is missing", remedy="shardwise convert SOURCE TARGET")
    from shardwise.training.convert import convert  # Loads torch.

    made = convert(Path(arguments.source), Path(arguments.target), dtype=arguments.dtype)
    data = {
        "target": str(made.target),
        "kind": made.kind,
        "num_tensors": made.num_tensors,
        "num_bytes": made.num_bytes,
    }

    def render(canvas: Canvas) -> None:
        what = "a Hugging Face folder" if made.kind == "huggingface" else "a checkpoint"
        canvas.print(
            f"{canvas.paint(str(made.target), 'bold')} is {what}: {counted(made.num_tensors, 'tensor')},"
            f" {format_bytes(made.num_bytes)}"
        )

    return Answer(data=data, render=render)


def _families() -> Answer:
    from shardwise.nets.hf.catalogue import FAMILIES  # Loads torch.

    rows = [(family.name, family.architecture) for family in FAMILIES.values()]
    return Answer(
        data={"families": dict(rows)},
        render=lambda canvas: table(["model_type", "architecture"], rows, canvas),
    )
