"""Models of Hugging Face, one of each family, unmodified, under one plan of each kind."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from shardwise.nets.loss import IGNORED
from shardwise.parity.models import rows_for
from shardwise.parity.problem import MakeProblem, Problem
from shardwise.planner.plan import Plan
from tests.parity.models import NUM_STEPS

#: By the names of `tests/stages/families.py`, which imports transformers.
NAMES = (
    "gpt2", "llama", "qwen3", "mistral", "gemma2", "phi3", "opt", "bloom", "falcon", "gpt-neox", "mixtral", "qwen3-moe",
    "deepseek-v3", "t5", "bert", "vit",
)  # fmt: skip
PLANS = ("dp=2,zero=3", "tp=2", "pp=2,microbatches=2")
CASES: dict[int, list[tuple[str, str]]] = {2: [(f"family {name}", plan) for plan in PLANS for name in NAMES]}
_LENGTH = 12


def is_family(model: str) -> bool:
    return model.startswith("family ")


def make_family_problem(model: str, plan: Plan) -> MakeProblem:
    return partial(_problem, model.removeprefix("family "), rows_for(plan))


def _problem(name: str, rows: int) -> Problem:
    from tests.stages.families import make_batch, make_family  # Only ranks that need it import transformers.

    batches = [_with_labels(name, make_batch(name, rows, _LENGTH, seed)) for seed in range(1, NUM_STEPS + 1)]
    return Problem(module=make_family(name), batches=batches, loss=loss_of)


def _with_labels(name: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is to be said: the next word, the word itself where all is seen, and of an image one of five."""
    if name == "vit":
        return {**batch, "labels": batch["pixel_values"].flatten(1).abs().sum(1).long() % 5}
    words = batch["decoder_input_ids"] if name == "t5" else batch["input_ids"]
    labels = words.roll(-1, dims=1)
    if name not in ("t5", "bert"):
        labels = labels.masked_fill(batch["attention_mask"] == 0, IGNORED)
    return {**batch, "labels": labels}


def loss_of(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"].flatten()
    logits = output.logits.reshape(len(labels), -1)
    return cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), (labels != IGNORED).sum()
