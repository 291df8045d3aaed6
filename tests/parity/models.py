"""The models of the matrix: small ones of ours, each with something that a plan has to get right, and HF's."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from shardwise.nets.loss import IGNORED
from shardwise.nets.settings import Heads, Latent, Mixture, Mlp, Settings
from shardwise.parity.models import batch_of, default_settings, length_for, problem_of, rows_for
from shardwise.parity.problem import MakeProblem, Problem
from shardwise.planner.plan import Plan

NUM_STEPS = 3
HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8)
MOE = Mixture(num_experts=4, num_chosen=2, width=16, num_shared=1)
#: What each model of ours is: how it differs from the plain one, which is tied and has 257 words.
OURS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tied": False, "vocabulary": 256},
    "gpt2": {
        "rope": None,
        "norm": "layer",
        "mlp": Mlp(width=64, activation="gelu_tanh", gated=False, bias=True),
        "attention": Heads(num_heads=4, num_kv_heads=4, head_dim=8, qkv_bias=True, output_bias=True),
    },
    "3 key heads": {"tied": False, "attention": Heads(num_heads=6, num_kv_heads=3, head_dim=8, qk_norm=True)},
    "50,257 words": {"vocabulary": 50257, "width": 16, "mlp": Mlp(width=32)},
    "windows": {"window": 5, "windowed_layers": (0,)},
    "experts": {"mixture": MOE},
    "balanced experts": {"mixture": replace(MOE, auxiliary=0.01)},
    "latent": {
        "tied": False,
        "attention": Latent(num_heads=4, q_rank=16, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8),
        "mixture": replace(MOE, scores="sigmoid", correction=True, dense_layers=(0,)),
    },
}
#: Of `transformers`, by the names of `tests/stages/families.py`.
HUGGING_FACE = ("llama", "hf-gpt2", "mixtral", "qwen3-moe")


def make_problem(model: str, plan: Plan, num_steps: int = NUM_STEPS) -> MakeProblem:
    """What makes the module, its batches and its loss, on one device and on every rank."""
    if model in OURS:
        made = problem_of(settings_of(model, plan), plan, num_steps)
    else:
        made = partial(_of_hugging_face, model.removeprefix("hf-"), rows_for(plan), length_for(plan), num_steps)
    # Two ranks try what they cut first. More would try the same, and what they compute is compared anyhow.
    return made if plan.num_ranks == 2 else partial(untried, made)


def untried(make: MakeProblem) -> Problem:
    """A problem that is cut without a trial."""
    problem = make()
    return replace(problem, options={**problem.options, "verify": False})


def settings_of(model: str, plan: Plan) -> Settings:
    plain = replace(default_settings(replace(plan, ep=1)), attention=HEADS)
    return replace(plain, **OURS[model])


def _of_hugging_face(family: str, rows: int, length: int, num_steps: int) -> Problem:
    from tests.stages.families import make_family  # Only ranks that need it import transformers.

    batches = [batch_of(rows, length, 97, seed) for seed in range(num_steps)]
    return Problem(module=make_family(family), batches=batches, loss=token_loss)


def token_loss(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"].flatten()
    total = cross_entropy(output.logits.flatten(0, 1), labels, ignore_index=IGNORED, reduction="sum")
    return total, (labels != IGNORED).sum()
