"""The engine of many processes as a runner: ranks over gloo that stay up from case to case, a pool for each number.

Each rank holds the weights of its own stages only; here their parts are put together and compared.
"""

import sys
from dataclasses import replace
from multiprocessing import forkserver

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.runtime.process_engine import ProcessEngine
from shardwise.runtime.spawn import Ranks
from tests.conformance.cases import Case, loss_of, make_batches, make_module, make_optimizer
from tests.conformance.outcomes import Outcome, train
from tests.runtime.small import small_matrices

# A case takes a second or two. Ranks that wait for each other say so after 20 s.
_LIMIT_SECONDS = 120.0
# What ranks need, by one of each: importing it takes a rank 3 s of a core (torch 2.13, transformers 5).
_IMPORTED_ONCE = ["shardwise.runtime.rank", "transformers.models.gpt2.modeling_gpt2", "tests.conformance.processes"]


def import_once() -> None:
    """Let the server that ranks are forked from import what they need. If it is up already, each does so itself."""
    if sys.platform == "linux":
        forkserver.set_forkserver_preload(_IMPORTED_ONCE)
        forkserver.ensure_running()


class Pools:
    """Ranks by their number, started when a case first needs so many."""

    def __init__(self) -> None:
        self._pools: dict[int, Ranks] = {}

    def of(self, num_ranks: int) -> Ranks:
        return self._pools.setdefault(num_ranks, Ranks(num_ranks))

    def run(self, case: Case) -> Outcome:
        """What the ranks make of a case together."""
        return join(self.of(case.num_ranks).run(on_one_rank, case, timeout_seconds=_LIMIT_SECONDS))

    def close(self) -> None:
        for ranks in self._pools.values():
            ranks.close()


def make_engine(case: Case) -> ProcessEngine:
    """The engine of this rank."""
    return ProcessEngine(
        make_module(case.model),
        case.plan,
        loss=loss_of(case.model),
        optimizer=make_optimizer(case.optimizer),
        example=make_batches(case)[0],
    )


def on_one_rank(case: Case) -> Outcome | ShardwiseError:
    """What one rank sees: the gradients of its own parameters, the weights of all."""
    with small_matrices():
        try:
            engine = make_engine(case)
        except ShardwiseError as refusal:
            return refusal  # Not raised: that would end the ranks.
        with engine:
            return train(engine, case)


def join(parts: list[Outcome | ShardwiseError]) -> Outcome:
    """One outcome from that of each rank; they must agree in all that they have in common. A refusal is raised."""
    outcomes = []
    gradients: dict[str, Tensor] = {}
    for part in parts:
        if isinstance(part, ShardwiseError):
            raise part
        outcomes.append(part)
        for name, each in part.gradients.items():
            assert torch.equal(gradients.setdefault(name, each), each), f"ranks differ in the gradient of {name}"
    joined, *others = (replace(each, gradients=gradients) for each in outcomes)
    assert all(joined.is_same(other) for other in others), "ranks differ in a loss, or in what state_dict() returns"
    return joined
