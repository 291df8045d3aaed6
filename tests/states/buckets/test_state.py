"""What can be read from a rank and put back, and how tensor parallel ranks take part."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.planner.plan import Plan
from shardwise.ranks.cpu_exchange import CpuExchange
from shardwise.ranks.mesh import make_mesh, make_replicas
from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.instruction import Instruction, Kind, backward
from shardwise.schedule.passes.lower import lower
from shardwise.sharding.tensor.sharding import Sharding, Shards
from shardwise.stages.stage import Batch, Values
from shardwise.states.buckets.make import HeldStages, ParameterOwners, ZeroConfig
from shardwise.states.data_parallel import DataParallel
from shardwise.states.make_optimizers import make_optimizers
from shardwise.states.muon import Muon
from shardwise.states.parameter_group import MakeOptimizer, Share, is_hidden_matrix
from tests.crowd import Crowds

MATRIX, NORM = "block.up.weight", "block.norm.weight"


class Stage:
    """Parameters without a computation: gradients are given by hand."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self.parameters: Mapping[str, nn.Parameter] = {
            name: nn.Parameter(each.clone()) for name, each in parameters.items()
        }
        self.buffers: Mapping[str, Tensor] = {}

    def run(self, values: Values, batch: Batch) -> tuple[Values, None]:
        raise AssertionError(f"nothing is computed of {values} and {batch}")

    def back(self, gradients: dict[str, Tensor]) -> None:
        total = sum((self.parameters[name] * each).sum() for name, each in gradients.items())
        assert isinstance(total, Tensor)
        total.backward()  # type: ignore[no-untyped-call]


def numbers(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {MATRIX: torch.randn(6, 4, generator=generator), NORM: torch.randn(4, generator=generator)}


def step(data: DataParallel, stage: Stage, gradients: dict[str, Tensor]) -> float:
    """One backward and one step; returns the norm of the whole gradient."""
    data.begin_step()
    data.begin(backward(0, 0))
    stage.back(gradients)
    data.end(backward(0, 0))
    data.reduce(Instruction(Kind.REDUCE, 0, 0))
    data.finish()
    square = data.square()
    dist.all_reduce(square)
    data.step(0.5)
    norm: float = float(square) ** 0.5
    return norm


MAKE: list[Share] = [
    Share(make=partial(Muon, lr=0.1), takes=is_hidden_matrix),
    Share(make=partial(torch.optim.AdamW, lr=0.1)),
]


def train_with_tensor_ranks(zero: int) -> tuple[float, dict[str, Tensor]]:
    """dp=2,tp=2: the matrix is cut by rows over tp; each rank has a part of the norm's gradient."""
    mesh = make_mesh(Plan(dp=2, tp=2, zero=zero))
    group = mesh.group("tp")
    halves = (((0, 3),), ((3, 6),))
    sharding = Sharding(
        group=group,
        shards={
            MATRIX: Shards(shape=(6, 4), dim=0, runs=halves),
            NORM: Shards(shape=(4,), is_partial=True),
        },
    )
    stage = Stage({name: sharding.local(name, each) for name, each in numbers(0).items()})
    schedule = lower(make_schedule("1f1b", 1, 1), reduce_gradients=True)
    replicas = make_replicas(mesh.ranks("gradients"))
    data = DataParallel(
        HeldStages(stages={0: stage}, schedule=schedule, ranks=[0]),
        ParameterOwners(replicas_of=lambda _: replicas, tensor=sharding),
        sharing=ZeroConfig(zero=zero), optimizers=make_optimizers(MAKE, stage.parameters), exchange=CpuExchange(),
    )  # fmt: skip
    mine = numbers(1 + mesh.coordinates["dp"])
    part = mine[NORM] * (0.25 if group.rank == 0 else 0.75)
    norm = step(data, stage, {MATRIX: sharding.local(MATRIX, mine[MATRIX]), NORM: part})
    found = {name: sharding.gather(name, data.wholes.weight(name)) for name in stage.parameters}
    data.close()
    return norm, found


def test_matrices_cut_over_tensor_ranks_too_are_updated_whole_and_counted_once(crowds: Crowds) -> None:
    whole = {name: nn.Parameter(each) for name, each in numbers(0).items()}
    gradients = {name: numbers(1)[name] + numbers(2)[name] for name in whole}
    for name, parameter in whole.items():
        parameter.grad = 0.5 * gradients[name]
    Muon([whole[MATRIX]], lr=0.1).step()
    torch.optim.AdamW([whole[NORM]], lr=0.1).step()
    norm = float(sum(each.square().sum() for each in gradients.values())) ** 0.5
    for zero in (0, 1, 2, 3):
        for found_norm, found in crowds.of(4).run(train_with_tensor_ranks, zero):
            torch.testing.assert_close(found_norm, norm, rtol=1e-6, atol=0.0)
            for name, parameter in whole.items():
                torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def read_and_put_back(zero: int, make: MakeOptimizer | list[Share]) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Check on a rank that what is loaded is what is read, also after a step; return its pieces and its states'."""
    replicas = make_replicas(range(dist.get_world_size()))
    stage = Stage({name: each.bfloat16() for name, each in numbers(0).items()})
    schedule = lower(make_schedule("1f1b", 1, 1), reduce_gradients=True)
    data = DataParallel(
        HeldStages(stages={0: stage}, schedule=schedule, ranks=[0]),
        ParameterOwners(replicas_of=lambda _: replicas),
        sharing=ZeroConfig(zero=zero, masters=True), optimizers=make_optimizers(make, stage.parameters),
        exchange=CpuExchange(),
    )  # fmt: skip
    step(data, stage, numbers(1))
    once = {name: data.wholes.weight(name) for name in stage.parameters}
    wanted = {name: each.bfloat16().float() for name, each in numbers(9).items()}
    data.load(wanted)
    for name, each in wanted.items():
        assert torch.equal(data.wholes.weight(name).float(), each), name
    data.load(numbers(0))
    states = [each.name for each in data.updates.updated if each.optimizer.state.get(each.weight)]
    pieces = [(name, start, each.numel()) for name, _, start, each in data.wholes.pieces()]
    assert not any(torch.equal(once[name], data.wholes.weight(name)) for name in once)
    data.close()
    return pieces, states


def test_pieces_of_all_ranks_make_up_every_parameter_and_can_be_loaded(crowds: Crowds) -> None:
    for zero in (1, 2, 3):
        for make in (partial(torch.optim.AdamW, lr=0.1), MAKE):
            covered: dict[str, list[int]] = {MATRIX: [], NORM: []}
            outcomes = crowds.of(3).run(read_and_put_back, zero, make)
            for pieces, _ in outcomes:
                for name, start, length in pieces:
                    covered[name] += range(start, start + length)
            assert {name for _, states in outcomes for name in states} == {MATRIX, NORM}
            assert {name: sorted(each) for name, each in covered.items()} == {
                MATRIX: list(range(24)),
                NORM: list(range(4)),
            }
