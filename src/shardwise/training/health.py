"""The health of a run: slow ranks, wrong results, and the metrics for Prometheus.

The loop calls this around every step, after every line of progress and before every checkpoint, on all ranks alike.
"""

import time
from collections.abc import Mapping
from typing import Any

from shardwise import environment
from shardwise.engine.update import LaunchedStep
from shardwise.trace.events import Trace
from shardwise.trace.journal import hosts_back, note, read_journal
from shardwise.trace.slowness import SlowCause, Slowness, SlowRank
from shardwise.trace.stretches import parts_of_ranks
from shardwise.training.data.rows import Batch
from shardwise.training.exporter import Exporter, Facts
from shardwise.training.finite import explain
from shardwise.training.job import Job
from shardwise.training.outcome import StoppedError
from shardwise.training.progress import Progress
from shardwise.training.setup import Setup
from shardwise.training.verify import Verifier
from shardwise.training.world import World

_SECONDS_BETWEEN_COPIES_NOTED = 60.0


class Health:
    """The health of one run, on one rank. If `leave_out` or `take_in` has hosts, the run should stop, and continue
    without the former or with the latter."""

    def __init__(self, job: Job, world: World, setup: Setup, progress: Progress) -> None:
        self._job, self._world, self._setup, self._progress = job, world, setup, progress
        self._hosts: list[str] = world.gather(environment.node_name())
        self._slowness = Slowness(_stages(setup, world), has_links=len(set(self._hosts)) > 1)
        self._slow: dict[tuple[int, SlowCause], SlowRank] = {}
        self.verifier = Verifier(job, world, setup, progress)
        self._checked: int | None = None
        self._saved = setup.step
        self._copy_noted: float | None = None
        self.leave_out: tuple[str, ...] = ()
        self.take_in: tuple[str, ...] = ()
        self.why: str | None = None
        self._exporter: Exporter | None = None
        if world.is_first and (job.watching.port is not None or job.watching.file is not None):
            self._exporter = self._make_exporter()

    def before_step(self, step: int, batch: Batch) -> None:
        """Call this before a step, counted from 0."""
        self.verifier.before(step, batch)

    def after_step(self, step: int, batch: Batch, launched: LaunchedStep) -> LaunchedStep:
        """Call this after a step. Return its final numbers, which differ if the verifier has redone it."""
        taken = self.verifier.after(step, batch)
        every = self._job.watching.verify_every
        if every and (step + 1) % every == 0:
            self.verifier.check_weights(step + 1)
        return launched if taken is None else LaunchedStep(taken)

    def before_keeping(self, step: int) -> None:
        """Before a checkpoint or copy of this step, check that all replicas hold the same weights."""
        if step != self._checked:
            self._checked = step
            self.verifier.check_weights(step)

    def kept(self, step: int, *, saved: bool = False, copied: bool = False) -> None:
        """Note a checkpoint or a copy. Copies are frequent, so only some get a line in the journal."""
        now = time.monotonic()
        if saved and step != self._saved:
            self._saved = step
            self._note("checkpoint", step=step)
        if copied and (self._copy_noted is None or now - self._copy_noted > _SECONDS_BETWEEN_COPIES_NOTED):
            self._copy_noted = now
            self._note("copy", step=step)
        if self._exporter is not None:
            facts = self._exporter.facts
            facts.saved = now if saved else facts.saved
            facts.copied = now if copied else facts.copied

    def look_for_hosts(self) -> None:
        """Set `take_in` to the hosts that are back, after a checkpoint is begun from which more ranks can continue. The
        first rank reads the journal for all, as machines may see writes to it at different times."""
        told = hosts_back(read_journal(self._job.folder)) if self._world.is_first else ()
        self.take_in = self._world.first(told)
        if self.take_in:
            self.why = f"{', '.join(self.take_in)} can take part again"

    def tell(self, step: int, trace: Trace | None, measured: Mapping[str, Any], loss: float) -> None:
        """Look for slow ranks and export metrics, after the progress line of a traced step."""
        # The first step is skipped: ranks allocate memory and select kernels at different speeds.
        if trace is not None and self._world.size > 1 and step > self._setup.step + 1:
            self._tell_slow(step, self._slowness.look(trace, step))
        if self._exporter is not None:
            self._export(step, trace, measured, loss)

    def fail(self, step: int, batch: Batch, loss: float, *, was_deferred: bool) -> None:
        """Stop at a step that was not finite, and report where that began."""
        engine, rate = self._setup.engine, self._job.recipe.optimizer.rate
        if was_deferred:
            # The failure is known one step late, and the weights are unchanged: run the step again to examine it.
            engine.go_on()
            engine.num_steps = step
            loss = engine.train_step(batch)
        raise StoppedError(
            explain(engine, batch, loss, step=step + 1, world=self._world),
            remedy=f"a lower rate (--set optimizer.rate={rate / 3:.1g}); nothing of this step was"
            " applied, and the last checkpoint is from before it",
        )

    def close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()

    def _tell_slow(self, step: int, found: list[SlowRank]) -> None:
        """Report ranks that have become slow, and those that no longer are. All ranks have the same `found`."""
        now = {(each.rank, each.cause): each for each in found}
        for key in self._slow.keys() - now.keys():
            self._note("slow over", step=step, rank=key[0], host=self._hosts[key[0]], cause=key[1])
        for key, each in now.items():
            host = self._hosts[each.rank]
            if key in self._slow:
                continue
            self._progress.warn(f"{each} (on {host})")
            self._note(
                "slow", step=step, rank=each.rank, host=host, cause=each.cause, seconds=round(each.seconds, 6),
                others_seconds=round(each.others_seconds, 6), looks=each.looks,
            )  # fmt: skip
            if self._job.watching.leaves_out_slow:
                self._leave_out(each, host)
        self._slow = now

    def _leave_out(self, slow: SlowRank, host: str) -> None:
        if len(set(self._hosts)) == 1:
            self._progress.warn(f"{host} is the only host, and cannot be left out")
            return
        self.leave_out, self.why = (host,), f"{slow} (on {host})"

    def _note(self, event: str, **facts: Any) -> None:
        if self._world.is_first:
            note(self._job.folder, event, **facts)

    def _make_exporter(self) -> Exporter:
        made = Exporter(self._job.watching, Facts(run=str(self._job.folder), plan=str(self._job.plan)))
        made.facts.count(list(read_journal(self._job.folder)))
        made.facts.numbers |= {"step": self._setup.step, "steps": self._job.recipe.steps}
        made.tell()
        return made

    def _export(self, step: int, trace: Trace | None, measured: Mapping[str, Any], loss: float) -> None:
        assert self._exporter is not None, "there is somebody to tell"
        facts = self._exporter.facts
        facts.count(list(read_journal(self._job.folder)))
        known = {key: float(measured[key]) for key in ("tokens_per_second", "mfu", "memory_bytes") if measured.get(key)}
        facts.numbers |= {"step": step, "loss": loss, **known}
        facts.slow = tuple((rank, self._hosts[rank], str(cause)) for rank, cause in self._slow)
        if trace is not None:
            parts = parts_of_ranks(trace)
            facts.parts = {str(part): sum(mine[part] for mine in parts) / len(parts) for part in parts[0]}
        self._exporter.tell()


def _stages(setup: Setup, world: World) -> list[int]:
    """Return each rank's pipeline stage. Ranks of one stage have the same work."""
    stages = [0] * world.size
    for pipeline in setup.engine.wires.mesh.pipelines if world.size > 1 else ():
        for stage, rank in enumerate(pipeline):
            stages[rank] = stage
    return stages
