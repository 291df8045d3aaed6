"""A training run from beginning to end. Its ranks are processes started here, on this machine, or by `torchrun`."""

from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from shardwise import environment
from shardwise.errors import ShardwiseError
from shardwise.ranks.gpus import Gpus
from shardwise.training.finish import finish
from shardwise.training.folder import make_folder, own_folder, write_recipe_and_plan
from shardwise.training.job import Job
from shardwise.training.local_ranks import run_here
from shardwise.training.loop import Loop
from shardwise.training.machine_check import check_machine
from shardwise.training.noted import announce, note_end
from shardwise.training.outcome import Outcome, Result, StoppedError
from shardwise.training.progress import Progress
from shardwise.training.setup import check_inputs, make_ready
from shardwise.training.stop import StopSignals
from shardwise.training.world import World

#: The most processes on a machine without a GPU. With small models, more processes only wait for each other.
_MOST_PROCESSES = 4


def count_devices() -> int:
    """Return the default number of ranks: the world size of `torchrun`, else the number of GPUs, else of cores."""
    launched = environment.find_world_size()
    if launched is not None:
        return launched
    return torch.cuda.device_count() or min(_MOST_PROCESSES, environment.num_cores())


def train(job: Job, num_devices: int, *, gpus: Gpus = "own") -> Result | None:
    """Run a job and return its result. Under `torchrun`, all ranks but the first return None."""
    check_inputs(job)
    check_machine(job, num_devices, gpus)
    make_folder(job.folder)
    is_launched = environment.place_under_torchrun() is not None
    if is_launched and gpus == "shared":
        environment.ask_for_shared_gpus()
    with own_folder(job.folder, is_owner=not is_launched), environment.seated(job.seats):
        told = train_rank(job) if is_launched or num_devices == 1 else run_here(train_rank, job, num_devices, gpus)
    if isinstance(told, StoppedError):
        raise ShardwiseError(told.problem, remedy=told.remedy)
    return told


def train_rank(job: Job) -> Result | StoppedError | None:
    """Run one rank. Only the first returns a result. A failure that all ranks know of is returned, not raised."""
    with StopSignals() as stop, ExitStack() as stack:
        world = World()
        stack.enter_context(world.telling())
        progress = Progress(speaks=world.is_first)
        if world.is_first:
            make_folder(job.folder)
            stack.enter_context(own_folder(job.folder, is_owner=environment.place_under_torchrun() is not None))
        world.wait()
        if job.said is not None:
            progress.say(job.said)
        told = _run(job, world, stop, progress)
        if isinstance(told, _NotCompiled):
            progress.warn(f"blocks cannot be compiled here, so they run as they are: {told.why}")
            job = replace(job, compile=False)
            told = _run(job, world, stop, progress)
        assert not isinstance(told, _NotCompiled), "nothing was compiled"
        if isinstance(told, StoppedError):
            return told
        result = finish(job, told, world.size, progress) if world.is_first else None
        world.wait()
        world.close()
    return result


@dataclass(frozen=True, slots=True)
class _NotCompiled:
    """The first step failed with compiled blocks, which the user had not asked for."""

    why: str


def _run(job: Job, world: World, stop: StopSignals, progress: Progress) -> Outcome | StoppedError | _NotCompiled:
    """Run the steps, from the existing checkpoint or from the beginning."""
    setup = make_ready(job, world)
    # Only with one rank: several ranks may fail for different reasons, and each error is reported.
    gives_up = job.compile and job.is_chosen and world.size == 1
    with setup.engine:
        if world.is_first:
            write_recipe_and_plan(job.folder, job.recipe, job.plan)
        announce(job, world, setup, progress)
        loop, is_over, has_failed = Loop(job, world, setup, stop, progress), False, True
        try:
            outcome = loop.run()
            has_failed = False
            ended = outcome.result
            note_end(
                job, world, ended.stopped_by or "finished", step=ended.step, leave_out=ended.leave_out,
                take_in=ended.take_in,
            )  # fmt: skip
            return outcome
        except StoppedError as error:
            is_over, has_failed = error.is_final, False
            note_end(job, world, error.problem, is_final=error.is_final, leave_out=error.hosts)
            return error
        except Exception as error:
            note_end(job, world, str(error), lost=getattr(error, "rank", None))
            if not gives_up or setup.engine.num_steps > setup.step + 1 or isinstance(error, ShardwiseError):
                raise
            # The first line of torch's message names the backend that failed.
            lines = [line.strip() for line in str(error).splitlines() if line.strip() and "raised:" not in line]
            why = lines[0] if lines else type(error).__name__
        finally:
            loop.close(is_over=is_over, has_failed=has_failed)
    return _NotCompiled(f"{why} (--set compile=off)")
