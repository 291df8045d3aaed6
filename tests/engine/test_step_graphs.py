"""Steps that are captured and replayed: the same numbers as steps that are not, and when they are not captured.

A CPU has no graphs: what stands for one here runs the step again, and leaves its numbers where the first run had them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.engine.step_graphs import StepGraphs, problems_of
from shardwise.execution.gpu_graphs import Seen
from shardwise.execution.step_losses import Tally
from shardwise.nets.loss import next_token_loss
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.stages.stage import Batch
from shardwise.training.precision import LossScale
from tests.stages.pieces import Net


class RunAgain:
    """In place of CUDA graphs."""

    device_type = "cpu"

    def __init__(
        self, module: nn.Module, problems: tuple[str, ...] = (), fails: bool = False, replay_seconds: float = 0.5
    ) -> None:
        self.module, self.problems, self.fails, self.replay_seconds = module, problems, fails, replay_seconds
        self.num_captured = self.num_replayed = 0

    @contextmanager
    def watched(self) -> Iterator[Seen]:
        yield Seen(problems=list(self.problems), host_seconds=1.0, device_seconds=1.0)

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        made: Tally = run()
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.num_captured += 1
        held = [(each, each.grad) for each in self.module.parameters()]

        def replay() -> None:
            self.num_replayed += 1
            for parameter, _ in held:
                parameter.grad = None
            again: Tally = run()
            for (parameter, gradient), new in zip(held, [each.grad for each, _ in held], strict=True):
                assert gradient is not None
                assert new is not None
                gradient.copy_(new)
                parameter.grad = None
            for mine, other in zip(made._unread[0], again._unread[0], strict=True):
                mine.total.copy_(other.total)
                assert isinstance(mine.number, Tensor)
                mine.number.copy_(torch.as_tensor(other.number))

        for parameter, _ in held:
            parameter.grad = None
        replay()
        for parameter, gradient in held:
            parameter.grad = gradient
        return made, replay

    def seconds(self, run: Callable[[], None]) -> float:
        run()
        return self.replay_seconds


def tokens(seed: int = 0, rows: int = 8) -> dict[str, Tensor]:
    ids = torch.randint(0, 11, (rows, 6), generator=torch.Generator().manual_seed(seed))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def loss(output: Tensor, batch: Batch, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    labels: Tensor = batch["labels"]
    return factor * cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum"), (labels >= 0).sum()


def an_engine(plan: str = "dp=1", loss: Any = loss, clip: float | None = 0.5, **options: Any) -> Engine:
    torch.manual_seed(0)
    return parallelize(
        Net(num_blocks=2), plan, loss=loss, optimizer=lambda given: AdamW(given, lr=1e-2, fused=True),
        example=tokens(), clip=clip, **options,
    )  # fmt: skip


def captured(engine: Engine, **options: Any) -> RunAgain:
    """Have its steps captured by what stands for graphs here."""
    graphs = RunAgain(engine.module, **options)
    engine.steps.graphs = StepGraphs(engine._parts, engine.states, engine.execution.dropouts, graphs)
    return graphs


@pytest.mark.parametrize("plan", ["dp=1", "dp=1,microbatches=2"])
def test_captured_steps_are_those_that_are_not_bit_for_bit(plan: str) -> None:
    plain, engine = an_engine(plan), an_engine(plan, graphs=True)
    graphs = captured(engine)
    for step in range(7):
        for optimizer in (*plain.optimizers, *engine.optimizers):
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
        batch = tokens(step)
        if step == 5:
            assert engine.launch_step(batch).read().loss == plain.launch_step(batch).read().loss
        else:
            assert engine.train_step(batch) == plain.train_step(batch)
        for name, each in plain.gradients().items():
            assert torch.equal(engine.gradients()[name], each)
    assert graphs.num_captured == 1
    assert all(torch.equal(engine.state_dict()[name], each) for name, each in plain.state_dict().items())
    assert "captured as CUDA graphs: 1 so far" in engine.explain()


def test_another_shape_and_another_number_of_the_loss_are_other_graphs() -> None:
    factor = 1.0

    def weighed(output: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        return loss(output, batch, factor)

    plain, engine = an_engine(loss=weighed), an_engine(loss=weighed, graphs=True)
    graphs = captured(engine)
    for step in range(4):
        assert engine.train_step(tokens(step)) == plain.train_step(tokens(step))
    for step in range(4):
        assert engine.train_step(tokens(step, rows=4)) == plain.train_step(tokens(step, rows=4))
    assert graphs.num_captured == 2
    factor = 3.0
    for step in range(4):
        assert engine.train_step(tokens(step)) == plain.train_step(tokens(step))
    assert graphs.num_captured == 3


def test_a_factor_of_half_precision_that_changes_is_never_one_of_before() -> None:
    scales = [LossScale.of("fp16", loss) for _ in range(2)]
    plain, engine = an_engine(loss=scales[0].loss), an_engine(loss=scales[1].loss, graphs=True)
    captured(engine)
    for step in range(8):
        for scale in scales:
            scale.factor = 2.0 ** (12 - step // 4)
        assert engine.train_step(tokens(step)) == plain.train_step(tokens(step))
        for name, each in plain.gradients().items():
            assert torch.equal(engine.gradients()[name], each)
    assert len(engine.steps.graphs._made) == 2


def test_a_step_that_is_looked_at_is_run_as_it_is() -> None:
    engine = an_engine(graphs=True)
    graphs = captured(engine)
    for step in range(4):
        engine.train_step(tokens(step))
    replayed = graphs.num_replayed
    engine.train_step(tokens(), trace=True)
    assert engine.trace is not None
    engine.train_step(tokens(), metrics=lambda output, _: {"mean": output.mean()})
    assert "mean" in engine.metrics
    seen = list[bool]()
    hook = next(iter(engine.module.children())).register_forward_hook(lambda *_: seen.append(True))
    engine.train_step(tokens())
    hook.remove()
    assert seen
    assert graphs.num_replayed == replayed
    engine.train_step(tokens())
    assert graphs.num_replayed == replayed + 1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"problems": ("the host waits for the GPU at net.py:7",)}, "the host waits for the GPU at net.py:7"),
        ({"fails": True}, "a capture failed (operation not permitted when stream is capturing)"),
    ],
)
def test_a_step_that_cannot_be_captured_says_why_and_goes_on(
    options: dict[str, Any], line: str, logged: list[str]
) -> None:
    plain, engine = an_engine(), an_engine(graphs=True)
    captured(engine, **options)
    logged.clear()
    for step in range(5):
        assert engine.train_step(tokens(step)) == plain.train_step(tokens(step))
    assert logged == [f"steps are not captured as CUDA graphs: {line}"]
    assert line in engine.explain()


@pytest.mark.parametrize(
    ("plan", "options", "line"),
    [
        ("dp=1", {}, "the module is on cpu"),
        ("recompute=full", {}, "recompute=full asks where random numbers are"),
        ("precision=bf16", {}, None),
        ("pp=2,microbatches=2,schedule=pipedream-2bw", {}, "with schedule=pipedream-2bw a step goes on in the next"),
    ],
)
def test_what_no_graph_can_hold_is_known_before_the_first_step(
    plan: str, options: dict[str, Any], line: str | None, logged: list[str]
) -> None:
    engine = an_engine(plan, clip=None, graphs=True, **options)
    assert "steps are not captured as CUDA graphs: the module is on cpu" in logged
    found = problems_of(engine._parts, engine.states, engine.execution.dropouts)
    assert found[1:] == ([line] if line not in (None, found[0]) else [])


@pytest.mark.parametrize(("seconds", "num_captured"), [(0.5, 1), (0.99, 0)])
def test_by_itself_only_what_is_known_is_captured_and_only_if_it_is_faster(seconds: float, num_captured: int) -> None:
    theirs = an_engine(graphs="auto")
    captured(theirs)
    assert "code of others" in str(theirs.steps.graphs.problem)
    torch.manual_seed(0)
    settings = Settings(
        vocabulary=11, width=8, num_layers=1, length=8, attention=Heads(num_heads=2, num_kv_heads=2, head_dim=4),
        mlp=Mlp(width=16),
    )  # fmt: skip
    batch = {"input_ids": tokens()["ids"], "labels": tokens()["labels"]}
    engine = parallelize(
        Transformer(settings), "dp=1", loss=next_token_loss, example=batch, graphs="auto",
        optimizer=lambda given: AdamW(given, lr=1e-2, fused=True),
    )  # fmt: skip
    captured(engine, replay_seconds=seconds)
    losses = [engine.train_step(batch) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert len(engine.steps.graphs._made) == num_captured
