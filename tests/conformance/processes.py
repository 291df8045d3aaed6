"""The engine of many processes as a runner: ranks over gloo, which stay up from case to case.

Each rank holds the weights of its own stages only; here their parts are put together and compared.
"""

from dataclasses import replace

import torch
from torch import Tensor

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from tests.conformance.cases import Case, loss_of, make_batches, make_module, make_optimizer
from tests.conformance.outcomes import train
from tests.crowd import Crowds
from tests.same import Trained
from tests.stages.small import small_matrices

# A case takes a second or two. Ranks that wait for each other say so after 20 s.
_LIMIT_SECONDS = 120.0


def run_on_ranks(case: Case, crowds: Crowds) -> Trained:
    """What the ranks make of a case together."""
    return join(crowds.of(case.num_ranks).run(on_one_rank, case, timeout_seconds=_LIMIT_SECONDS))


def make_engine(case: Case) -> Engine:
    """The engine of this rank."""
    return parallelize(
        make_module(case.model),
        case.plan,
        loss=loss_of(case.model),
        optimizer=make_optimizer(case.optimizer),
        example=make_batches(case)[0],
    )


def on_one_rank(case: Case) -> Trained | ShardwiseError:
    """What one rank sees: the gradients of its own parameters, the weights of all."""
    with small_matrices():
        try:
            engine = make_engine(case)
        except ShardwiseError as refusal:
            return refusal  # Not raised: that would end the ranks.
        with engine:
            return train(engine, case)


def join(parts: list[Trained | ShardwiseError]) -> Trained:
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
