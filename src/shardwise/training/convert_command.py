"""`shardwise convert`: convert between our checkpoints, Hugging Face's folders and torch's."""

import argparse
from pathlib import Path

from shardwise.answer import Answer, Canvas, table
from shardwise.errors import ShardwiseError
from shardwise.units import format_bytes

DESCRIPTION = """
Convert between runs or checkpoints of Shardwise, Hugging Face folders, and
folders of torch.distributed.checkpoint (--to dcp, read by dcp.load under
Hugging Face's names). Weights are converted tensor by tensor.
"""

EXAMPLE = """
shardwise convert --families
shardwise train tiny --devices 1 --folder runs/tiny
shardwise convert runs/tiny tiny-hf
shardwise convert tiny-hf tiny-again --dtype bf16
shardwise convert runs/tiny tiny-dcp --to dcp
"""

_KINDS = {
    "shardwise": "a checkpoint",
    "huggingface": "a Hugging Face folder",
    "dcp": "a folder of torch.distributed.checkpoint",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="?", metavar="SOURCE", help="a run, a checkpoint, or a folder of another format"
    )
    parser.add_argument("target", nargs="?", metavar="TARGET", help="a folder that does not exist yet")
    parser.add_argument(
        "--to", choices=list(_KINDS), help="format of TARGET (default: huggingface, or shardwise from one)"
    )
    parser.add_argument(
        "--config", metavar="FOLDER", help="folder of config.json, if SOURCE is a dcp folder without one"
    )
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], help="type of the weights (default: as they are)")
    parser.add_argument("--families", action="store_true", help="list the supported model families")


def run(arguments: argparse.Namespace) -> Answer:
    if arguments.families:
        return _families()
    for name in ("source", "target"):
        if getattr(arguments, name) is None:
            raise ShardwiseError(f"{name.upper()} is missing", remedy="shardwise convert SOURCE TARGET")
    from shardwise.training.convert import convert  # Loads torch.

    kind, num_bytes = convert(
        Path(arguments.source),
        Path(arguments.target),
        to=arguments.to,
        config=None if arguments.config is None else Path(arguments.config),
        dtype=arguments.dtype,
    )
    target = str(Path(arguments.target))

    def render(canvas: Canvas) -> None:
        canvas.print(f"{canvas.paint(target, 'bold')} is {_KINDS[kind]}, of {format_bytes(num_bytes)}")

    return Answer(data={"target": target, "kind": kind, "num_bytes": num_bytes}, render=render)


def _families() -> Answer:
    from shardwise.nets.hf.catalogue import FAMILIES  # Loads torch.

    rows = [(family.name, family.architecture) for family in FAMILIES.values()]
    return Answer(
        data={"families": dict(rows)},
        render=lambda canvas: table(["model_type", "architecture"], rows, canvas),
    )
