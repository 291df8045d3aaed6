"""The loop: step, tell, evaluate, save; and stop when there is a reason to. Every rank goes round it alike."""

import math
from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from shardwise.trace.events import Trace
from shardwise.training.data.rows import Batch, Prefetcher
from shardwise.training.finite import explain
from shardwise.training.job import Job
from shardwise.training.looks import StreamLooks
from shardwise.training.machine import peak_share
from shardwise.training.metrics import MetricLog
from shardwise.training.outcome import Outcome, Result, StoppedError
from shardwise.training.progress import Progress, line_of
from shardwise.training.saving import Saver
from shardwise.training.setup import Setup, on_device
from shardwise.training.stop import StopSignals, name_of
from shardwise.training.world import World

#: An fp16 run whose loss scale has fallen so low has another trouble than overflow.
_LOWEST_SCALE = 1.0
#: Of so many steps that were traced last, one is kept.
_LAST_TRACES = 5


class Loop:
    """One run on one rank."""

    def __init__(self, job: Job, world: World, setup: Setup, stop: StopSignals, progress: Progress) -> None:
        self._job, self._world, self._setup, self._stop, self._progress = job, world, setup, stop, progress
        self._saver = Saver(job, world, setup, progress)
        self._log = MetricLog(job, world, progress, after=setup.step)
        self._traces: deque[Trace] = deque(maxlen=_LAST_TRACES)
        self._held_out_loss: float | None = None
        self._evaluated = setup.step
        self._looks, self._began, self._told_cost = StreamLooks(world), perf_counter(), 0.0
        self._loss: float | None = None
        self._imbalance: float | None = None

    def run(self) -> Outcome:
        """Go round until the recipe's last step, a signal, or an error."""
        recipe, setup, start = self._job.recipe, self._setup, perf_counter()
        self._began = start
        step, window, stopped_by = setup.step, (setup.step, start), None
        with Prefetcher(setup.batches.at, setup.step, recipe.steps) as ahead:
            while step < recipe.steps:
                speaks = (step + 1) % recipe.log == 0 or step + 1 == recipe.steps or step == setup.step
                asked = perf_counter()
                batch = on_device(ahead.next(), self._world)
                self._step(step, batch, traced=speaks, data_wait=perf_counter() - asked)
                step += 1
                if speaks:
                    self._tell(step, window)
                    window = (step, perf_counter())
                number = int(self._world.highest(self._stop.number))
                if number:
                    stopped_by = name_of(number)
                    self._progress.say(f"{stopped_by} after step {step}: saving")
                    break
                self._look_up(step)
        seconds = perf_counter() - start - self._looks.cost_seconds
        if stopped_by is None and recipe.data.held_out and self._evaluated != step:
            self._evaluate(step)
        self._saver.save(step)
        result = Result(
            run=str(self._job.folder),
            step=step,
            loss=self._loss,
            held_out_loss=self._held_out_loss,
            seconds=seconds,
            tokens_per_second=(step - setup.step) * recipe.batch * recipe.data.sequence / seconds,
            num_parameters=setup.num_parameters,
            plan=str(self._job.plan),
            checkpoint=self._saver.finish(),
            expert_imbalance=self._imbalance,
            stopped_by=stopped_by,
        )
        return Outcome(
            result=result,
            model=setup.model,
            data=setup.data,
            trace=_usual(self._traces),
            layers="+".join(str(len(units)) for units in setup.engine.split.units),
        )

    def close(self) -> None:
        """Let go of files and of the writer's thread."""
        self._saver.close()
        self._log.close()

    def _step(self, step: int, batch: Batch, *, traced: bool, data_wait: float) -> None:
        """One step, which leaves the weights alone if its numbers are not finite."""
        recipe, engine, scale = self._job.recipe, self._setup.engine, self._setup.scale
        rate = recipe.optimizer.learning_rate_at(step, recipe.steps)
        for optimizer in engine.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        streams = None
        if traced and step > self._setup.step:
            streams = self._looks.begin(is_last=step + 1 == recipe.steps, elapsed=perf_counter() - self._began)
        start = perf_counter()
        self._loss = engine.train_step(batch, trace=traced, data_wait=data_wait, streams=streams)
        end = perf_counter() if streams is None else streams.ended
        self._looks.end(streams)
        scale.note(is_finite=engine.was_finite)
        if not engine.was_finite and (scale.is_fixed or scale.factor < _LOWEST_SCALE):
            raise StoppedError(
                explain(engine, batch, self._loss, step=step + 1, world=self._world),
                remedy=f"a lower rate (--set optimizer.rate={recipe.optimizer.rate / 3:.1g}); nothing of this step was"
                " applied, and the last checkpoint is from before it",
            )
        self._imbalance, num_moved = self._setup.balancer.after_step(step + 1)
        self._log.add(
            step=step + 1,
            loss=self._loss,
            rate=rate,
            gradient_norm=engine.gradient_norm,
            seconds=end - start,
            expert_imbalance=self._imbalance,
            experts_moved=num_moved or None,
            **({} if scale.is_fixed else {"loss_scale": scale.factor, "skipped": not engine.was_finite}),
        )

    def _tell(self, step: int, window: tuple[int, float]) -> None:
        """A line of progress, with what only all ranks together know."""
        recipe, setup = self._job.recipe, self._setup
        memory = self._world.highest(float(self._world.memory_bytes()))
        trace = setup.engine.trace
        self._traces += [] if trace is None else [trace]
        num_tokens = (step - window[0]) * recipe.batch * recipe.data.sequence
        speed = num_tokens / (perf_counter() - window[1] - (self._looks.cost_seconds - self._told_cost))
        self._told_cost = self._looks.cost_seconds
        assert self._loss is not None, "there was a step"
        measured: dict[str, Any] = {
            "tokens_per_second": speed,
            "memory_bytes": memory,
            "bubble": trace.bubble if trace is not None else 0.0,
            "used": peak_share(speed * setup.flops_per_token, recipe.precision, self._world),
        }
        rate = recipe.optimizer.learning_rate_at(step - 1, recipe.steps)
        self._progress.say(
            line_of(step, recipe.steps, loss=self._loss, rate=rate, imbalance=self._imbalance, **measured)
        )
        self._log.add(step=step, **measured)

    def _look_up(self, step: int) -> None:
        """Between two steps: evaluate and save, where it is time to."""
        recipe = self._job.recipe
        if recipe.evaluation.every and step % recipe.evaluation.every == 0 and recipe.data.held_out:
            self._evaluate(step)
        if recipe.checkpoint.every and step % recipe.checkpoint.every == 0:
            self._saver.save(step)

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
    """The step whose time is the median: one alone may have been disturbed. If GPUs were seen in some, one of these."""
    seen = [trace for trace in traces if trace.activities]
    ordered = sorted(seen or traces, key=lambda trace: trace.makespan)
    return ordered[(len(ordered) - 1) // 2] if ordered else None
