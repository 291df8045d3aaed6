"""Problems that plans once got wrong, each with what it took: made alike on one device and on every rank."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shardwise.nets.settings import Dropout, Heads, Mixture
from shardwise.parity.models import default_settings, problem_of
from shardwise.parity.problem import MakeProblem, Problem
from shardwise.planner.plan import Plan

WORDS = 11


class ByHand(nn.Module):
    """An embedding that three layers read as they would any columns, of as many words as the head scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        scores: Tensor = self.head(torch.softmax(self.q(x) @ self.k(x).mT, -1) @ self.v(x))
        return scores


class Normed(nn.Module):
    """Batch norms, whose statistics are those of all replicas' microbatches in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(6, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        scores: Tensor = self.head(x)
        return scores


def words_loss(output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    labels = batch["labels"].flatten()
    return cross_entropy(output.reshape(-1, WORDS), labels, reduction="sum"), labels.numel()


def _by_hand() -> Problem:
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(WORDS, (4, 6)), "labels": torch.randint(WORDS, (4, 6))}
    return Problem(module=ByHand().train(), batches=[batch] * 2, loss=words_loss)


def _normed() -> Problem:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 6), "labels": torch.randint(WORDS, (8,))}
    return Problem(module=Normed().train(), batches=[batch] * 2, loss=words_loss)


def _in_double() -> Problem:
    found = _normed()
    batches = [
        {name: each.double() if name == "x" else each for name, each in batch.items()} for batch in found.batches
    ]
    return replace(found, module=found.module.double(), batches=batches)


def _dropping_gpt2(rows: int) -> Problem:
    from tests.parity.models import token_loss  # Only ranks that need it import transformers.
    from tests.stages.families import make_family

    module = make_family("gpt2")
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.1  # As in the configuration that GPT-2 comes with: of the weights of its attention too.
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(97, (rows, 8)), "labels": torch.randint(97, (rows, 8))}
    return Problem(module=module.train(), batches=[batch] * 2, loss=token_loss)


def _ours(plan: Plan, **changed: Any) -> MakeProblem:
    return problem_of(replace(default_settings(plan), **changed), plan, 2)


THREE_KEY_HEADS = Heads(num_heads=6, num_kv_heads=3, head_dim=8)
BALANCED = Mixture(num_experts=5, num_chosen=2, width=16, auxiliary=0.01, scores="sigmoid", correction=True)
CAPACITY = replace(BALANCED, num_experts=4, capacity=0.6)
ALL_CHOSEN = Mixture(num_experts=6, num_chosen=6, width=16, auxiliary=0.01)
DEEPSEEK = Mixture(
    num_experts=6,
    num_chosen=2,
    width=16,
    num_shared=1,
    scores="sigmoid",
    correction=True,
    num_groups=3,
    num_chosen_groups=2,
    scale=2.5,
    dense_layers=(0,),
)
DROPOUT = Dropout(embedding=0.1, attention=0.2, residual=0.3)
PROBLEMS: dict[str, Callable[[Plan], MakeProblem]] = {
    "an embedding like any columns": lambda _: _by_hand,
    "batch norm": lambda _: _normed,
    "double precision": lambda _: _in_double,
    "attention that drops": lambda plan: partial(_dropping_gpt2, 2 * plan.dp * plan.microbatches),
    "padding that is routed": lambda plan: _ours(plan, mixture=BALANCED),
    "experts that are full": lambda plan: _ours(plan, mixture=CAPACITY),
    "experts that all are chosen": lambda plan: _ours(plan, mixture=ALL_CHOSEN),
    "experts in groups": lambda plan: _ours(plan, mixture=DEEPSEEK),
    "a transformer that drops": lambda plan: _ours(plan, dropout=DROPOUT),
    "heads of unequal ranks": lambda plan: _ours(plan, attention=THREE_KEY_HEADS, num_layers=3),
    "blocks with something around": _ours,
}
