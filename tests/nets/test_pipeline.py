"""The transformer under the runtime: cut into stages it is the same model, with its ties, experts and their loss."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.nets.initialise import initialise
from shardwise.nets.loss import next_token_loss
from shardwise.nets.router import Router
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Output, Transformer
from shardwise.nets.weights import weights_of
from shardwise.stages.split import split
from tests.nets.families import tokens
from tests.nets.small import LATENT, MIXTURE, small
from tests.same import same

MODELS: dict[str, Settings] = {
    "dense, tied, a window in some layers": small(tied=True, window=5, windowed_layers=(1, 3)),
    "as gpt2": small(
        rope=None,
        norm="layer",
        attention=Heads(num_heads=4, num_kv_heads=4, head_dim=8, qkv_bias=True, output_bias=True),
        mlp=Mlp(width=64, gated=False, bias=True, activation="gelu_tanh"),
        tied=True,
    ),
    "experts and their loss": small(mixture=replace(MIXTURE, auxiliary=0.1, dense_layers=(1,))),
    "latent, groups, shared experts": small(
        attention=LATENT,
        mixture=replace(
            MIXTURE, scores="sigmoid", correction=True, num_groups=3, num_chosen_groups=2, num_shared=1, scale=2.5
        ),
    ),
}
PLANS = [
    "pp=2,schedule=1f1b,microbatches=4",
    "pp=2,schedule=zb-v,microbatches=4",
    "pp=3,schedule=zb-h1,microbatches=4,recompute=full",
    "pp=4,schedule=interleaved,chunks=1,microbatches=4",
]
RATE = 0.5


def a_batch(packed: bool = False) -> dict[str, Tensor]:
    ids = tokens(num_sequences=8, length=13)
    labels = ids[:, 1:].clone()
    labels[0, :9] = -100
    documents = {"documents": (torch.arange(12) // 5).expand(8, 12).contiguous()} if packed else {}
    return {"input_ids": ids[:, :-1], "labels": labels, **documents}


def a_model(settings: Settings) -> Transformer:
    module = Transformer(settings)
    initialise(module, seed=5)
    with torch.no_grad():
        for each in module.parameters():
            if each.dim() > 1:
                each.mul_(5)
    return module.train()


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=RATE)


#: Each model under two plans, and each plan with two models.
PAIRS = [(name, PLANS[(number + more) % len(PLANS)]) for number, name in enumerate(MODELS) for more in (0, 1)]


@pytest.mark.parametrize(("name", "plan"), PAIRS)
def test_a_step_under_a_pipeline_is_a_step_of_the_plain_model(name: str, plan: str) -> None:
    batch = a_batch(packed="experts" in name)
    plain, module = a_model(MODELS[name]), a_model(MODELS[name])
    engine = parallelize(module, plan, loss=next_token_loss, optimizer=sgd, example=batch)
    assert isinstance(engine, Engine)
    # Microbatches one by one: the balancing loss is one of each.
    same(engine, plain, [batch], next_token_loss, sgd, num_microbatches=4, tolerance=1e-5)
    loads = [[each.load.tolist() for each in m.modules() if isinstance(each, Router)] for m in (module, plain)]
    assert loads[0] == loads[1]


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        pytest.param(name, number, marks=() if number == 2 + at % 3 else pytest.mark.whole)
        for at, name in enumerate(MODELS)
        for number in (2, 3, 4)
    ],
)
def test_stages_made_apart_on_the_meta_device_are_the_whole_model(name: str, num_stages: int) -> None:
    batch = a_batch()
    whole = Transformer(MODELS[name])
    initialise(whole, seed=5)
    values: dict[str, Tensor] = {}
    output: Any = None
    for number in range(num_stages):
        with torch.device("meta"):
            module = Transformer(MODELS[name])
        stages = split(module, num_stages, batch, only=[number])
        stage = stages.stages[number]
        assert stage is not None
        initialise(module, seed=5, only=stage.parameters.keys() | stage.buffers.keys())
        assert len(stage.parameters) < len(weights_of(whole))
        made, output = stage.run({each: values[each] for each in stages.reads[number]}, batch)
        values |= made
    expected = whole.train()(batch["input_ids"])
    pairs = zip(output, expected, strict=True) if isinstance(output, Output) else [(output, expected)]
    assert all(found.equal(should) for found, should in pairs)
