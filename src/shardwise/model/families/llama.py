"""Dense decoders after Llama: Llama 1 to 3, Mistral, Qwen 2 and 3, Gemma 1 to 3, Phi 3, Nemotron."""

from collections.abc import Callable
from dataclasses import replace

from shardwise.model.families.fields import Fields
from shardwise.model.families.rotary import ATTENTION, attention_of, decoder, fed_by, mlp_of, same, sliding
from shardwise.model.model import Model
from shardwise.model.shape import NormShape


def llama(fields: Fields, name: str) -> Model:
    """Llama 1 to 3, and what copies it (InternLM with its biases)."""
    bias = fields.flag("attention_bias") or fields.flag("bias")
    return decoder(fields, name, attend=same(attention_of(fields, qkv_bias=bias, out_bias=bias)))


def mistral(fields: Fields, name: str) -> Model:
    """Mistral: a window in every layer, where `sliding_window` gives one."""
    return decoder(fields, name, attend=sliding(fields, attention_of(fields), lambda _: True))


def qwen2(fields: Fields, name: str) -> Model:
    """Qwen 2 and 2.5: biases on queries, keys and values only."""
    shape = attention_of(fields, qkv_bias=True)
    return decoder(fields, name, attend=sliding(fields, shape, late_window(fields)))


def qwen3(fields: Fields, name: str) -> Model:
    """Qwen 3: norms on queries and keys, by head."""
    bias = fields.flag("attention_bias")
    shape = replace(attention_of(fields, qkv_bias=bias, out_bias=bias), qk_norm="head")
    return decoder(fields, name, attend=sliding(fields, shape, late_window(fields)))


def late_window(fields: Fields) -> Callable[[int], bool]:
    """Qwen slides its window from layer `max_window_layers` on, if `use_sliding_window`."""
    first = fields.count("max_window_layers", default=28)
    slides = fields.flag("use_sliding_window")
    return lambda index: slides and index >= first


def gemma(fields: Fields, name: str) -> Model:
    """Gemma 1: a head that is not hidden / heads wide, and the table for both ends."""
    bias = fields.flag("attention_bias")
    shape = attention_of(fields, qkv_bias=bias, out_bias=bias)
    return decoder(fields, name, attend=same(shape), tied=True)


def gemma2(fields: Fields, name: str) -> Model:
    """Gemma 2: every other layer slides a window, and each sublayer is normalised twice."""
    attend = sliding(fields, attention_of(fields), lambda index: index % 2 == 0)
    return decoder(fields, name, attend=attend, tied=True, post_norms=True)


def gemma3(fields: Fields, name: str) -> Model:
    """Gemma 3: five layers with a window, one without; norms on queries and keys."""
    every = fields.count("sliding_window_pattern", default=6)
    shape = replace(attention_of(fields), qk_norm="head")
    attend = sliding(fields, shape, lambda index: (index + 1) % every != 0)
    return decoder(fields, name, attend=attend, tied=True, post_norms=True)


def phi3(fields: Fields, name: str) -> Model:
    """Phi 3 and 4: fused projections."""
    shape = replace(attention_of(fields), names={**ATTENTION, "qkv": "self_attn.qkv_proj"})
    names = {"gate_up": "mlp.gate_up_proj", "down": "mlp.down_proj"}
    attend = sliding(fields, shape, lambda _: True)
    return decoder(fields, name, attend=attend, feed=fed_by(mlp_of(fields, names=names)))


def nemotron(fields: Fields, name: str) -> Model:
    """Nemotron 4 and Minitron: layer norm with a bias, squared ReLU without a gate."""
    bias = fields.flag("attention_bias")
    shape = attention_of(fields, qkv_bias=bias, out_bias=bias)
    norm = NormShape(kind="layer", bias=True)
    return decoder(fields, name, attend=same(shape), feed=fed_by(mlp_of(fields, gated=False)), norm=norm)
