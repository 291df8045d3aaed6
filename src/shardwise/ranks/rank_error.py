"""What a rank's error is to everyone else, and how it is written down for them."""

import json
import traceback
from functools import partial

from shardwise.errors import ShardwiseError


class RankError(ShardwiseError):
    """Another process failed: `rank` is the one that did, or that is missing."""

    def __init__(self, problem: str, *, remedy: str | None = None, rank: int | None = None) -> None:
        super().__init__(problem, remedy=remedy)
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return partial(RankError, remedy=self.remedy, rank=self.rank), (self.problem,)


def describe_failure(rank: int, error: BaseException) -> RankError:
    """What a rank's own error is to everyone else: its rank, where it stood, its text and its traceback."""
    place = next((f" {note}" for note in getattr(error, "__notes__", ()) if note.startswith("at ")), "")
    problem = error.problem if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"
    story = "".join(traceback.format_exception(error)).rstrip().replace("\n", "\n    ")
    remedy = error.remedy if isinstance(error, ShardwiseError) else None
    return RankError(f"rank {rank} failed{place}: {problem}\n    {story}", remedy=remedy, rank=rank)


def encode(error: RankError) -> str:
    """An error as it stands in the store."""
    return json.dumps({"problem": error.problem, "remedy": error.remedy, "rank": error.rank})


def decode(text: bytes) -> RankError:
    """The error that stands in the store."""
    return RankError(**json.loads(text))
