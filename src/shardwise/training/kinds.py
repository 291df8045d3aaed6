"""Which kind of weights a folder has: ours, Hugging Face's, or those of `torch.distributed.checkpoint`."""

from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.nets.hf.entries import CONFIG
from shardwise.training.checkpoint.index import INDEX, find_last
from shardwise.training.folder import CHECKPOINTS

METADATA = ".metadata"
#: A folder beside our files, with the other files of the source folder.
BESIDE = "hf"
#: The kinds of folders, and the file that identifies each.
OURS, THEIRS, DCP = "shardwise", "huggingface", "dcp"
KINDS = {OURS: INDEX, DCP: METADATA, THEIRS: CONFIG}


def find_source(source: Path) -> tuple[Path, str]:
    """Return the folder to read, and its kind. For a run it is the last checkpoint."""
    if not source.exists():
        raise ShardwiseError(
            f"{source} does not exist", remedy="a run, one of its checkpoints, or a Hugging Face folder"
        )
    if (source / CHECKPOINTS).is_dir():
        last = find_last(source / CHECKPOINTS)
        if last is None:
            raise ShardwiseError(f"the run {source} has no checkpoint yet", remedy="a run that has saved one")
        source = last
    for kind, file in KINDS.items():
        if (source / file).is_file():
            return source, kind
    raise ShardwiseError(
        f"{source} has neither {INDEX} nor {CONFIG} nor {METADATA}, so it is not a checkpoint that Shardwise can read",
        remedy="a run, one of its checkpoints, or a Hugging Face folder",
    )
