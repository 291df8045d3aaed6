"""PipeDream-2BW: two versions of the weights, and W(t+1) = W(t) - lr * g(W(t-1)), exactly one step stale."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.execution import pipeline
from shardwise.execution.executor import calls_of
from shardwise.ranks.spawn import Ranks
from shardwise.schedule.generators.pipedream_2bw import pipedream_2bw
from shardwise.stages.stage import Batch
from tests.same import Trained, train_plain, worst
from tests.stages.pieces import Net

RATE = 0.3
Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda parameters: SGD(parameters, lr=RATE),
    "momentum": lambda parameters: SGD(parameters, lr=RATE, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
}


def batch_of(number: int, length: int = 5) -> dict[str, Tensor]:
    ids = torch.randint(0, 11, (8, length + 1), generator=torch.Generator().manual_seed(number))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def token_loss(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    labels: Tensor = batch["labels"]
    return cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()


def one_step_stale(optimizer: str, batches: list[dict[str, Tensor]], clip: float | None) -> Trained:
    """The definition: the gradient of batch t at W(t-1), applied to W(t)."""
    net = Net(num_blocks=4).double()
    return train_plain(net, batches, token_loss, OPTIMIZERS[optimizer], clip=clip, is_stale=True)


def train(
    plan: str, optimizer: str, batches: list[dict[str, Tensor]], clip: float | None, look_after: int | None = None
) -> tuple[list[float], dict[str, Tensor], float]:
    """What training under a plan gives: losses, the last weights, and the loss of the first batch with them."""
    engine = parallelize(
        Net(num_blocks=4).double(),
        plan,
        loss=token_loss,
        optimizer=OPTIMIZERS[optimizer],
        example=batches[0],
        clip=clip,
    )
    losses = []
    for number, batch in enumerate(batches):
        losses.append(engine.train_step(batch))
        if number == look_after:
            engine.evaluate(batch)
    loss = engine.evaluate(batches[0])
    return losses, engine.state_dict(), loss


def check(found: tuple[list[float], dict[str, Tensor], float], expected: Trained) -> None:
    assert found[0] == pytest.approx(expected.losses, rel=1e-10)
    assert worst(found[1], expected.weights)[0] <= 1e-9


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plan", ["pp=2,microbatches=2", "pp=2,microbatches=8", "pp=4,microbatches=4,recompute=full"])
def test_weights_are_exactly_one_step_stale(plan: str, optimizer: str) -> None:
    batches = [batch_of(number) for number in range(6)]
    found = train(f"schedule=pipedream-2bw,{plan}", optimizer, batches, None)
    check(found, one_step_stale(optimizer, batches, None))


@pytest.mark.parametrize("clip", [None, 0.05])
def test_processes_are_as_stale_with_a_tied_weight_and_a_skip(three: Ranks, clip: float | None) -> None:
    batches = [batch_of(number) for number in range(5)]
    expected = one_step_stale("momentum", batches, clip)
    for found in three.run(train, "pp=3,schedule=pipedream-2bw,microbatches=4", "momentum", batches, clip):
        check(found, expected)


@pytest.mark.parametrize(
    ("plan", "clip"),
    [("dp=2,pp=2", 0.05), ("tp=2,pp=2", None), ("dp=2,pp=2,offload.optimizer=1", None), ("dp=2,pp=2", None)],
)
def test_a_mesh_is_as_stale_as_one_pipeline(four: Ranks, plan: str, clip: float | None) -> None:
    """Two steps are under way at a time, and the gradients of each are summed over replicas by themselves."""
    batches = [batch_of(number) for number in range(5)]
    stale = "schedule=pipedream-2bw,microbatches=2"
    losses, weights, _ = train(f"pp=2,{stale}", "momentum", batches, clip)
    for found in four.run(train, f"{plan},{stale}", "momentum", batches, clip, 2):
        assert found[0] == pytest.approx(losses, rel=1e-10)
        assert worst(found[1], weights)[0] <= 1e-9


def test_it_differs_from_what_is_not_stale() -> None:
    batches = [batch_of(number) for number in range(3)]
    stale, plain = (
        train(f"pp=2,microbatches=4,schedule={name}", "sgd", batches, None) for name in ("pipedream-2bw", "1f1b")
    )
    assert stale[0][0] == pytest.approx(plain[0][0], rel=1e-12)
    assert stale[0][1] != pytest.approx(plain[0][1], rel=1e-6)


def test_emptying_the_pipe_changes_nothing(three: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its list ends, where the batch's shape changes, and where somebody looks at the weights."""
    monkeypatch.setattr(pipeline, "_STEPS_BETWEEN_FLUSHES", 2)
    batches = [batch_of(number, length=5 if number < 3 else 7) for number in range(7)]
    expected = one_step_stale("sgd", batches, None)
    plan = "pp=3,schedule=pipedream-2bw,microbatches=4"
    check(train(plan, "sgd", batches, None, look_after=4), expected)
    for found in three.run(train, plan, "sgd", batches, None, 4):
        check(found, expected)


def test_weights_that_are_loaded_are_those_of_the_next_batch() -> None:
    """Both versions are the loaded ones, as if training began with them."""
    batches = [batch_of(number) for number in range(3)]
    plan = "pp=2,schedule=pipedream-2bw,microbatches=4"
    loaded = {name: 1.5 * each for name, each in Net(num_blocks=4).double().state_dict().items()}

    def losses(module: Net, num_before: int) -> list[float]:
        engine = parallelize(module, plan, loss=token_loss, optimizer=OPTIMIZERS["sgd"], example=batches[0])
        for batch in batches[:num_before]:
            engine.train_step(batch)
        engine.load_state_dict(loaded)
        return [engine.train_step(batch) for batch in batches]

    begun = Net(num_blocks=4).double()
    begun.load_state_dict(loaded)
    expected = losses(begun, num_before=0)
    for num_before in (0, 1, 2):
        torch.testing.assert_close(losses(Net(num_blocks=4).double(), num_before), expected, rtol=1e-10, atol=0)


def test_too_few_microbatches_for_two_versions_are_refused() -> None:
    with pytest.raises(ShardwiseError) as caught:
        train("pp=4,schedule=pipedream-2bw,microbatches=2", "sgd", [batch_of(0)], None)
    assert str(caught.value) == (
        "pipedream-2bw over 4 stages needs at least 4 microbatches, not 2\n  try: microbatches=4"
    )


def test_a_list_is_divided_as_drawn() -> None:
    schedule = pipedream_2bw(2, 2, num_steps=3)
    texts = [[str(each).removeprefix(str(rank)) for each in order] for rank, order in enumerate(schedule.orders)]
    divided = [calls_of(schedule, rank) for rank in range(2)]
    fed = [[" ".join(texts[rank][each] for each in call) for call in divided[rank].feeds] for rank in range(2)]
    assert fed[0] == ["F0 F1 B0", "F2 B1 STEP0 F3 B2", "F4 B3 STEP1 F5 B4 B5 STEP2"]
    assert fed[1] == ["F0 B0 F1 B1 STEP0", "F2 B2 F3 B3 STEP1", "F4 B4 F5 B5 STEP2"]
    assert [texts[0][each] for each in divided[0].flushes[1]] == ["B3", "STEP1"]
    assert divided[1].flushes[1] == ()
