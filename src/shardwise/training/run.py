"""A run from beginning to end, however its ranks are started: here, as processes of this machine, or by `torchrun`."""

from contextlib import ExitStack

import torch

from shardwise import environment
from shardwise.errors import ShardwiseError
from shardwise.ranks.worker import Gpus
from shardwise.training.choose import check_host
from shardwise.training.finish import finish
from shardwise.training.folder import make_folder, own_folder, write_recipe_and_plan
from shardwise.training.job import Job
from shardwise.training.local_ranks import run_here
from shardwise.training.loop import Loop
from shardwise.training.outcome import Result, StoppedError
from shardwise.training.progress import Progress
from shardwise.training.setup import check_inputs, make_ready
from shardwise.training.stop import StopSignals
from shardwise.training.world import World
from shardwise.units import counted, format_bytes

#: Processes of a machine without a GPU: more cores than this make each other wait at small models.
_MOST_PROCESSES = 4


def count_devices() -> int:
    """How many ranks a run has here, if nothing is said: those of `torchrun`, the GPUs, or else the cores."""
    launched = environment.find_world_size()
    if launched is not None:
        return launched
    return torch.cuda.device_count() or min(_MOST_PROCESSES, environment.num_cores())


def train(job: Job, num_devices: int, *, gpus: Gpus = "own") -> Result | None:
    """Run a job. Under `torchrun`, None on all ranks but the first."""
    check_inputs(job)
    make_folder(job.folder)
    num_gpus, is_launched = torch.cuda.device_count(), environment.place_under_torchrun() is not None
    if 0 < num_gpus < num_devices and gpus == "own" and not is_launched:
        raise ShardwiseError(
            f"the plan {job.plan} has {num_devices} ranks, and this machine has {counted(num_gpus, 'GPU')}",
            remedy=f"--devices {num_gpus}; or --share-gpus, to check the plan on what is here; or on processors:"
            " CUDA_VISIBLE_DEVICES= shardwise train ...",
        )
    if not is_launched:
        check_host(job)
    with own_folder(job.folder, is_owner=not is_launched):
        told = train_rank(job) if is_launched or num_devices == 1 else run_here(train_rank, job, num_devices, gpus)
    if isinstance(told, StoppedError):
        raise ShardwiseError(told.problem, remedy=told.remedy)
    return told


def train_rank(job: Job) -> Result | StoppedError | None:
    """What every rank does. Only the first has a result. What all ranks know went wrong is given back, not raised."""
    with StopSignals() as stop, ExitStack() as stack:
        world = World()
        progress = Progress(speaks=world.is_first)
        if world.is_first:
            make_folder(job.folder)
            stack.enter_context(own_folder(job.folder, is_owner=environment.place_under_torchrun() is not None))
        world.wait()
        setup = make_ready(job, world)
        with setup.engine:
            if world.is_first:
                write_recipe_and_plan(job.folder, job.recipe, job.plan)
            begun = f" from step {setup.step}" if setup.step else ""
            progress.say(
                f"{job.recipe.name}{begun}: {setup.num_parameters / 1e6:.2f} M parameters, "
                f"{format_bytes(setup.data_bytes, decimal=True)} of tokens, plan {job.plan} on "
                f"{world.size} x {world.device.type}, in {job.folder}"
            )
            if setup.is_old:
                progress.warn(
                    "the checkpoint is of an older format, without a checksum of its index: that could be damaged and"
                    " nobody would see; those that are saved from now on have one"
                )
            num_gpus = torch.cuda.device_count()
            if world.device.type == "cuda" and environment.place_under_torchrun() is None and world.size > num_gpus:
                progress.say(f"{world.size} ranks share {counted(num_gpus, 'GPU')}: for checking, and slow")
            loop = Loop(job, world, setup, stop, progress)
            try:
                outcome = loop.run()
            except StoppedError as error:
                return error
            finally:
                loop.close()
        result = finish(job, outcome, world.size, progress) if world.is_first else None
        world.wait()
        world.close()
    return result
