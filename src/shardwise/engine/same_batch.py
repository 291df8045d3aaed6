"""Check that ranks are given the right batches: the same on all ranks, or on all ranks of a replica.

    batch="same"    every rank is given all rows, and takes its own         all checksums are equal
    batch="local"   every replica (dp) is given rows of its own             those of one replica are equal

Checksums travel with the sum of the loss, which all ranks exchange in every step anyway, and are checked before weights
change. The example and the first batches are compared before anything runs: ranks with different shapes would fail, or
deadlock, first. A hash s of the optimizers' settings travels with them: the sum of s and the sum of s^2 are n s and
n s^2 only if all n ranks have the same s. So does the state of random number generators, if steps draw from them
(`same_draws.py`).
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwise.engine.same_draws import SameDraws, are_alike, check_draws
from shardwise.errors import ShardwiseError, some
from shardwise.planner.plan import Plan
from shardwise.ranks.mesh import places_together, replicas_of, stages_of
from shardwise.ranks.wires import Wires
from shardwise.stages.parts_alike import NUM_TOLD, PartsAlike, are_parts_alike, uneven
from shardwise.stages.rows import tensors_in
from shardwise.stages.split.route import Route, apart

#: At most this many elements of a tensor are sampled.
_NUM_SAMPLED = 4096
#: The bits of a checksum: a double holds them exactly.
_BITS = 48
#: The number of batches that are compared before they run.
_NUM_EARLY = 2
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksum:
    """A checksum of a batch: shapes and sampled elements. On a GPU it is launched here, and read on request."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        found = list(tensors_in(batch))
        self.shapes = tuple(tuple(each.shape) for each in found)
        self._sums = [_sum(each) for each in found if each.layout is torch.strided and not each.is_meta]

    def read(self) -> int:
        made: int = hash(self.shapes)
        for devices in {each.device for each in self._sums}:
            for value in torch.stack([each for each in self._sums if each.device == devices]).tolist():
                made = (made * 1_000_003 + value) % 2**64
        found: int = (made ^ (made >> 29)) % 2**_BITS
        return found


def _sum(tensor: Tensor) -> Tensor:
    """Return a position-weighted sum of the bits of sampled elements: integers, so it does not depend on the order."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = flat.detach().reshape(-1)
    flat = flat[:: max(1, len(flat) // _NUM_SAMPLED)].contiguous()
    words = flat.view(_WORDS[flat.element_size()]).to(torch.int64)
    return (words * (2 * torch.arange(len(words), device=words.device) + 1)).sum()


class _Told(Protocol):
    """A value that must be the same on all ranks, as a hash of a few bits."""

    @property
    def bits(self) -> int: ...


def set_apart(num_ranks: int) -> ShardwiseError:
    """Return the error for scripts that have set different values on different ranks."""
    return ShardwiseError(
        "values that the forward or the loss reads were set between steps, and not the same ones on all"
        f" {num_ranks} ranks: each would compute another loss",
        remedy="draw and set them alike on every rank (numpy.random.seed(0), random.seed(0)); or an entry of the batch"
        " with a number for each row",
    )


def _written_apart(num_ranks: int) -> ShardwiseError:
    return ShardwiseError(
        f"parameters or buffers were written between steps, and not the same values on all {num_ranks} ranks:"
        " replicas would go apart",
        remedy="write the same on every rank, by what all have alike (a loss, metrics) and not by what forwards leave"
        " for the rows of one; or engine.load_state_dict(state) on every rank",
    )


class SameBatch:
    """Compares the batches of ranks. Every rank has one.

    `settings` gives bits of what must be the same on all, `outside` of what was written between steps, `values` of what
    was set then, and `routes` of the units that forwards have called; `parts` are the means that losses compute. On a
    module's `device` what is `computed`, it and its loss, may draw at random, by torch only where it `draws`; None if
    that is not known. `in_python`: a forward has drawn from the generators of Python or NumPy.
    """

    def __init__(
        self, plan: Plan, wires: Wires, *, is_local: bool, settings: Callable[[], int] | None = None,
        outside: _Told | None = None, routes: Sequence[Route] = (), values: _Told | None = None,
        device: torch.device | None = None, computed: Sequence[Any] = (), draws: bool = True,
        parts: PartsAlike | None = None, in_python: bool = False,
    ) -> None:  # fmt: skip
        self._plan, self._wires, self._is_local = plan, wires, is_local
        self._is_alone = wires.watch is None
        self._replicas = [0] if self._is_alone else [each.replica for each in replicas_of(plan)]
        self._settings, self._outside, self._routes, self._set = settings, outside, routes, 0
        self._values, self._parts = values, parts or PartsAlike()
        self._draws: SameDraws | None = None
        self._in_python = in_python
        #: The ranks that compute one forward together: those of a replica with the same stages.
        self._together: list[int] = []
        if device is not None and not self._is_alone:
            self._draws = SameDraws(device, computed, is_early=plan.pp > 1, of_torch=draws)
            self._together = places_together(plan)
        #: With stages, the ranks that hold the same parameters and buffers; a rank's writes are compared with theirs.
        self._alike: list[int] = []
        if outside is not None and plan.pp > 1:
            self._alike = stages_of(plan)
        self._now: Checksum | None = None
        self._num_early = {"step": _NUM_EARLY, "evaluation": 1}
        self._has_warned = False
        #: The checksums of all ranks, which arrive with the sum of the loss.
        self.told: list[float] = []

    def take(self, batch: Mapping[str, Any], what: str) -> None:
        """Take a batch that is about to be used. The example and the first few are compared now; all call this
        alike."""
        self._parts.begin()
        for each in self._routes:
            each.begin()
        if self._is_alone:
            return
        self._now, self._set = Checksum(batch), 0 if self._settings is None else self._settings()
        if self._draws is not None:
            self._draws.begin()
        if self._num_early.get(what, 1):
            self._num_early[what] = self._num_early.get(what, 1) - 1
            early = self._draws.early(in_python=self._in_python) if self._draws is not None and what == "step" else 0.0
            told = self._wires.gather((self._now.read(), early))
            self.check([checksum for checksum, _ in told], what)
            if early:
                check_draws([number for _, number in told], self._together)

    @property
    def numbers(self) -> list[float]:
        """This rank's part of the sum over all ranks: its settings, its checksum at its index, and zeros."""
        if self._is_alone or self._now is None:
            return []
        mine = float(self._now.read())
        for each in self._all_told():
            self._set ^= each.bits
        sums = [mine if rank == self._wires.rank else 0.0 for rank in range(len(self._replicas))]
        draws = [0.0 for _ in self._together]
        if self._draws is not None:
            draws[self._wires.rank] = self._draws.number
        writes = [0.0 for _ in self._alike]
        if self._alike and self._outside is not None:
            writes[self._wires.rank] = float(self._outside.bits)
        return [float(self._set), float(self._set**2), *sums, *draws, *writes, *self._parts.numbers]

    def _all_told(self) -> list[_Told]:
        outside = None if self._alike else self._outside
        return [*(each for each in (self._values, outside) if each is not None), *self._routes]

    def _told_parts(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """Return what ranks have told: checksums, draws, writes, and of the parts of a batch."""
        sizes = (2, len(self._replicas), len(self._together), len(self._alike), NUM_TOLD)
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        _, sums, draws, writes, parts = (self.told[end - size : end] for size, end in zip(sizes, ends, strict=True))
        return sums, draws, writes, parts

    def _are_written_alike(self, writes: Sequence[float]) -> bool:
        return len(set(zip(self._alike, writes, strict=True))) == len(set(self._alike))

    @property
    def is_as_told(self) -> bool:
        """Whether what came with the sum of the loss is as it should be."""
        keys = self._replicas if self._is_local else [0] * len(self._replicas)
        if not self.told:
            return True
        sums, draws, writes, parts = self._told_parts()
        if not self._are_set_alike or not are_alike(draws, self._together) or not are_parts_alike(parts):
            return False
        return self._are_written_alike(writes) and len(set(zip(keys, sums, strict=True))) == len(set(keys))

    @property
    def _are_set_alike(self) -> bool:
        first, squares = self.told[:2]
        return first**2 == squares * len(self._replicas)

    def check_told(self) -> None:
        """Refuse what came with the sum of the loss, at a moment when no rank has anything under way."""
        is_alike = not self.told or self._are_set_alike
        found, draws, writes, parts = self._told_parts()
        has_told, self.told = bool(self.told), []
        if self._draws is not None:
            self._draws.look()
        if has_told:
            self.check(found)
            check_draws(draws, self._together)
            if not are_parts_alike(parts):
                raise uneven()
            if not self._are_written_alike(writes):
                raise _written_apart(len(self._replicas))
        if not is_alike:
            gathered = self._wires.gather([each.bits for each in self._all_told()])
            differ = [len(set(bits)) > 1 for bits in zip(*gathered, strict=True)]
            if any(differ[len(differ) - len(self._routes) :]):
                raise apart()
            if self._values is not None and differ[0]:
                raise set_apart(len(self._replicas))
            if any(differ):
                raise _written_apart(len(self._replicas))
            raise ShardwiseError(
                f"the groups of optimizers do not have the same lr, weight_decay, momentum and betas on all"
                f" {len(self._replicas)} ranks: each would take another step",
                remedy="scheduler.step(), and whatever else sets them, on every rank and not on the first alone",
            )

    def check(self, found: Sequence[float], what: str = "step") -> None:
        """Refuse if ranks that should have been given the same were not; `found` are the checksums of all."""
        first: dict[int, int] = {}
        for rank, (number, replica) in enumerate(zip(found, self._replicas, strict=False)):
            place = replica if self._is_local else 0
            other = first.setdefault(place, rank)
            if found[other] != number:
                self._refuse([each for each, value in enumerate(found) if value != found[other]], other, what)
        is_alike = len(first) > 1 and len(set(found)) == 1 and what != "example"
        if self._is_local and is_alike and not self._has_warned:
            self._has_warned = True
            if self._wires.rank == 0:
                warnings.warn(
                    f"all {len(first)} replicas were given the same rows, which count {len(first)} times:"
                    " replica, count = sw.replica_of(plan); DistributedSampler(data, num_replicas=count, rank=replica)",
                    stacklevel=2,
                )

    def _refuse(self, others: Sequence[int], rank: int, what: str) -> None:
        given = "example" if what == "example" else f"batch of this {what}"
        ranks = f"rank {others[0]}" if len(others) == 1 else f"ranks {some([str(each) for each in others])}"
        sampler = "DistributedSampler(data, num_replicas=count, rank=index) with index, count = sw.replica_of(plan)"
        if self._is_local:
            alike = [each for each in others if self._replicas[each] == self._replicas[rank]]
            raise ShardwiseError(
                f"ranks {rank} and {alike[0]} are parts of one replica, and were given a different {given}",
                remedy=sampler,
            )
        wanted = 'batch="local" in parallelize if every replica loads rows of its own, and '
        if self._plan.dp == 1:
            sizes = {axis: getattr(self._plan, axis) for axis in ("tp", "pp", "cp")}
            axes = ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1)
            wanted = f'the same on all (with {axes} there is one replica); or batch="local", and '
        raise ShardwiseError(
            f"{ranks} got another {given} than rank {rank}, and every rank must be given the same whole batch",
            remedy=wanted + sampler,
        )
