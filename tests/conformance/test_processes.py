"""The same cases on ranks that are processes, connected by gloo, each with the weights of its own stages only."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardwise.runtime.process_engine import ProcessEngine
from shardwise.runtime.spawn import Ranks
from tests.conformance.cases import Case, loss_of, make_batches, make_module, make_optimizer
from tests.conformance.outcomes import plain, worst

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3) as ranks:
        yield ranks


def one_rank(case: Case) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor], int]:
    """What one rank saw: losses, the first gradients of its own parameters, the weights of all, bytes that it holds."""
    torch.set_num_threads(1)
    batches = make_batches(case)
    engine = ProcessEngine(
        make_module(case.model),
        case.plan,
        loss=loss_of(case.model),
        optimizer=make_optimizer(case.optimizer),
        example=batches[0],
    )
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        losses.append(engine.train_step(batch))
        gradients = gradients or {
            name: torch.zeros_like(each) if each.grad is None else each.grad.clone()
            for name, each in engine.parameters.items()
        }
    weights = {name: each.clone() for name, each in engine.state_dict().items()}
    held = sum(each.numel() for each in engine.module.parameters() if each.device.type != "meta")
    engine.close()
    return losses, gradients, weights, held


def check(case: Case, ranks: Ranks) -> None:
    expected = plain(case)
    outcomes = ranks.run(one_rank, case)
    for losses, gradients, weights, _ in outcomes:
        assert losses == pytest.approx(expected.losses, rel=TOLERANCE)
        error, name = worst(gradients, {name: expected.gradients[name] for name in gradients})
        assert error <= TOLERANCE, f"the gradient of {name}"
        error, name = worst(weights, dict(expected.weights))
        assert error <= TOLERANCE, f"{name} after {len(case.lengths)} steps"
    seen = {name for _, gradients, _, _ in outcomes for name in gradients}
    assert seen == set(expected.gradients), "no parameter is lost"


@pytest.mark.parametrize(
    ("model", "schedule", "microbatches"),
    [
        ("llama", "1f1b", 4),
        ("llama", "zb-v", 4),
        ("llama", "interleaved", 4),
        ("llama", "dualpipe", 4),
        ("gpt2", "zb-h1", 3),
        ("t5", "v-half", 4),
        ("t5", "looped-bfs", 4),
        ("u-net", "zb-h2", 4),
        ("u-net", "zb-v", 4),
        ("mixtral", "v-min", 4),
        ("bert", "chimera", 4),
        ("vit", "gpipe", 2),
        ("tied-and-skipping", "dualpipe-v", 4),
        ("tied-and-skipping", "hanayo", 2),
    ],
)
def test_two_processes_train_as_the_plain_module_does(model: str, schedule: str, microbatches: int, two: Ranks) -> None:
    chunks = 2 if schedule in ("interleaved", "looped-bfs", "hanayo") else None
    check(
        Case(model=model, schedule=schedule, num_ranks=2, num_microbatches=microbatches, num_chunks=chunks),
        two,
    )


@pytest.mark.parametrize("schedule", ["1f1b", "eager-1f1b", "zb-h1", "gpipe"])
def test_a_tied_weight_a_skip_and_a_new_length_over_three_processes(schedule: str, three: Ranks) -> None:
    case = Case(
        model="tied-and-skipping",
        schedule=schedule,
        num_ranks=3,
        num_microbatches=4,
        lengths=(8, 12, 8),
        optimizer="sgd",
    )
    check(case, three)


def test_fewer_microbatches_than_stages(three: Ranks) -> None:
    check(Case(model="llama", schedule="1f1b", num_ranks=3, num_microbatches=1), three)


def test_a_second_run_is_the_same_bit_for_bit(two: Ranks) -> None:
    case = Case(model="llama", schedule="zb-v", num_ranks=2, num_microbatches=4)
    first, second = two.run(one_rank, case), two.run(one_rank, replace(case))
    for one, other in zip(first, second, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


def test_no_rank_holds_the_whole_model(two: Ranks) -> None:
    case = Case(model="gpt-neox", schedule="1f1b", num_ranks=2, num_microbatches=2, lengths=(6,))
    whole = sum(each.numel() for each in make_module("gpt-neox").parameters())
    held = [rank[3] for rank in two.run(one_rank, case)]
    assert sum(held) <= whole * 1.01
    assert max(held) < whole
