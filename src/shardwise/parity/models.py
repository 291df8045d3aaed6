"""Transformers of laptop size: one with everything that a plan needs, or a small version of a known model.

A small version keeps the structure: kinds of norm, positions, attention and experts, shared key heads, windows, tied
weights, and whether 2, 4 and 8 divide the vocabulary. Only the sizes change.
"""

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, nearest
from shardwise.model.catalogue import CATALOGUE, find_name
from shardwise.nets.hf.catalogue import FAMILIES, family_of
from shardwise.nets.hf.entries import Entries
from shardwise.nets.loss import IGNORED, next_token_loss
from shardwise.nets.settings import Dropout, Heads, Latent, Mixture, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.parity.problem import MakeProblem, Problem
from shardwise.planner.plan import Plan

_WIDTH, _HEAD_DIM, _LENGTH, _MOST_SHARING = 32, 8, 16, 4
#: Odd, as GPT-2's 50,257 is.
_VOCABULARY = 257
_DROPOUT = Dropout(embedding=0.1, attention=0.1, residual=0.1)
#: Frozen parameters: a norm and a matrix of the first layer.
_FROZEN = ("layers.0.mlp_norm.weight", "layers.0.attention.o_proj.weight")
_HELD_OUT = 1000


def default_settings(plan: Plan) -> Settings:
    """Return a small transformer for any plan: tied, with dropout, an odd vocabulary and shared key heads.

    For ep > 1 it has experts, balanced by a loss and by corrections, with a capacity that drops tokens.
    """
    num_experts = max(4, 2 * plan.ep)
    mixture = Mixture(
        num_experts=num_experts, num_chosen=2, width=_WIDTH, num_shared=1, correction=True, capacity=1.1, auxiliary=0.05
    )
    return Settings(
        vocabulary=_VOCABULARY,
        width=_WIDTH,
        num_layers=_num_layers(plan),
        length=64,
        attention=Heads(num_heads=_num_heads(plan, 4), num_kv_heads=2, head_dim=_head_dim(plan)),
        mlp=Mlp(width=2 * _WIDTH),
        mixture=mixture if plan.ep > 1 else None,
        tied=True,
        dropout=_DROPOUT,
    )


def named_settings(name: str, plan: Plan) -> Settings:
    """Return a small version of a model of the catalogue."""
    found = find_name(name)
    if found is None:
        near = nearest(name, (known for known, config in CATALOGUE.items() if config["model_type"] in FAMILIES))
        raise ShardwiseError(
            f"unknown model {name!r}; {len(CATALOGUE)} are known, and those of {', '.join(FAMILIES)} are built here",
            remedy=f"--model {near or 'llama3.1-8b'}",
        )
    config = CATALOGUE[found]
    if config["model_type"] not in FAMILIES:
        raise ShardwiseError(
            f"{found} is a {config['model_type']} model, and those that are built here are {', '.join(FAMILIES)}",
            remedy="--module package.module:factory, with a function that returns the module, a batch and a loss",
        )
    entries = Entries(config, f"the configuration of {found}")
    return shrunk(family_of(entries).read(entries), plan)


def shrunk(settings: Settings, plan: Plan) -> Settings:
    """Return the same structure in small sizes."""
    num_layers = _num_layers(plan)
    windowed = settings.windowed_layers
    mixture = None if settings.mixture is None else _shrunk_mixture(settings.mixture, plan)
    return replace(
        settings,
        vocabulary=256 + settings.vocabulary % 8,
        width=_WIDTH,
        num_layers=num_layers,
        length=64,
        attention=_shrunk_attention(settings.attention, plan),
        mlp=replace(settings.mlp, width=2 * _WIDTH),
        mixture=mixture,
        window=None if settings.window is None else _LENGTH // 2,
        windowed_layers=None if windowed is None else tuple(layer for layer in windowed if layer < num_layers),
        dropout=_DROPOUT,
    )


def _shrunk_attention(attention: Heads | Latent, plan: Plan) -> Heads | Latent:
    if isinstance(attention, Latent):
        return replace(
            attention,
            num_heads=_num_heads(plan, 4),
            q_rank=None if attention.q_rank is None else 16,
            kv_rank=16,
            nope_dim=_head_dim(plan),
            rope_dim=_head_dim(plan),
            value_dim=_head_dim(plan),
        )
    sharing = min(attention.num_heads // attention.num_kv_heads, _MOST_SHARING)
    num_heads = _num_heads(plan, 4 if sharing == 1 else 2 * sharing)
    return replace(attention, num_heads=num_heads, num_kv_heads=num_heads // sharing, head_dim=_head_dim(plan))


def _shrunk_mixture(mixture: Mixture, plan: Plan) -> Mixture:
    num_groups = min(mixture.num_groups, 2)
    return replace(
        mixture,
        num_experts=max(min(mixture.num_experts, 8), 2 * plan.ep),
        num_chosen=min(mixture.num_chosen, 2),
        width=_WIDTH,
        num_groups=num_groups,
        num_chosen_groups=min(mixture.num_chosen_groups, max(1, num_groups - 1)),
        dense_layers=(0,) if mixture.dense_layers else (),
    )


def _num_layers(plan: Plan) -> int:
    """Return as many layers as the plan's stages need."""
    if plan.layers is not None:
        return sum(plan.layers)
    return max(2, plan.num_stages or 2 * plan.pp)


def _head_dim(plan: Plan) -> int:
    """Return the head dim; in fp8 large enough for a layer of 8-bit numbers."""
    return _HEAD_DIM if plan.fp8_scales is None else 2 * _HEAD_DIM


def _num_heads(plan: Plan, least: int) -> int:
    """Return enough heads for every rank of tp, and of those for every rank of an all-to-all over cp."""
    needed = plan.tp * (plan.cp if plan.context == "all-to-all" else 1)
    return -(-max(least, needed) // least) * least


def length_for(plan: Plan) -> int:
    """Return the length of sequences. Under cp and sp it does not divide, so that sequences are padded."""
    if plan.cp > 1:
        return 2 * plan.cp * max(1, _LENGTH // (2 * plan.cp)) - 1
    return _LENGTH - 1 if plan.sp and _LENGTH % plan.tp == 0 else _LENGTH


def problem_of(settings: Settings, plan: Plan, num_steps: int) -> MakeProblem:
    """Return a factory of the module and its batches, the same on every rank."""
    return partial(_make, settings, rows=rows_for(plan), length=length_for(plan), num_steps=num_steps)


def rows_for(plan: Plan) -> int:
    """Return the number of sequences in a batch: at least one for every microbatch of every replica."""
    pieces = plan.dp * plan.microbatches
    return pieces * max(1, 4 // pieces)


def _make(settings: Settings, *, rows: int, length: int, num_steps: int) -> Problem:
    module = Transformer(settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(_first_value(name, parameter, generator))
            parameter.requires_grad_(name not in _FROZEN)
    batches = [batch_of(rows, length, settings.vocabulary, step) for step in range(num_steps)]
    held_out = batch_of(rows, length, settings.vocabulary, _HELD_OUT)
    return Problem(module=module.train(), batches=batches, loss=next_token_loss, held_out=held_out)


def _first_value(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Return values that all matter: matrices keep the scale of activations, norms and biases are not the identity."""
    drawn = torch.randn(like.shape, generator=generator)
    if like.dim() > 1:
        return drawn / math.sqrt(like.shape[-1])
    return 0.1 * drawn if name.endswith("bias") else 1 + 0.1 * drawn


def batch_of(rows: int, length: int, vocabulary: int, seed: int) -> dict[str, Tensor]:
    """Return tokens with more and more ignored labels from row to row, so that replicas have different numbers."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(rows):
        labels[row, : row * length // (2 * rows)] = IGNORED
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}


def describe(settings: Settings) -> str:
    """Describe the sizes in words."""
    heads, mixture = settings.attention, settings.mixture
    shared = f" ({heads.num_kv_heads} of keys)" if isinstance(heads, Heads) else ", latent"
    experts = f", {mixture.num_experts} experts of which {mixture.num_chosen} are chosen" if mixture else ""
    tied = ", tied" if settings.tied else ""
    return (
        f"{settings.num_layers} layers of width {settings.width}, {heads.num_heads} heads{shared}{experts}, vocabulary"
        f" {settings.vocabulary}{tied}"
    )
