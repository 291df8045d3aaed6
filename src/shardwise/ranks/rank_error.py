"""The error of a rank as other ranks see it, and its form in the store."""

import json
import traceback
from functools import partial

from shardwise.errors import ShardwiseError


class RankError(ShardwiseError):
    """Another process failed: `rank` is the one that failed or is missing."""

    def __init__(self, problem: str, *, remedy: str | None = None, rank: int | None = None) -> None:
        super().__init__(problem, remedy=remedy)
        self.rank = rank

    def __reduce__(self) -> tuple[object, ...]:
        return partial(RankError, remedy=self.remedy, rank=self.rank), (self.problem,)


def describe_failure(rank: int, error: BaseException) -> RankError:
    """Return a rank's error as other ranks see it: its rank, its place, its text and its traceback."""
    place = next((f" {note}" for note in getattr(error, "__notes__", ()) if note.startswith("at ")), "")
    problem = error.problem if isinstance(error, ShardwiseError) else f"{type(error).__name__}: {error}"
    story = "".join(traceback.format_exception(error)).rstrip().replace("\n", "\n    ")
    remedy = error.remedy if isinstance(error, ShardwiseError) else None
    return RankError(f"rank {rank} failed{place}: {problem}\n    {story}", remedy=remedy, rank=rank)


def encode(error: RankError) -> str:
    """Return an error in the form of the store."""
    return json.dumps({"problem": error.problem, "remedy": error.remedy, "rank": error.rank})


def decode(text: bytes) -> RankError:
    """Return the error from the form of the store."""
    return RankError(**json.loads(text))
