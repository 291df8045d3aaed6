"""Mixtral and Qwen3-MoE: the dense families with experts."""

from collections.abc import Collection
from typing import Any

from shardwise.nets.hf.dense import find_window, has_qkv_bias, read_gated, write_gated
from shardwise.nets.hf.entries import Entries
from shardwise.nets.hf.family import Family
from shardwise.nets.hf.naming import LLAMA, MIXTRAL, Naming
from shardwise.nets.settings import Mixture, Settings


def auxiliary_of(entries: Entries) -> float:
    """The weight of the balancing loss: only with `output_router_logits` do these models have one."""
    asked = entries.flag("output_router_logits", False)
    return entries.number("router_aux_loss_coef", 0.001) if asked else 0.0


def write_auxiliary(mixture: Mixture) -> dict[str, Any]:
    if not mixture.auxiliary:
        return {}
    return {"output_router_logits": True, "router_aux_loss_coef": mixture.auxiliary}


def is_stacked(names: Collection[str]) -> bool:
    """Whether a folder has all experts of a layer in one tensor."""
    return any(name.endswith(".experts.gate_up_proj") for name in names)


def experts_naming(names: Collection[str]) -> Naming:
    return Naming(parts=LLAMA, is_stacked=is_stacked(names))


def _mixtral_naming(names: Collection[str]) -> Naming:
    return Naming(parts=LLAMA, is_stacked=True) if is_stacked(names) else Naming(parts=MIXTRAL)


def _read_mixtral(entries: Entries) -> Settings:
    mixture = Mixture(
        num_experts=entries.integer("num_local_experts", 8),
        num_chosen=entries.integer("num_experts_per_tok", 2),
        width=entries.integer("intermediate_size"),
        auxiliary=auxiliary_of(entries),
    )
    return read_gated(entries, window=find_window(entries), mixture=mixture, theta=1e6, norm_epsilon=1e-5)


def _write_mixtral(settings: Settings) -> dict[str, Any] | None:
    config, mixture = write_gated(settings), settings.mixture
    if config is None or mixture is None:
        return None
    return {
        **config,
        "sliding_window": settings.window,
        "num_local_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.num_chosen,
        **write_auxiliary(mixture),
    }


def _read_qwen3_moe(entries: Entries) -> Settings:
    bias = entries.flag("attention_bias", False)
    mixture = Mixture(
        # The second is what transformers has called it since version 5.
        num_experts=entries.integer("num_experts", entries.integer("num_local_experts", 128)),
        num_chosen=entries.integer("num_experts_per_tok", 8),
        width=entries.integer("moe_intermediate_size"),
        normalised=entries.flag("norm_topk_prob", False),
        auxiliary=auxiliary_of(entries),
        dense_layers=_dense_layers(entries),
    )
    window = find_window(entries) if entries.flag("use_sliding_window", False) else None
    return read_gated(entries, qkv_bias=bias, output_bias=bias, qk_norm=True, window=window, mixture=mixture)


def _dense_layers(entries: Entries) -> tuple[int, ...]:
    """Those that are named, and all but every `decoder_sparse_step`-th."""
    named, step = entries.find("mlp_only_layers") or [], entries.integer("decoder_sparse_step", 1)
    layers = range(entries.integer("num_hidden_layers"))
    return tuple(layer for layer in layers if layer in named or (layer + 1) % step)


def _write_qwen3_moe(settings: Settings) -> dict[str, Any] | None:
    config, mixture = write_gated(settings), settings.mixture
    if config is None or mixture is None:
        return None
    return {
        **config,
        "attention_bias": has_qkv_bias(settings),
        "use_sliding_window": settings.window is not None,
        "sliding_window": settings.window,
        "num_experts": mixture.num_experts,
        "num_experts_per_tok": mixture.num_chosen,
        "moe_intermediate_size": mixture.width,
        "norm_topk_prob": mixture.normalised,
        "mlp_only_layers": list(mixture.dense_layers),
        **write_auxiliary(mixture),
    }


MIXTRAL_FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    read=_read_mixtral,
    write=_write_mixtral,
    naming=_mixtral_naming,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
    naming=experts_naming,
)
