"""Attention of Hugging Face models, through their registry of attention functions.

A model asks the registry to make its masks from a rule over positions: causal, within a window, of one document. We
read the rule and return a one-element tensor that carries it to the attention function. No dense mask is made.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.sharding.context.attention_calls import Attend
from shardwise.sharding.context.mask import Mask


def models_in(module: nn.Module) -> list[nn.Module]:
    """Return the Hugging Face models in a module, the module itself and nested ones included."""
    return [each for each in module.modules() if hasattr(type(each), "_supports_attention_backend")]


def check_model(model: nn.Module) -> None:
    """Refuse a model that bypasses the registry, is an encoder-decoder, or does its own gradient checkpointing."""
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise ShardwiseError(
            f"{name} computes attention itself, not through transformers' registry of attention functions",
            remedy="cp=1 for it",
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ShardwiseError(
            f"{name} has an encoder and a decoder, and attention between two sequences is not cut", remedy="cp=1 for it"
        )
    if any(getattr(each, "gradient_checkpointing", False) for each in model.modules()):
        word = "activation" if hasattr(model, "activation_checkpointing_disable") else "gradient"
        raise ShardwiseError(
            f"{name} recomputes its forwards itself, not in step with the other ranks",
            remedy=f"model.{word}_checkpointing_disable(), and recompute=full in the plan",
        )


def counts_positions_itself(module: nn.Module) -> bool:
    """Whether a model derives positions from the tokens, like RoBERTa, rather than count them from 0."""
    return any(hasattr(each, "create_position_ids_from_input_ids") for each in module.modules())


def install(module: nn.Module, name: str, attend: Attend) -> Callable[[], None]:
    """Register `attend` under a name, make all models in a module use it, and return a function that undoes this."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, _function(attend))
    AttentionMaskInterface.register(name, _mask)
    # A layer may have its own configuration: tensor parallelism gives it one with fewer heads.
    found = [getattr(each, "config", None) for each in module.modules()]
    configs: list[Any] = list({id(each): each for each in found if hasattr(each, "_attn_implementation")}.values())
    before = [(config, config._attn_implementation) for config in configs]
    for config in configs:
        config._attn_implementation = name

    def undo() -> None:
        for config, implementation in before:
            config._attn_implementation = implementation

    return undo


def _function(attend: Attend) -> Callable[..., tuple[Tensor, None]]:
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        for word in ("position_bias", "s_aux"):
            if others.get(word) is not None:
                raise ShardwiseError(
                    f"{type(module).__name__} changes its logits by {word}, which cp does not do", remedy="cp=1 for it"
                )
        mask = getattr(attention_mask, "rule", None)
        if attention_mask is None:
            mask = Mask(causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal))
        if mask is None:
            raise ShardwiseError(
                f"{type(module).__name__} has a mask of its own, which is of this rank's tokens alone",
                remedy="attention_mask as [batch, tokens], or documents, in the batch; else cp=1",
            )
        return attend(query, key, value, mask, scaling, softcap, dropout).transpose(1, 2).contiguous(), None

    return attention


def _mask(*, mask_function: Callable[..., Any], device: torch.device | str = "cpu", **_: Any) -> Tensor:
    """Return a one-element tensor in place of a mask. Its attribute `rule` carries the rule."""
    bearer = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    bearer.rule = _mask_of(mask_function)  # type: ignore[attr-defined]
    return bearer


def _mask_of(rule: Callable[..., Any]) -> Mask:
    """Read a rule: a conjunction of functions of positions, each recognised by its name in transformers."""
    causal, window = False, None
    for part in _parts(rule):
        name = part.__qualname__.split(".")[0]
        if name == "causal_mask_function":
            causal = True
        elif name == "sliding_window_overlay":
            window = _held(part)["sliding_window"]
        elif name == "sliding_window_bidirectional_overlay":
            window = _held(part)["sliding_window"] + 1  # Its window includes the furthest key; ours is exclusive.
        elif name not in ("bidirectional_mask_function", "packed_sequence_mask_function"):
            raise ShardwiseError(
                f"the model masks by {name}, which cp does not know; it knows causal masks, windows, padding and"
                " documents",
                remedy="cp=1 for it",
            )
    return Mask(causal=causal, window=window, documents=True, padding=True)


def _parts(rule: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the functions that make up a rule. Packing is known from the whole batch instead."""
    name = rule.__qualname__.split(".")[0]
    if name == "and_masks":
        return [part for each in _held(rule)["mask_functions"] for part in _parts(each)]
    if name == "remap_positions_for_packed_sequence":  # Counts from the start of a document, as we do.
        return _parts(_held(rule)["mask_function"])
    return [rule]


def _held(function: Callable[..., Any]) -> dict[str, Any]:
    return dict(inspect.getclosurevars(function).nonlocals)
