"""Silent data corruption: a device computes wrong values, or values change in its memory, without an error.

Every few steps, and at a step whose loss or norm jumps or is not finite:

    repeat    forward and backward are run again, each replica with the rows of the next replica (`engine/repeat`), or
              with one replica by the same ranks. Gradients of the same rows are compared before the weights change
    judge     if they differ, both are repeated. If they agree now, the fault was transient, and the step is redone. If
              they still differ, a rank is at fault: with three replicas, the minority; with two, one of the two
    weights   replicas must hold the same weights, so checksums that differ mean a change in some rank's memory

If all ranks run on CPUs of one kind, bits are compared. Otherwise norms are compared, with a tolerance.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple

import torch

from shardwise import environment
from shardwise.engine.repeat import Fingerprint, Prints, looking, print_of, repeat, why_not
from shardwise.engine.update import StepNumbers
from shardwise.errors import some
from shardwise.trace.journal import note
from shardwise.training.data.rows import Batch
from shardwise.training.job import Job
from shardwise.training.outcome import StoppedError
from shardwise.training.progress import Progress
from shardwise.training.setup import Setup
from shardwise.training.world import World

#: A jump is a loss or norm above this multiple of the median; the fewest and the most last steps of the median.
_JUMP, _NUM_BEFORE, _NUM_KEPT = 3.0, 8, 32
#: The relative difference allowed between gradient norms that different kernels computed.
_TOLERANCE = 1e-2


class _Seat(NamedTuple):
    """A rank: its part of a replica (all coordinates but dp), its replica, and its host."""

    part: tuple[tuple[str, int], ...]
    replica: int
    host: str


class _Told(NamedTuple):
    """A rank's fingerprint for the rows of the replica `shift` places after its own."""

    shift: int
    found: Fingerprint


class Verifier:
    """Verifies a run on one rank. All ranks make the same calls and reach the same verdict."""

    def __init__(self, job: Job, world: World, setup: Setup, progress: Progress) -> None:
        self._job, self._world, self._setup, self._progress = job, world, setup, progress
        self._every, self._engine = job.watching.verify_every, setup.engine
        self._jumps: dict[str, deque[float]] = {name: deque(maxlen=_NUM_KEPT) for name in ("loss", "norm")}
        self._open, self._prints, self._early = ExitStack(), list[Prints](), list[_Told]()
        #: For a step that was held back: the reason, and the fingerprints of all ranks until then.
        self._why, self._seen = "", list[Any]()
        self._held: tuple[float, float | None] = (0.0, None)
        if not self._every:
            return
        coordinates = self._engine.wires.mesh.coordinates
        part = tuple((axis, place) for axis, place in sorted(coordinates.items()) if axis != "dp")
        mine = _Seat(part, coordinates["dp"], environment.node_name())
        alike = (world.device.type, environment.processor_name(), torch.__version__, torch.get_num_threads())
        told: list[tuple[_Seat, Any]] = world.gather((mine, alike))
        self._seats = [seat for seat, _ in told]
        self._is_exact = world.device.type == "cpu" and len({kind for _, kind in told}) == 1
        self._cannot, self._dp = why_not(self._engine), job.plan.dp
        progress.say(self._said())

    @property
    def is_on(self) -> bool:
        return bool(self._every)

    def before(self, step: int, batch: Batch) -> None:
        """Prepare to verify a step, counted from 0, before it is taken."""
        if not self.is_on or self._cannot is not None:
            return
        self._early, self._prints, self._seen = [], [], []
        if (step + 1) % self._every == 0:
            self._early = [self._repeat(step, batch, min(1, self._dp - 1))]
            self._prints = [self._open.enter_context(looking(self._engine))]
        self._engine.states.update.holds = self._holds

    def after(self, step: int, batch: Batch) -> StepNumbers | None:
        """End the verification of a step. One that was held back is judged and taken now; return its numbers."""
        self._open.close()
        engine, update = self._engine, self._engine.states.update
        was_held, update.holds = self.is_on and update.was_held, None
        if not was_held:
            return None
        known = self._judge(step, batch)
        engine.num_steps = step
        taken = StepNumbers(engine.train_step(batch), update.gradient_norm, update.was_finite)
        if not known and self._is_exact and repr(taken[:2]) != repr(self._held):
            self._tell(
                step,
                f"{self._why}; taken anew, the loss is {taken.loss:.4g} and the norm {taken.gradient_norm}: a fault"
                " that has passed, of which rank is not known",
                ranks=(),
                hosts=(),
            )
        elif not known:
            where = "on another replica" if self._dp > 1 else "again by the same ranks"
            self._progress.say(f"step {step + 1}: {self._why}; computed {where}, it is the same")
        return taken

    def check_weights(self, step: int) -> None:
        """Compare the weights of replicas. Raise if they differ; the run then resumes from its last checkpoint."""
        plan, engine = self._job.plan, self._engine
        if not self.is_on or plan.zero == 3 or plan.offload.parameters or self._dp * plan.cp == 1:
            return
        engine.flush()
        experts = () if engine.experts is None else engine.experts.parameters
        with engine.shown.open():
            held = {name: print_of([each]) for name, each in engine.parameters.items() if name not in experts}
        if plan.zero == 0:
            states = [state for optimizer in engine.optimizers for state in optimizer.state.values()]
            tensors = [each for state in states for each in state.values() if isinstance(each, torch.Tensor)]
            held["the optimizer's state"] = print_of(tensors)
        whole = sum(each.bits * (number + 1) for number, each in enumerate(held.values())) % 2**63
        by_part = defaultdict[object, list[tuple[int, int]]](list)
        for rank, bits in enumerate(self._world.gather(whole)):
            # Ranks of one sequence (cp) hold the same weights too.
            by_part[tuple(each for each in self._seats[rank].part if each[0] != "cp")].append((rank, bits))
        odd = [rank for told in by_part.values() for rank in _odd(told)]
        if odd:
            self._stop_for_weights(step, odd, [dict(each) for each in self._world.gather(held)])

    def _said(self) -> str:
        often = f"every {self._every} steps" if self._every > 1 else "every step"
        how = "bits" if self._is_exact else f"norms, within {_TOLERANCE:.0%}"
        if self._cannot is not None:
            return f"verified {often}: the weights of replicas; no step is repeated, as {self._cannot}"
        who = "by the next replica" if self._dp > 1 else "by the same ranks, as there is one replica"
        return f"verified {often}: a step is repeated {who} and compared ({how})"

    def _repeat(self, step: int, batch: Batch, shift: int) -> _Told:
        self._engine.num_steps = step
        return _Told(shift, repeat(self._engine, batch, shift=shift))

    def _holds(self, loss: float, norm: float | None) -> bool:
        """Return whether to hold the update of the weights back."""
        self._why, self._held = self._find_jump(loss, norm) or "", (loss, norm)
        if self._prints:
            self._seen = self._world.gather([_Told(0, self._prints[0].read()), *self._early])
            if self._find_wrong(self._seen):
                self._why = "computed again, the gradients are others"
        return bool(self._why)

    def _find_jump(self, loss: float, norm: float | None) -> str | None:
        found = {"loss": loss} if norm is None else {"loss": loss, "norm": norm}
        told = None
        for name, value in found.items():
            before = self._jumps[name]
            if not math.isfinite(value):
                # With a dynamic loss scale, occasional overflow is normal.
                return f"the {name} is {value}" if self._setup.scale.is_fixed else None
            if len(before) >= _NUM_BEFORE and value > _JUMP * median(before):
                told = f"the {name} is {value:.4g}, and was {median(before):.4g}"
            before.append(value)
        return told

    def _find_wrong(self, told: Sequence[Sequence[_Told]]) -> dict[tuple[object, int], list[tuple[int, Fingerprint]]]:
        """Return the (rank, fingerprint) votes that disagree, by part and by the replica of the rows."""
        votes = defaultdict[tuple[object, int], list[tuple[int, Fingerprint]]](list)
        for rank, mine in enumerate(told):
            seat = self._seats[rank]
            for shift, found in mine:
                votes[seat.part, (seat.replica + shift) % self._dp].append((rank, found))
        return {key: each for key, each in votes.items() if not all(self._agree(each[0][1], one) for _, one in each)}

    def _agree(self, one: Fingerprint, other: Fingerprint) -> bool:
        return one.bits == other.bits if self._is_exact else one.is_near(other, _TOLERANCE)

    def _judge(self, step: int, batch: Batch) -> bool:
        """Repeat the step. Stop the run if a rank is still wrong, else return whether one had a transient fault."""
        mine = [self._repeat(step, batch, shift) for shift in range(min(3, self._dp))]
        if self._dp == 1:
            mine.append(self._repeat(step, batch, 0))
        again: list[list[_Told]] = self._world.gather(mine)
        # Ranks whose own result differs from their earlier one.
        changed = [
            rank
            for rank, (before, now) in enumerate(zip(self._seen, again, strict=False))
            if any(not self._agree(a.found, b.found) for a in before for b in now if a.shift == b.shift)
        ]
        wrong = self._find_wrong(again)
        if wrong:
            odd = {rank for votes in wrong.values() for rank in self._odd_of(votes)}
            self._stop_for_steps(step, changed if len(odd) > len(changed) > 0 else sorted(odd))
        if changed:
            hosts = self._hosts(changed)
            self._tell(
                step,
                f"{_ranks(changed)} on {', '.join(hosts)} had computed other gradients than now for the same rows: a"
                " fault that has passed. The step is taken anew",
                ranks=changed,
                hosts=hosts,
            )
        return bool(changed)

    def _odd_of(self, votes: Sequence[tuple[int, Fingerprint]]) -> list[int]:
        if self._is_exact:
            return _odd([(rank, found.bits) for rank, found in votes])
        middle = median(found.square for _, found in votes)
        near = [rank for rank, found in votes if found.is_near(Fingerprint(0, middle), _TOLERANCE)]
        others = [rank for rank, _ in votes if rank not in near]
        return others if len(near) > len(others) else [rank for rank, _ in votes]

    def _stop_for_steps(self, step: int, ranks: Sequence[int]) -> None:
        hosts, one = self._hosts(ranks), len({self._seats[rank].replica for rank in ranks}) == 1
        which = _ranks(ranks) if one else f"one of {_ranks(ranks)}"
        said = f"{which} on {', '.join(hosts)} computes other gradients than others for the same rows, again and again"
        if self._dp == 1:
            said = f"{which} on {', '.join(hosts)} computes other gradients each time for the same rows"
        self._tell(step, said, ranks=list(ranks), hosts=hosts)
        self._stop(step, said, hosts if len(hosts) == 1 else [])

    def _stop_for_weights(self, step: int, odd: Sequence[int], held: Sequence[dict[str, Fingerprint]]) -> None:
        others = [rank for rank in range(len(held)) if rank not in odd]
        differing = [
            name
            for name in held[odd[0]]
            if any(held[rank][name].bits != held[odd[0]][name].bits for rank in (*odd, *others) if name in held[rank])
        ]
        hosts = self._hosts(odd)
        which = f"{_ranks(odd)} on {', '.join(hosts)} {'holds' if len(odd) == 1 else 'hold'}"
        said = f"{which} other weights than replicas of the same: {some(differing)}"
        self._tell(step - 1, said, ranks=list(odd), hosts=hosts)
        self._stop(step - 1, said, hosts if len(odd) == 1 else [])

    def _hosts(self, ranks: Sequence[int]) -> list[str]:
        return list(dict.fromkeys(self._seats[rank].host for rank in ranks))

    def _tell(self, step: int, said: str, *, ranks: Sequence[int], hosts: Sequence[str]) -> None:
        self._progress.warn(f"step {step + 1}: {said}")
        if self._world.is_first:
            note(self._job.folder, "corrupt", step=step + 1, ranks=list(ranks), hosts=list(hosts), what=said)

    def _stop(self, step: int, said: str, hosts: Sequence[str]) -> None:
        raise StoppedError(
            f"at step {step + 1} {said}",
            remedy="the same command on other devices: it goes on from the last checkpoint, whose weights agreed",
            is_final=False,
            hosts=tuple(hosts),
        )


def _odd(told: Sequence[tuple[int, int]]) -> list[int]:
    """Return the ranks whose number is not the majority's, or all ranks if there is no majority."""
    ((number, count), *others) = Counter(number for _, number in told).most_common()
    if not others:
        return []
    return [rank for rank, each in told if each != number] if 2 * count > len(told) else [rank for rank, _ in told]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {' and '.join(map(str, ranks))}"
