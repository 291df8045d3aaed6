"""Nemotron-H and Nemotron 3: layers of one mixer each, most of them Mamba 2 or experts, few of them attention."""

from shardwise.errors import ShardwiseError
from shardwise.model.assembly.transformer import transformer
from shardwise.model.families.fields import Fields
from shardwise.model.model import Model
from shardwise.model.shape import (
    AttentionShape,
    EmbeddingShape,
    ExpertsShape,
    HeadShape,
    LayerShape,
    MambaShape,
    Mixer,
    MlpShape,
    Sublayer,
)

# The letters of `hybrid_override_pattern`, and the words that newer configurations write in `layers_block_type`.
_KINDS = {
    "M": "mamba",
    "E": "moe",
    "*": "attention",
    "-": "mlp",
    "linear_attention": "mamba",
    "full_attention": "attention",
    **{word: word for word in ("mamba", "moe", "attention", "mlp")},
}


def nemotron_h(fields: Fields, name: str) -> Model:
    """Return a layer for each letter of the pattern: norm, one mixer, residual."""
    hidden = fields.count("hidden_size")
    pattern = fields.items("layers_block_type") or list(fields.text("hybrid_override_pattern", ""))
    strange = [letter for letter in pattern if letter not in _KINDS]
    if strange or not pattern:
        raise ShardwiseError(
            f"{fields.source} has no hybrid_override_pattern of M (mamba), E (experts), * (attention) and - (mlp)"
            + (f", but {strange[0]!r} in it" if strange else ""),
            remedy='"hybrid_override_pattern": "MEM*E"',
        )
    made: dict[str, LayerShape] = {}
    for letter in pattern:
        kind = _KINDS[letter]
        if kind not in made:
            sublayer = Sublayer(mixer=_mixer(fields, kind, hidden), norm="norm")
            made[kind] = LayerShape(kind=kind, stack="model.layers", sublayers=(sublayer,))
    head = HeadShape(norm="model.norm_f", tied=fields.flag("tie_word_embeddings"))
    return transformer(
        name,
        "nemotron_h",
        hidden,
        fields.count("vocab_size"),
        layers=tuple(made[_KINDS[letter]] for letter in pattern),
        ends=(EmbeddingShape(tokens="model.embeddings"), head),
        max_sequence=fields.find_count("max_position_embeddings"),
    )


def _mixer(fields: Fields, kind: str, hidden: int) -> Mixer:
    match kind:
        case "mamba":
            return _mamba(fields)
        case "moe":
            return _experts(fields)
        case "attention":
            return _attention(fields, hidden)
        case _:
            return _mlp(fields, "mixer", fields.count("intermediate_size"))


def _attention(fields: Fields, hidden: int) -> AttentionShape:
    heads = fields.heads(hidden)
    bias = fields.flag("attention_bias")
    return AttentionShape(
        names={part: f"mixer.{part}_proj" for part in "qkvo"},
        heads=heads,
        kv_heads=fields.count("num_key_value_heads", default=heads),
        head_dim=fields.count("head_dim", default=hidden // heads),
        qkv_bias=bias,
        out_bias=bias,
        rotary=False,
    )


def _mlp(fields: Fields, below: str, width: int) -> MlpShape:
    names = {"up": f"{below}.up_proj", "down": f"{below}.down_proj"}
    return MlpShape(names=names, width=width, gated=False, bias=fields.flag("mlp_bias"))


def _experts(fields: Fields) -> ExpertsShape:
    width = fields.count("moe_shared_expert_intermediate_size", default=7688)
    return ExpertsShape(
        names={
            "router": "mixer.gate",
            "expert_up": "mixer.experts.up_proj",
            "expert_down": "mixer.experts.down_proj",
            "latent_down": "mixer.fc1_latent_proj",
            "latent_up": "mixer.fc2_latent_proj",
        },
        num_experts=fields.count("n_routed_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=fields.count("moe_intermediate_size"),
        gated=False,
        shared=_mlp(fields, "mixer.shared_experts", width),
        latent=fields.find_count("moe_latent_size") or 0,
    )


def _mamba(fields: Fields) -> MambaShape:
    names = {part: f"mixer.{part}" for part in ("dt_bias", "A_log", "D", "norm")}
    return MambaShape(
        names={**names, "convolution": "mixer.conv1d", "in": "mixer.in_proj", "out": "mixer.out_proj"},
        heads=fields.count("mamba_num_heads"),
        head_dim=fields.count("mamba_head_dim"),
        groups=fields.count("n_groups", "mamba_n_groups", default=8),
        state=fields.count("ssm_state_size", default=128),
        convolution=fields.count("conv_kernel", "mamba_d_conv", default=4),
        convolution_bias=fields.flag("use_conv_bias", True),
        chunk=fields.count("chunk_size", "mamba_chunk_size", default=128),
        bias=fields.flag("use_bias"),
    )
