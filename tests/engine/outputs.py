"""What ranks predict and measure, held against the plain module."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.nets.transformer import Output, Transformer
from shardwise.parity.models import batch_of, default_settings, problem_of
from shardwise.planner.plan import Plan

Batch = Mapping[str, Any]


def apart(plan: str, rows: int = 4) -> list[tuple[str, float]]:
    """How far predictions and metrics of our transformer are from those of the plain one, before and after a step."""
    parsed = Plan.parse(plan)
    problem = problem_of(default_settings(parsed), parsed, 2)()
    module, length = problem.module.double(), problem.batches[0]["input_ids"].shape[1]
    assert isinstance(module, Transformer)
    engine = sw.parallelize(
        copy.deepcopy(module), plan, loss=problem.loss, optimizer=partial(torch.optim.SGD, lr=0.1),
        example=problem.batches[0],
    )  # fmt: skip
    found = []
    for when in ("before", "after"):
        batch = batch_of(rows, length, 257, 7)
        wanted = _predicted(module, batch)
        came = engine.predict({"input_ids": batch["input_ids"]})
        found.append((f"outputs {when}", _far(_logits(came), wanted)))
        even = problem.batches[1]
        engine.evaluate(even, metrics=accuracy)
        hits, number = accuracy(_predicted(module, even), even)["accuracy"]
        found.append((f"accuracy {when}", abs(engine.metrics["accuracy"] - float(hits / number))))
        if when == "before":
            engine.train_step(even, metrics=accuracy)
            found.append(("accuracy of the step", abs(engine.metrics["accuracy"] - float(hits / number))))
            module.load_state_dict(engine.state_dict())
    assert all(each.training for each in engine.module.modules())
    engine.close()
    return found


@torch.no_grad()
def _predicted(module: nn.Module, batch: Batch) -> Tensor:
    module.eval()
    return _logits(module(batch["input_ids"]))


def _logits(output: Any) -> Tensor:
    """Those of a model that returns a balancing loss beside them, or nothing else."""
    return output.logits if isinstance(output, Output) else output


def accuracy(output: Any, batch: Batch) -> dict[str, Any]:
    counts = batch["labels"] != -100
    return {"accuracy": (((_logits(output).argmax(-1) == batch["labels"]) & counts).sum(), counts.sum())}


def _far(came: Tensor, wanted: Tensor) -> float:
    assert came.shape == wanted.shape, f"{came.shape} and not {wanted.shape}"
    assert not came.requires_grad
    assert type(came) is Tensor
    return float((came - wanted).abs().max())


@dataclass
class Found:
    scores: Tensor
    deep: list[Tensor]
    note: str | None = None


class Many(nn.Module):
    """Returns things of every shape, from its first layer and from its last; `odd` are those that cannot be joined."""

    def __init__(self, odd: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 12)
        self.odd = odd

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.embed(x)
        deep = []
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
            deep.append(hidden)
        scores = self.head(hidden)
        table = torch.arange(3.0)
        found: dict[str, Any] = {
            "found": Found(scores, deep, "text"), "pair": (scores.argmax(-1), scores.mean()), "table": table,
            "no": None, "half": hidden.bfloat16(), "which": hidden > 0,
        }  # fmt: skip
        if self.odd == "set":
            found["odd"] = {1, 2}
        elif self.odd == "number":
            found["odd"] = float(scores.detach().sum())
        elif self.odd == "shape":
            found["odd"] = scores.flatten()[:5]
        return found


def many(plan: str, odd: str = "", rows: int = 4) -> str | None:
    """What `Many` predicts is what it returns; or what was refused of it."""
    torch.manual_seed(0)
    module = Many(odd).double()
    plain = copy.deepcopy(module)
    ids = torch.randint(12, (4, 3), generator=torch.Generator().manual_seed(1))
    with sw.parallelize(
        module, plan, loss=lambda output, _: output["found"].scores.square().mean(), example={"x": ids},
        optimizer=partial(torch.optim.SGD, lr=0.1),
    ) as engine:  # fmt: skip
        try:
            came = engine.predict({"x": ids[:rows]})
        except sw.ShardwiseError as error:
            return str(error)
        with torch.no_grad():
            wanted = plain(ids[:rows])
    assert isinstance(came["found"], Found)
    assert came["found"].note == "text"
    assert came["no"] is None
    assert torch.equal(came["table"], wanted["table"])
    for one, other in (
        (came["found"].scores, wanted["found"].scores), *zip(came["found"].deep, wanted["found"].deep, strict=True),
        *zip(came["pair"], wanted["pair"], strict=True), *((came[name], wanted[name]) for name in ("half", "which")),
    ):  # fmt: skip
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    return None


def sums(plan: str) -> dict[str, float]:
    """Metrics of a loss that has them beside: a mean, a sum with its number, and what is 1 for each microbatch."""
    torch.manual_seed(0)

    def loss(output: Tensor, batch: Batch) -> Any:
        counted = batch["y"] > 0
        metrics = {"mean": batch["y"].double().mean(), "kept": (batch["y"][counted].sum(), counted.sum()), "one": 1}
        return output.square().mean(), metrics

    batch = {"input": torch.randn(8, 4), "y": torch.arange(8) - 3}
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    engine = sw.parallelize(module, plan, loss=loss, optimizer=partial(torch.optim.SGD, lr=0.1), example=batch)
    with engine:
        assert engine.metrics == {}
        engine.train_step(batch)
        trained = engine.metrics
        engine.evaluate(batch, metrics=lambda output, _: {"rows": (len(output), 1)})
        assert {name: each for name, each in engine.metrics.items() if name != "rows"} == trained
        return {**engine.metrics}


def refused_metrics(plan: str, made: Any) -> str:
    """What is said of metrics of this kind."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    batch = {"input": torch.randn(4, 4)}
    engine = sw.parallelize(
        module, plan, loss=lambda output, _: output.square().mean(), example=batch,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    try:
        engine.evaluate(batch, metrics=lambda _, __: made)
    except sw.ShardwiseError as error:
        return str(error)
    finally:
        engine.close()
    return ""
