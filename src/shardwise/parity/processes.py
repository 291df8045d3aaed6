"""The ranks of a check: whether they fit on this machine, and the errors that they report."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from shardwise.errors import ShardwiseError
from shardwise.planner.composition import check_composition
from shardwise.planner.plan import Plan
from shardwise.ranks.gpus import Gpus
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks

#: Each rank is a process with its own torch.
MOST_RANKS = 32
MOST_MICROBATCHES = 256


@contextmanager
def ranks_of(plan: Plan, ranks: Ranks | None, device: str) -> Iterator[Ranks]:
    """Yield running ranks, or start those of a plan while they are needed. Report a user's mistake as such."""
    gpus: Gpus = "shared" if device == "cuda" else "none"
    try:
        if ranks is not None:
            yield ranks
        else:
            with Ranks(plan.num_ranks, gpus=gpus) as made:
                yield made
    except RankError as error:
        raise sentence_of(error) from None


def check_plan(plan: Plan) -> None:
    """Refuse a plan that does not compose, and more ranks and microbatches than a machine has room and time for."""
    check_composition(plan)
    if plan.microbatches > MOST_MICROBATCHES:
        raise ShardwiseError(
            f"the plan has {plan.microbatches} microbatches, and each is run here, on as many rows: at most"
            f" {MOST_MICROBATCHES}",
            remedy=f"--plan {replace(plan, microbatches=MOST_MICROBATCHES)}, the same in small",
        )
    if plan.num_ranks > MOST_RANKS:
        least = {axis: min(2, getattr(plan, axis)) for axis in ("dp", "tp", "pp", "cp", "ep")}
        axes = ",".join(f"{axis}={size}" for axis, size in least.items() if size > 1)
        raise ShardwiseError(
            f"the plan has {plan.num_ranks} ranks, and each is a process here: at most {MOST_RANKS}",
            remedy=f"--plan {axes}, the same axes in small",
        )


def sentence_of(error: RankError) -> ShardwiseError:
    """Return a user's mistake, found by a rank, without its traceback; a bug of ours unchanged."""
    if "shardwise.errors.ShardwiseError" not in error.problem:
        return error
    return ShardwiseError(error.problem.splitlines()[0], remedy=error.remedy)
