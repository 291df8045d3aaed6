"""The ranks of a run as processes of this machine."""

from collections.abc import Callable
from typing import TypeVar

from shardwise.errors import ShardwiseError
from shardwise.ranks.gpus import Gpus
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from shardwise.training.job import Job
from shardwise.training.stop import Forwarded

Result = TypeVar("Result")


def run_here(train_rank: Callable[[Job], Result], job: Job, num_devices: int, gpus: Gpus = "own") -> Result:
    """Run a job on ranks of this machine. A user error that a rank raised is raised again without its traceback."""
    with Ranks(num_devices, gpus=gpus) as ranks, Forwarded(ranks) as stop:
        try:
            told: Result = ranks.run(train_rank, job)[0]
        except RankError as error:
            if stop.has_ended(error):
                stop.end()
            if error.remedy is None:
                raise
            raise ShardwiseError(error.problem.partition("\n    Traceback")[0], remedy=error.remedy) from None
    return told
