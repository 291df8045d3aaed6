"""Which rank holds which stage, and what flows between stages.

A model is cut into stages, numbered in the order of the computation. A rank holds one stage, or several (its chunks):

    loop, 2 ranks x 2 chunks      rank 0: stages 0 2        0 -> 1 -> 2 -> 3, from the last rank back to the first
                                  rank 1: stages 1 3

    vee, 2 ranks                  rank 0: stages 0 3        0 -> 1
                                  rank 1: stages 1 2        3 <- 2    the turn happens inside the last rank

    mirrored, 2 ranks             rank 0: stages 0 3        0 -> 1    two whole copies of the model, run in
                                  rank 1: stages 1 2        3 <- 2    opposite directions; 0 ties 2, 1 ties 3
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from shardwise.errors import ShardwiseError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Stages on ranks.

    `ranks[stage]` is the rank that holds a stage. `pipes` are paths through the stages: one for each copy of the model;
    microbatch i takes pipe i modulo their number. `skips` are skip connections: (0, 2) is a value that stage 0 makes
    and stage 2 reads. `ties` are groups of stages that hold the same weights, whose gradients must be summed.
    """

    ranks: tuple[int, ...]
    pipes: tuple[tuple[int, ...], ...]
    skips: tuple[tuple[int, int], ...] = field(default=())
    ties: tuple[tuple[int, ...], ...] = field(default=())

    @cached_property
    def num_ranks(self) -> int:
        return max(self.ranks) + 1

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def share(self) -> float:
        """The fraction of a rank's part of the model that one stage is: 1 / chunks; 1 for two copies of the model."""
        return self.num_ranks / len(self.pipes[0])

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, first to last."""
        return tuple(
            tuple(stage for stage, rank in enumerate(self.ranks) if rank == wanted) for wanted in range(self.num_ranks)
        )

    @property
    def num_chunks(self) -> int:
        """How many stages the fullest rank holds."""
        return max(len(stages) for stages in self.stages)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages whose values it reads."""
        return self._neighbours(reader=True)

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """For each stage, the stages that read its value."""
        return self._neighbours(reader=False)

    def _neighbours(self, *, reader: bool) -> tuple[tuple[int, ...], ...]:
        edges = [edge for pipe in self.pipes for edge in pairwise(pipe)] + list(self.skips)
        found: list[list[int]] = [[] for _ in self.ranks]
        for maker, user in edges:
            here, there = (user, maker) if reader else (maker, user)
            if there not in found[here]:
                found[here].append(there)
        return tuple(tuple(sorted(stages)) for stages in found)

    def pipe(self, microbatch: int) -> tuple[int, ...]:
        """Return the stages that a microbatch goes through, in order."""
        return self.pipes[microbatch % len(self.pipes)]

    def with_skips(self, *skips: tuple[int, int]) -> "Placement":
        """Return the same placement with values that skip stages."""
        for maker, user in skips:
            if not any(maker in pipe and user in pipe and pipe.index(maker) < pipe.index(user) for pipe in self.pipes):
                raise ShardwiseError(
                    f"a skip from stage {maker} to stage {user} does not go to a later stage of {self.num_stages}",
                    remedy="a pair (earlier stage, later stage)",
                )
        return replace(self, skips=(*self.skips, *skips))

    def with_ties(self, *ties: tuple[int, ...]) -> "Placement":
        """Return the same placement with groups of stages that share weights."""
        for tie in ties:
            wrong = [stage for stage in tie if not 0 <= stage < self.num_stages]
            if wrong or len(set(tie)) < 2:
                raise ShardwiseError(
                    f"tie {tie} must name two or more different stages of 0 to {self.num_stages - 1}",
                    remedy="(0, 3) for a head tied to the embedding over four stages",
                )
        return replace(self, ties=(*self.ties, *ties))


def loop(num_ranks: int, num_chunks: int = 1) -> Placement:
    """Stage s on rank s modulo the ranks: one chunk is the plain pipeline, several go round and round."""
    stages = tuple(range(num_ranks * num_chunks))
    return Placement(ranks=tuple(stage % num_ranks for stage in stages), pipes=(stages,))


def wave(num_ranks: int, num_waves: int) -> Placement:
    """Down the ranks and up again, `num_waves` times: stages at a turn are neighbours on one rank."""
    down = tuple(range(num_ranks))
    ranks = (down + down[::-1]) * num_waves
    return Placement(ranks=ranks, pipes=(tuple(range(len(ranks))),))


def vee(num_ranks: int) -> Placement:
    """Return one wave: rank r holds stages r and 2p - 1 - r, so the first rank also has the last stage."""
    return wave(num_ranks, 1)


def mirrored(num_ranks: int) -> Placement:
    """Return two copies of the model in opposite directions: even microbatches go down, odd ones up."""
    down = tuple(range(num_ranks))
    up = tuple(range(num_ranks, 2 * num_ranks))
    return Placement(ranks=down + down[::-1], pipes=(down, up), ties=tuple(zip(down, up, strict=True)))
