"""Problems whose batches differ in length, and engines that evaluate them. Ranks import this."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.parallelize import parallelize
from shardwise.nets.loss import next_token_loss
from shardwise.nets.settings import Mixture
from shardwise.nets.transformer import Transformer
from shardwise.parity.models import batch_of, default_settings
from shardwise.parity.problem import Problem, small_matrices
from shardwise.planner.plan import Plan
from tests.engine.composed import make_optimizer, token_loss
from tests.stages.families import make_family

#: Neither 2 nor 4 ranks divide any but the second, and of three tokens the last of four ranks has none.
LENGTHS = (7, 8, 3)


def ours(plan: Plan, lengths: Sequence[int], mixture: Mixture | None = None, **options: Any) -> Problem:
    """A transformer of ours, and a batch of each length."""
    settings = replace(default_settings(plan), mixture=mixture)
    torch.manual_seed(0)
    module = Transformer(settings).train()
    return Problem(
        module=module,
        batches=batches(plan, lengths, settings.vocabulary),
        loss=next_token_loss,
        options=options,
    )


def dropping(plan: Plan, lengths: Sequence[int], family: str, **options: Any) -> Problem:
    """A model of Hugging Face that drops at random, and a batch of each length."""
    module = make_family(family, num_layers=max(2, plan.num_stages or 0))
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.1
    return Problem(module=module.train(), batches=batches(plan, lengths, 97), loss=token_loss, options=options)


def batches(plan: Plan, lengths: Sequence[int], words: int) -> list[dict[str, Tensor]]:
    rows = plan.dp * plan.microbatches * (2 if plan.dp * plan.microbatches < 4 else 1)
    return [batch_of(rows, length, words, seed) for seed, length in enumerate(lengths)]


def evaluated(text: str, family: str, lengths: Sequence[int]) -> list[float]:
    """The losses of batches, one of each length, that an engine evaluates."""
    plan = Plan.parse(text)
    some = batches(plan, lengths, 97)
    with small_matrices():
        engine = parallelize(
            make_family(family), plan, loss=token_loss, optimizer=make_optimizer, example=some[0], verify=False
        )  # fmt: skip
        return [engine.evaluate(batch) for batch in some]
