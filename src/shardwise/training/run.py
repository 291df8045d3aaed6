"""A run from beginning to end, however its ranks are started: here, as processes of this machine, or by `torchrun`."""

import contextlib
import os
import signal
from types import FrameType, TracebackType
from typing import Any

import torch

from shardwise import environment
from shardwise.errors import ShardwiseError
from shardwise.runtime.spawn import Ranks
from shardwise.training.choose import vocabulary_of
from shardwise.training.finish import Result, finish
from shardwise.training.folder import RECIPE, write_plan
from shardwise.training.loop import Loop, StoppedError
from shardwise.training.model import settings_of
from shardwise.training.progress import Progress
from shardwise.training.recipe import Recipe
from shardwise.training.setup import Job, make_ready
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


def check_inputs(recipe: Recipe) -> None:
    """Refuse data or a model that cannot be read, before any rank is started."""
    settings_of(recipe, vocabulary_of(recipe))


def train(job: Job, num_devices: int) -> Result | None:
    """Run a job. Under `torchrun`, None on all ranks but the first."""
    check_inputs(job.recipe)
    num_gpus = torch.cuda.device_count()
    if 0 < num_gpus < num_devices and environment.place_under_torchrun() is None:
        raise ShardwiseError(
            f"the plan {job.plan} has {num_devices} ranks, and this machine has {counted(num_gpus, 'GPU')}",
            remedy=f"--devices {num_gpus}, or on processors: CUDA_VISIBLE_DEVICES= shardwise train ...",
        )
    if environment.place_under_torchrun() is not None or num_devices == 1:
        told = train_rank(job)
    else:
        with Ranks(num_devices) as ranks, _Forwarded(ranks):
            told = ranks.run(train_rank, job)[0]
    if isinstance(told, StoppedError):
        raise ShardwiseError(told.problem, remedy=told.remedy)
    return told


def train_rank(job: Job) -> Result | StoppedError | None:
    """What every rank does. Only the first has a result. What all ranks know went wrong is given back, not raised."""
    with StopSignals() as stop:
        world = World()
        progress = Progress(speaks=world.is_first)
        if world.is_first:
            job.folder.mkdir(parents=True, exist_ok=True)
        world.wait()
        setup = make_ready(job, world)
        with setup.engine:
            if world.is_first:
                (job.folder / RECIPE).write_text(job.recipe.to_toml(), encoding="utf-8")
                write_plan(job.folder, job.plan)
            begun = f" from step {setup.step}" if setup.step else ""
            progress.say(
                f"{job.recipe.name}{begun}: {setup.num_parameters / 1e6:.2f} M parameters, "
                f"{format_bytes(setup.tokens.tokens.nbytes, decimal=True)} of tokens, plan {job.plan} on "
                f"{world.size} x {world.device.type}, in {job.folder}"
            )
            loop = Loop(job, world, setup, stop, progress)
            try:
                outcome = loop.run()
            except StoppedError as error:
                return error
            finally:
                loop.close()
        result = finish(job, outcome, world.size) if world.is_first else None
        world.wait()
        world.close()
    return result


class _Forwarded:
    """Ctrl-C and SIGTERM go on to the ranks, which save and stop; a second one ends them at once."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> None:
        self._before = {each: signal.signal(each, self._hear) for each in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, story: TracebackType | None
    ) -> None:
        self._restore()

    def _hear(self, number: int, _: FrameType | None) -> None:
        self._restore()
        for process in self._ranks.process_ids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def _restore(self) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)
        self._before = {}
