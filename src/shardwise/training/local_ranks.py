"""The ranks of a run as processes of this machine."""

from collections.abc import Callable
from typing import TypeVar

import torch

from shardwise import environment
from shardwise.errors import ShardwiseError
from shardwise.ranks.faults import RankError
from shardwise.ranks.spawn import Ranks
from shardwise.ranks.worker import Gpus
from shardwise.training.job import Job
from shardwise.training.stop import Forwarded
from shardwise.units import counted

RankNotes = TypeVar("RankNotes")


def check_gpus(job: Job, num_devices: int, gpus: Gpus) -> None:
    """Refuse more ranks than GPUs, unless they are to share them: they would all compute on the CPU."""
    num_gpus, is_launched = torch.cuda.device_count(), environment.place_under_torchrun() is not None
    if 0 < num_gpus < num_devices and gpus == "own" and not is_launched:
        raise ShardwiseError(
            f"the plan {job.plan} has {num_devices} ranks, and this machine has {counted(num_gpus, 'GPU')}",
            remedy=f"--devices {num_gpus}; or --share-gpus, to check the plan on what is here; or on processors:"
            " CUDA_VISIBLE_DEVICES= shardwise train ...",
        )


def run_here(train_rank: Callable[[Job], RankNotes], job: Job, num_devices: int, gpus: Gpus = "own") -> RankNotes:
    """Run a job on ranks of this machine. A mistake of the user's that one of them has found is told as it is."""
    with Ranks(num_devices, gpus=gpus) as ranks, Forwarded(ranks) as stop:
        try:
            told: RankNotes = ranks.run(train_rank, job)[0]
        except RankError as error:
            if stop.has_ended(error):
                stop.end()
            if error.remedy is None:
                raise
            raise ShardwiseError(error.problem.partition("\n    Traceback")[0], remedy=error.remedy) from None
    return told
