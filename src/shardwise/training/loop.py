"""The training loop: step, log, evaluate, save, and stop if there is a reason to. All ranks run the same iterations.

The results of a step are read after the next step has been launched, so that a GPU never waits for the host:

    host      launch 1 | launch 2 | read 1 | launch 3 | read 2 ...

Steps that are logged are traced, and read at once. So is a step that is followed by anything but another step.
"""

import math
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from shardwise.engine.update import LaunchedStep, StepNumbers
from shardwise.trace.events import Trace
from shardwise.training.data.rows import Batch, Prefetcher
from shardwise.training.health import Health
from shardwise.training.job import Job
from shardwise.training.looks import StreamLooks
from shardwise.training.machine import peak_share
from shardwise.training.metrics import MetricLog
from shardwise.training.outcome import Outcome, Result
from shardwise.training.progress import Progress, told_of
from shardwise.training.safekeeping import Safekeeping
from shardwise.training.setup import Setup, on_device
from shardwise.training.speed import Speed
from shardwise.training.stop import StopSignals, name_of
from shardwise.training.world import World

#: If the loss scale of an fp16 run falls below this, overflow is not the cause.
_LOWEST_SCALE = 1.0
#: One of this many most recently traced steps is kept.
_LAST_TRACES = 5


class _UnderWay(NamedTuple):
    """A launched step, counted from 0, with its batch and learning rate."""

    step: int
    batch: Batch
    rate: float
    launched: LaunchedStep


class Loop:
    """One run on one rank."""

    def __init__(self, job: Job, world: World, setup: Setup, stop: StopSignals, progress: Progress) -> None:
        self._job, self._world, self._setup, self._stop, self._progress = job, world, setup, stop, progress
        self._safe, self._health = Safekeeping(job, world, setup, progress), Health(job, world, setup, progress)
        self._log = MetricLog(job, world, progress, after=setup.step)
        self._traces: deque[Trace] = deque(maxlen=_LAST_TRACES)
        #: The first step allocates memory and compiles blocks, so its trace is kept only if there is no other.
        self._first_trace: Trace | None = None
        self._held_out_loss: float | None = None
        self._evaluated = setup.step
        self._looks, self._began = StreamLooks(world), perf_counter()
        self._loss: float | None = None
        self._imbalance: float | None = None
        self._under_way: _UnderWay | None = None
        self._speed = Speed(setup.step, num_tokens=job.recipe.batch * job.recipe.data.sequence)

    def run(self) -> Outcome:
        """Run steps until the recipe's last step, a signal, or an error."""
        recipe, setup, world = self._job.recipe, self._setup, self._world
        step, stopped_by, pins = setup.step, None, world.device.type == "cuda"
        self._began = perf_counter()
        ahead = Prefetcher(setup.batches.at, setup.step, recipe.steps, pins=pins)
        with ahead, self._progress.bar(setup.step, recipe.steps):
            while step < recipe.steps:
                speaks = (step + 1) % recipe.log == 0 or step + 1 == recipe.steps or step == setup.step
                asked = perf_counter()
                batch = on_device(ahead.next(), world)
                self._step(step, batch, traced=speaks, data_wait=perf_counter() - asked)
                step += 1
                if speaks:
                    self._tell(step)
                else:
                    self._progress.step(step, recipe.steps, None)
                number = int(world.highest(self._stop.number))
                if number:
                    self._read()
                    stopped_by = name_of(number)
                    self._progress.say(f"{stopped_by} after step {step}: saving")
                    break
                if self._health.leave_out:
                    self._read()
                    stopped_by = self._health.why
                    self._progress.say(f"{stopped_by}: saving, to go on without {', '.join(self._health.leave_out)}")
                    break
                self._look_up(step)
                if self._health.take_in and step < recipe.steps:
                    stopped_by = self._health.why
                    self._progress.say(f"{stopped_by}: going on from the checkpoint of step {step} with more ranks")
                    break
            self._read()
            self._speed.stop(step)
        if stopped_by is None and recipe.data.held_out and self._evaluated != step:
            self._evaluate(step)
        self._health.before_keeping(step)
        self._safe.save(step)
        self._health.kept(step, saved=True)
        return Outcome(
            result=self._result(step, stopped_by),
            model=setup.model,
            data=setup.data,
            trace=_usual(self._traces) or self._first_trace,
            cut=setup.engine.split.as_data,
        )

    def _result(self, step: int, stopped_by: str | None) -> Result:
        job, setup, speed = self._job, self._setup, self._speed.tokens_per_second
        return Result(
            run=str(job.folder),
            step=step,
            loss=self._loss,
            held_out_loss=self._held_out_loss,
            seconds=self._speed.seconds,
            tokens_per_second=speed,
            mfu=None if speed is None else self._mfu(speed),
            memory_bytes=self._world.highest(float(self._world.memory_bytes())),
            precision=job.plan.precision,
            compiled=job.compile,
            num_parameters=setup.num_parameters,
            plan=str(job.plan),
            checkpoint=self._safe.finish(step),
            expert_imbalance=self._imbalance,
            stopped_by=stopped_by,
            leave_out=self._health.leave_out,
            take_in=self._health.take_in if stopped_by else (),
        )

    def close(self, *, is_over: bool, has_failed: bool) -> None:
        """Close files and writer threads. If the run has failed, the writers do not wait for ranks that are gone.
        If it is over, its copies in memory are released too."""
        self._safe.close(is_over=is_over, has_failed=has_failed)
        self._log.close()
        self._health.close()

    def _step(self, step: int, batch: Batch, *, traced: bool, data_wait: float) -> None:
        """Launch one step and read the previous one. Read this one too if the host needs its results at once."""
        recipe, setup = self._job.recipe, self._setup
        engine, rate = setup.engine, recipe.optimizer.learning_rate_at(step, recipe.steps)
        for optimizer in engine.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        self._health.before_step(step, batch)
        if traced:
            self._read()
            cost, streams = self._looks.cost_seconds, None
            if step > setup.step:
                streams = self._looks.begin(is_last=step + 1 == recipe.steps, elapsed=perf_counter() - self._began)
            loss = engine.train_step(batch, trace=True, data_wait=data_wait, streams=streams)
            self._looks.end(streams)
            self._speed.leave_out(self._looks.cost_seconds - cost)
            launched = LaunchedStep(StepNumbers(loss, engine.gradient_norm, engine.was_finite))
        elif self._health.verifier.is_on:
            # The host needs the result before the weights change.
            self._read()
            launched = LaunchedStep(StepNumbers(engine.train_step(batch), engine.gradient_norm, engine.was_finite))
        else:
            launched = engine.launch_step(batch)
            self._read()
        launched = self._health.after_step(step, batch, launched)
        self._under_way = _UnderWay(step, batch, rate, launched)
        # The next loss scale and the placement of experts depend on this step.
        if launched.is_over or not setup.scale.is_fixed or setup.balancer.looks:
            self._read()

    def _read(self) -> None:
        """Read the step in flight, if there is one. A step that was not finite has not changed the weights."""
        if self._under_way is None:
            return
        (step, batch, rate, launched), self._under_way = self._under_way, None
        scale, (loss, norm, was_finite) = self._setup.scale, launched.read()
        self._loss = loss
        scale.note(is_finite=was_finite)
        if not was_finite and (scale.is_fixed or scale.factor < _LOWEST_SCALE):
            self._health.fail(step, batch, loss, was_deferred=launched.was_deferred)
        self._imbalance, num_moved = self._setup.balancer.after_step(step + 1)
        self._log.add(
            step=step + 1,
            loss=loss,
            rate=rate,
            gradient_norm=norm,
            seconds=self._speed.note(step + 1),
            expert_imbalance=self._imbalance,
            experts_moved=num_moved or None,
            **({} if scale.is_fixed else {"loss_scale": scale.factor, "skipped": not was_finite}),
        )

    def _mfu(self, speed: float) -> float | None:
        return peak_share(speed * self._setup.flops_per_token, self._job.plan.precision, self._world)

    def _tell(self, step: int) -> None:
        """Log a line of progress, with values that need a reduction over all ranks."""
        recipe, trace = self._job.recipe, self._setup.engine.trace
        memory, speed = self._world.highest(float(self._world.memory_bytes())), self._speed.since_told(step)
        if step == self._setup.step + 1:
            self._first_trace = trace
        elif trace is not None:
            self._traces.append(trace)
        assert self._loss is not None, "there was a step"
        measured: dict[str, Any] = {
            "tokens_per_second": speed,
            "memory_bytes": memory,
            "memory_share": self._world.memory_share(memory),
            "bubble": trace.bubble if trace is not None else 0.0,
            "mfu": self._mfu(speed),
            "when": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        rate = recipe.optimizer.learning_rate_at(step - 1, recipe.steps)
        shown = {key: each for key, each in measured.items() if key != "when"}
        told = told_of(loss=self._loss, rate=rate, imbalance=self._imbalance, **shown)
        self._progress.step(step, recipe.steps, told)
        self._log.add(step=step, **measured)
        self._health.tell(step, trace, measured, self._loss)

    def _look_up(self, step: int) -> None:
        """Evaluate and save between two steps, if either is due."""
        recipe = self._job.recipe
        if recipe.evaluation.every and step % recipe.evaluation.every == 0 and recipe.data.held_out:
            self._read()
            self._evaluate(step)
        if self._safe.is_due(step):
            self._read()
            self._health.before_keeping(step)
            kept = self._safe.look_up(step)
            self._health.kept(step, **kept._asdict())
            if kept.saved:
                self._health.look_for_hosts()
        self._speed.go_on()

    def _evaluate(self, step: int) -> None:
        recipe, rows = self._job.recipe, self._setup.held_out
        losses = []
        for number in range(recipe.evaluation.batches):
            chosen = np.arange(number * recipe.batch, (number + 1) * recipe.batch) % rows.num_rows
            losses.append(self._setup.engine.evaluate(on_device(rows.batch(chosen), self._world)))
        self._held_out_loss = math.fsum(losses) / len(losses)
        self._evaluated = step
        self._progress.say(f"step {step}: held-out loss {self._held_out_loss:.4f}")
        self._log.add(step=step, held_out_loss=self._held_out_loss)


def _usual(traces: Sequence[Trace]) -> Trace | None:
    """Return the step of median duration, as a single step may be disturbed. Prefer steps with GPU activities."""
    seen = [trace for trace in traces if trace.activities]
    ordered = sorted(seen or traces, key=lambda trace: trace.makespan)
    return ordered[(len(ordered) - 1) // 2] if ordered else None
