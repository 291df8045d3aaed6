"""A training that is broken off and goes on under another plan, and the same on one device."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.nets.loss import next_token_loss
from shardwise.nets.settings import Heads, Mixture, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.parity.models import batch_of
from shardwise.states.compact_adamw import CompactAdamW
from shardwise.states.muon import Muon
from shardwise.states.parameter_group import Share, is_hidden_matrix, shares_of, sort_out

#: Steps before and after.
BEFORE, AFTER = 2, 2
PLAIN = Settings(
    vocabulary=53,
    width=16,
    num_layers=4,
    length=32,
    attention=Heads(num_heads=4, num_kv_heads=2, head_dim=4),
    mlp=Mlp(width=24),
    tied=True,
)
MODELS = {
    "dense": PLAIN,
    "two layers": replace(PLAIN, num_layers=2),
    "experts": Settings(
        vocabulary=53,
        width=16,
        num_layers=2,
        length=32,
        attention=PLAIN.attention,
        mlp=PLAIN.mlp,
        mixture=Mixture(num_experts=4, num_chosen=2, width=12),
    ),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(AdamW, lr=1e-3, eps=1e-4, weight_decay=0.1),
    "adamw bf16": partial(CompactAdamW, lr=1e-3, eps=1e-4, weight_decay=0.1, states="bf16"),
    "adamw 8bit": partial(CompactAdamW, lr=1e-3, eps=1e-4, weight_decay=0.1, states="8bit"),
    "sgd": partial(SGD, lr=0.05, momentum=0.9),
    "adafactor": partial(Adafactor, lr=1e-3),
    "muon": [
        Share(make=partial(Muon, lr=0.01), takes=is_hidden_matrix),
        Share(make=partial(AdamW, lr=1e-3, eps=1e-4)),
    ],
}


class Outcome(NamedTuple):
    """The losses after the break, the weights at the end, and what optimizers remembered at the break."""

    losses: list[float]
    weights: dict[str, Tensor]
    state: dict[str, Any]


def make_module(model: str, seed: int) -> Transformer:
    torch.manual_seed(seed)
    module = Transformer(MODELS[model])
    with torch.no_grad():
        for each in module.parameters():
            each.copy_(torch.randn(each.shape) * 0.2 if each.dim() > 1 else 1 + 0.1 * torch.randn(each.shape))
    return module.train()


def batch(step: int) -> dict[str, Tensor]:
    return batch_of(8, 8, 53, step)


def make_engine(plan: str, model: str, optimizer: str, seed: int = 0) -> Engine:
    return parallelize(
        make_module(model, seed),
        plan,
        loss=next_token_loss,
        optimizer=OPTIMIZERS[optimizer],
        example=batch(0),
        clip=0.5,
        verify=False,  # What comes of it is compared with one device.
    )


def train(engine: Engine, first: int, count: int) -> list[float]:
    return [engine.train_step(batch(step)) for step in range(first, first + count)]


def go_on(first: str, second: str, model: str, optimizer: str) -> Outcome:
    """Train under one plan, and go on under another in an engine of other weights and no memory."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    with make_engine(first, model, optimizer) as engine:
        train(engine, 0, BEFORE)
        weights, state = engine.state_dict(), engine.optimizer_state_dict()
        weights = {name: each.clone() for name, each in weights.items()}
    with make_engine(second, model, optimizer, seed=1) as engine:
        engine.load_state_dict(weights)
        engine.load_optimizer_state_dict(state)
        losses = train(engine, BEFORE, AFTER)
        return Outcome(losses, {name: each.clone() for name, each in engine.state_dict().items()}, state)


def alone(model: str, optimizer: str) -> Outcome:
    """Plain torch on one device, without a break."""
    module = make_module(model, 0)
    optimizers = _optimizers(module, optimizer)
    losses: list[float] = []
    state: dict[str, Any] = {}
    for step in range(BEFORE + AFTER):
        module.zero_grad()
        total, count = next_token_loss(module(input_ids=batch(step)["input_ids"]), batch(step))
        (total / count).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        for each in optimizers:
            each.step()
        losses.append((total / count).item())
        if step == BEFORE - 1:
            names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
            state = {
                names[parameter]: {key: each.clone() for key, each in kept.items()}
                for each in optimizers
                for parameter, kept in each.state.items()
            }
    return Outcome(losses[BEFORE:], dict(module.state_dict()), state)


def _optimizers(module: nn.Module, optimizer: str) -> list[Optimizer]:
    named = dict(module.named_parameters())
    shares = shares_of(OPTIMIZERS[optimizer])
    taken = zip(shares, sort_out(shares, named), strict=True)
    return [share.make([named[name] for name in names]) for share, names in taken]


def settings_go_on(first: str, second: str) -> list[float]:
    """The learning rates after a load, where a schedule had lowered them."""
    with make_engine(first, "two layers", "adamw") as engine:
        train(engine, 0, 1)
        for optimizer in engine.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.125
        state = engine.optimizer_state_dict()
    with make_engine(second, "two layers", "adamw") as engine:
        engine.load_optimizer_state_dict(state)
        return [group["lr"] for optimizer in engine.optimizers for group in optimizer.param_groups]


def refusal(plan: str, number: int) -> str:
    """What is said of a state that does not fit."""
    with make_engine(plan, "two layers", "adamw") as engine:
        train(engine, 0, 1)
        misfit = _misfits(engine.optimizer_state_dict())[number]
        try:
            engine.load_optimizer_state_dict(misfit)
        except ShardwiseError as error:
            return error.problem
    return "nothing"


def _misfits(state: dict[str, Any]) -> list[dict[str, Any]]:
    groups, states = state["param_groups"], state["state"]
    with_momentum = [{"params": groups[0]["params"], "lr": 0.1, "momentum": 0.9}]
    name = "layers.0.mlp.up_proj.weight"
    return [
        {"state": states},
        {"state": {**states, "layers.0.mlp.upp_proj.weight": {}}, "param_groups": groups},
        {"state": {**states, name: {**states[name], "exp_avg": torch.zeros(3, 5)}}, "param_groups": groups},
        {"state": states, "param_groups": with_momentum},
        {"state": states, "param_groups": [{**groups[0], "params": groups[0]["params"][:1]}]},
    ]
