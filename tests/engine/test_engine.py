"""`parallelize`: what it refuses, before anything runs; what it recomputes, casts, clips and records."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.schedule.catalogue import CATALOGUE
from shardwise.stages.batch import cut_batch
from shardwise.stages.stage import Batch
from shardwise.trace.events import Lane
from shardwise.trace.timeline import draw
from tests.same import gradients_of, same, worst
from tests.stages.families import make_batch, make_family
from tests.stages.nets import ResNet50
from tests.stages.pieces import Net
from tests.stages.small import small_matrices

SYNCHRONOUS = [name for name in CATALOGUE if name != "pipedream-2bw"]
NUM_TOKENS = 11


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def token_loss(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
    labels: Tensor = batch["labels"]
    return cross_entropy(output.flatten(0, 1).float(), labels.flatten(), reduction="sum"), labels.numel()


def tokens(size: int = 8, length: int = 5, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(0, NUM_TOKENS, (size, length + 1), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.1)


def an_engine(plan: Plan | str, module: nn.Module | None = None, **changed: Any) -> Engine:
    given: dict[str, Any] = {
        "loss": token_loss,
        "optimizer": sgd,
        "example": tokens(),
        **changed,
    }
    engine = parallelize(Net(num_blocks=4) if module is None else module, plan, **given)
    assert isinstance(engine, Engine)
    return engine


def test_axes_that_need_processes_are_refused_where_there_is_one() -> None:
    with pytest.raises(ShardwiseError) as caught:
        an_engine("dp=2,tp=2,pp=2")
    assert str(caught.value) == (
        "dp=2,tp=2 needs processes: one alone runs all ranks of a pipeline (pp), and of no other axis\n"
        "  try: sw.spawn(fn, devices=8), or torchrun --nproc-per-node 8"
    )


def test_what_does_not_compose_is_refused_with_the_nearest_plan_that_does() -> None:
    with pytest.raises(ShardwiseError) as caught:
        an_engine("pp=2,zero=1,precision=fp16")
    assert caught.value.problem == "zero=1 shards states over replicas, but with dp=1 and cp=1 there is only one"
    assert caught.value.remedy == "pp=2,precision=fp16"


def test_a_module_that_is_frozen_altogether_is_refused() -> None:
    with pytest.raises(ShardwiseError) as caught:
        an_engine("pp=2", Net(num_blocks=4).requires_grad_(False))
    assert str(caught.value) == (
        "none of the 17 parameters of Net requires a gradient, so there is nothing to train\n"
        "  try: module.requires_grad_()"
    )


@pytest.mark.parametrize(
    ("size", "count", "remedy"),
    [
        (8, 3, "a batch of 6 or 9, or microbatches=2, or pad=True"),
        (2, 4, "a batch of 4, or microbatches=2, or pad=True"),
        (7, 4, "a batch of 4 or 8, or microbatches=1, or pad=True"),
    ],
)
def test_a_batch_that_microbatches_do_not_divide_is_refused_with_sizes_that_work(
    size: int, count: int, remedy: str
) -> None:
    with pytest.raises(ShardwiseError) as caught:
        an_engine(f"pp=2,microbatches={count}", example=tokens(size))
    assert caught.value.problem == f"a batch of {size} cannot be cut into {count} equal microbatches"
    assert caught.value.remedy == remedy


def test_a_batch_without_a_tensor_is_refused() -> None:
    with pytest.raises(ShardwiseError, match="the batch holds no tensor, so it has no length"):
        cut_batch({"flag": True}, 2)


def test_what_has_not_the_length_of_the_batch_goes_to_every_microbatch() -> None:
    table = torch.zeros(3, 2)
    first, second = cut_batch({"ids": torch.arange(4), "table": table, "flag": True}, 2)
    assert first["ids"].tolist() == [0, 1]
    assert second["ids"].tolist() == [2, 3]
    assert second["table"] is table
    assert second["flag"] is True


def test_a_loss_that_raises_in_a_step_says_for_which_microbatch_and_what_it_was_given() -> None:
    def wants_even(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
        return token_loss(output.logits if bool(batch["odd"][0]) else output, batch)  # type: ignore[attr-defined]

    odd = torch.zeros(8, dtype=torch.bool)
    engine = an_engine("pp=2,microbatches=2", loss=wants_even, example={**tokens(), "odd": odd})
    with pytest.raises(AttributeError, match="logits") as caught:
        engine.train_step({**tokens(), "odd": ~odd})
    assert caught.value.__notes__ == [
        "in the loss of microbatch 0, which stage 1 gave a Tensor of shape (4, 5, 11)",
        "in 1F0: stage 1, microbatch 0, rank 1",
    ]


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda output, _: output.detach().mean(), "the loss does not depend on any parameter"),
        (lambda output, _: (output.sum(), 0), "the loss is a sum over 0 numbers in the whole batch"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss: Any, text: str) -> None:
    engine = an_engine("pp=2,microbatches=2", loss=loss)
    before = {name: each.clone() for name, each in engine.state_dict().items()}
    with pytest.raises(ShardwiseError) as caught:
        engine.train_step(tokens())
    assert caught.value.problem.startswith(text)
    assert all(torch.equal(each, before[name]) for name, each in engine.state_dict().items())


def test_a_step_that_was_broken_off_leaves_nothing_behind() -> None:
    fails = [False]

    def moody(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
        if fails[0]:
            raise RuntimeError("not today")
        return token_loss(output, batch)

    engine, other = an_engine("pp=2,microbatches=4", loss=moody), an_engine("pp=2,microbatches=4")
    fails[0] = True
    with pytest.raises(RuntimeError, match="not today"):
        engine.train_step(tokens())
    fails[0] = False
    assert engine.train_step(tokens()) == other.train_step(tokens())


def test_a_stage_without_a_parameter_to_train_is_nothing_special() -> None:
    net, other = Net(num_blocks=4), Net(num_blocks=4)
    for each in (net, other):
        each.blocks[2].requires_grad_(False)
        each.blocks[3].requires_grad_(False)
        each.embedding.requires_grad_(False)
    engine = an_engine("pp=4,microbatches=4,schedule=zb-h1", net)
    same(engine, other, [tokens()], token_loss, sgd)


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,chunks=1", "pp=2,chunks=2", "pp=2,layers=2+2", "pp=2,layers=1+1+1+1"])
def test_auto_makes_a_schedule_of_the_stages_that_are_asked_for(plan: str) -> None:
    net, other = Net(num_blocks=4), Net(num_blocks=4)
    engine = an_engine(f"{plan},microbatches=4,schedule=auto", net)
    same(engine, other, [tokens()], token_loss, sgd)
    stages = {"chunks=1": 2, "layers=2+2": 2, "chunks=2": 4, "layers=1+1+1+1": 4}.get(plan.removeprefix("pp=2,"))
    assert stages is None or engine.split.num_stages == stages


class Dropping(nn.Module):
    """Blocks with dropout and batch norm: what a second run of a forward must not draw or count again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(NUM_TOKENS, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU()) for _ in range(4)
        )
        self.head = nn.Linear(8, NUM_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x.flatten(0, 1)).view_as(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_recomputation_changes_no_bit_not_even_with_dropout_and_batch_norm(schedule: str) -> None:
    results = []
    for recompute in ("none", "full"):
        module = Dropping()
        plan = Plan(pp=2, schedule=schedule, microbatches=4, recompute=recompute)
        if plan.num_stages is not None and plan.num_stages > 4:
            plan = Plan(pp=2, schedule=schedule, microbatches=4, recompute=recompute, chunks=2)
        engine = an_engine(plan, module)
        torch.manual_seed(7)
        losses = [engine.train_step(tokens(seed=step)) for step in range(2)]
        results.append((losses, gradients_of(engine.parameters), engine.state_dict(), torch.get_rng_state()))
    (losses, gradients, weights, chance), (again, same, alike, left) = results
    assert losses == again
    assert all(torch.equal(same[name], each) for name, each in gradients.items())
    assert all(torch.equal(alike[name], each) for name, each in weights.items())
    assert torch.equal(chance, left)


class Noisy(nn.Module):
    """Blocks that draw from torch's own generator, which no plan has a rule for."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x) * torch.rand_like(x)  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(NUM_TOKENS, 8)
        self.blocks = nn.ModuleList(Noisy.Block() for _ in range(4))
        self.head = nn.Linear(8, NUM_TOKENS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_recomputation_draws_what_the_first_forward_drew(schedule: str) -> None:
    results = []
    for recompute in ("none", "full"):
        module = Noisy()
        engine = an_engine(Plan(pp=2, schedule=schedule, microbatches=4, recompute=recompute), module)
        torch.manual_seed(7)
        results.append(
            (engine.train_step(tokens(seed=0)), gradients_of(dict(module.named_parameters())), torch.get_rng_state())
        )
    (loss, gradients, chance), (again, same, left) = results
    assert loss == again
    assert all(torch.equal(same[name], each) for name, each in gradients.items())
    assert torch.equal(chance, left)


def test_recomputation_holds_inputs_and_nothing_else_until_the_backward() -> None:
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    def watch(_module: nn.Module, _given: Any, made: Tensor) -> None:
        alive.append(sum(each() is not None for each in seen))
        seen.append(weakref.ref(made))

    for recompute, most in (("none", 7), ("full", 0)):
        alive.clear()
        seen.clear()
        net = Net(num_blocks=4)
        # LayerNorm's output is saved by the Linear behind it, and is no value between stages.
        for block in net.blocks:
            block.get_submodule("0").register_forward_hook(watch)
        engine = an_engine(f"pp=1,microbatches=2,schedule=gpipe,recompute={recompute}", net)
        alive.clear()
        seen.clear()
        engine.train_step(tokens())
        assert max(alive[:8]) == most


def test_bf16_computes_in_bf16_keeps_weights_in_fp32_and_stays_near() -> None:
    types: list[torch.dtype] = []

    def loss(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
        types.append(output.dtype)
        return token_loss(output, batch)

    expected, found = (
        an_engine(f"pp=4,microbatches=4,schedule=zb-h1,precision={each}", Net(num_blocks=4), loss=loss)
        for each in ("fp32", "bf16")
    )
    batch = tokens()
    assert found.train_step(batch) == pytest.approx(expected.train_step(batch), rel=0.01)
    assert set(types) == {torch.float32, torch.bfloat16}
    assert worst(gradients_of(found.parameters), gradients_of(expected.parameters))[0] <= 0.05
    assert {each.dtype for each in found.module.parameters()} == {torch.float32}
    assert found.evaluate(batch) == pytest.approx(expected.evaluate(batch), rel=0.01)


@pytest.mark.parametrize("family", ["llama", "t5", "deepseek-v3"])
def test_bf16_splits_and_recomputes_real_models(family: str) -> None:
    batch = make_batch(family, 4)
    module = make_family(family)
    engine = parallelize(
        module,
        "pp=2,microbatches=2,schedule=zb-v,precision=bf16,recompute=full",
        loss=lambda output, _: output.logits.float().square().mean(),
        optimizer=lambda parameters: SGD(parameters, lr=0.0),
        example=batch,
    )
    plain = float(torch.stack([_square(module, each) for each in cut_batch(batch, 2)]).mean())
    assert engine.train_step(batch) == pytest.approx(plain, rel=0.05)


@torch.no_grad()
def _square(module: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = module(**batch, use_cache=False).logits.square().mean()
    return found


@pytest.mark.parametrize("schedule", SYNCHRONOUS)
def test_clipping_is_by_the_norm_of_the_plain_module_in_which_a_tied_weight_is_one(schedule: str) -> None:
    net, other = Net(num_blocks=4), Net(num_blocks=4)
    plan = Plan(pp=2, schedule=schedule, microbatches=4, chunks=2 if schedule == "hanayo" else None)
    engine = an_engine(plan, net, clip=0.1)
    same(engine, other, [tokens(seed=step) for step in range(2)], token_loss, sgd, clip=0.1, tolerance=1e-5)
    assert engine.gradient_norm is not None
    assert engine.gradient_norm > 0.1


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v", "dualpipe-v", "chimera"])
def test_a_step_is_recorded_when_asked_as_the_simulator_would_write_it(schedule: str) -> None:
    engine = an_engine(f"pp=2,microbatches=4,schedule={schedule}")
    engine.train_step(tokens())
    before = engine.trace
    assert before is None
    engine.train_step(tokens(), trace=True)
    trace = engine.trace
    assert trace is not None
    assert (trace.name, trace.num_ranks, trace.start) == (schedule, 2, 0)
    orders = engine.schedule.orders
    for rank, events in enumerate(trace.compute):
        wanted = [str(each) for each in orders[rank] if each.kind in "FBIW"]
        assert [event.name for event in events] == wanted
        assert all(event.seconds > 0 for event in events)
    sends = [event for event in trace.events if event.lane is Lane.SEND]
    assert len(sends) == sum(each.kind.startswith("SEND") for order in orders for each in order)
    assert {(event.rank, event.peer) for event in sends} == {(0, 1), (1, 0)}
    assert [event.rank for event in trace.events if event.lane is Lane.STEP] == [0, 1]
    assert not any(event.lane in (Lane.RECEIVE, Lane.COLLECTIVE) for event in trace.events)
    lines = draw(trace, width=4000)
    assert [line[:6] for line in lines] == ["rank 0", "rank 1"]
    assert sum(event.held_at_start + event.held_at_end for event in trace.events) == pytest.approx(0)


def test_evaluation_changes_neither_weights_nor_statistics_nor_the_mode_of_any_part() -> None:
    torch.manual_seed(0)
    module = ResNet50(width=4, num_classes=7)
    batch = {"image": torch.randn(4, 3, 64, 64), "labels": torch.randint(0, 7, (4,))}
    engine = parallelize(
        module,
        "pp=2,microbatches=2",
        loss=lambda output, microbatch: cross_entropy(output, microbatch["labels"]),
        optimizer=lambda parameters: SGD(parameters, lr=0.1),
        example=batch,
    )
    module.bn1.eval()
    before = {name: each.clone() for name, each in module.state_dict().items()}
    loss = engine.evaluate(batch)
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    assert [name for name, each in module.named_modules() if not each.training] == ["bn1"]
    with torch.no_grad():
        assert loss == pytest.approx(float(cross_entropy(module.eval()(batch["image"]), batch["labels"])), rel=1e-5)


class Uneven(nn.Module):
    """Blocks of which the last is as much work as all others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([*(nn.Linear(32, 32) for _ in range(4)), nn.Linear(32, 128)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_auto_looks_at_what_stages_cost() -> None:
    """In two stages the net is even, in four it is not: one of them would be half of it."""
    engine = an_engine(
        "pp=2,microbatches=4,schedule=auto",
        Uneven(),
        example={"x": torch.randn(8, 32)},
        loss=lambda output, _: output.square().mean(),
    )
    assert engine.split.num_stages == 2
    assert [len(units) for units in engine.split.units] == [4, 1]
