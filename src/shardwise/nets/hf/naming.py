"""Map our names of weights to those of Hugging Face folders.

    ours                                 Llama, Qwen, Mistral, DeepSeek                      GPT-2
    embed.weight                         model.embed_tokens.weight                           transformer.wte.weight
    layers.0.attention_norm.weight       model.layers.0.input_layernorm.weight               transformer.h.0.ln_1.weight
    layers.0.attention.q_proj.weight     model.layers.0.self_attn.q_proj.weight              ... attn.c_attn.weight (1)
    layers.0.mlp.up_proj.weight          model.layers.0.mlp.up_proj.weight                   ... mlp.c_fc.weight (2)
    layers.0.mlp.experts.up_proj         model.layers.0.mlp.experts.0.up_proj.weight, ... (3)
    norm.weight                          model.norm.weight                                   transformer.ln_f.weight
    head.weight                          lm_head.weight

(1) Queries, keys and values side by side, transposed. (2) Transposed. (3) Each expert's [out, in] is one layer of ours,
transposed; Mixtral calls them `block_sparse_moe.experts.0.w3.weight`. Since version 5 of transformers a folder may also
hold all experts of a layer in one tensor, gates and ups together: `mlp.experts.gate_up_proj`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardwise.nets.hf.pieces import Piece, transposed, whole

LLAMA = {
    "embed": "embed_tokens",
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_a_norm": "q_a_layernorm",
    "kv_a_proj": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm",
    "router": "gate",
    "correction": "e_score_correction_bias",
    "shared": "shared_experts",
}
MIXTRAL = {**LLAMA, "mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
GPT2 = {
    "embed": "wte",
    "positions": "wpe",
    "layers": "h",
    "attention": "attn",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "norm": "ln_f",
    "o_proj": "c_proj",
    "up_proj": "c_fc",
    "down_proj": "c_proj",
}
_FUSED = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """The naming of one folder: what each part of a dotted name is called there."""

    parts: Mapping[str, str]
    prefix: str = "model."
    #: All experts of a layer are in one tensor.
    is_stacked: bool = False
    #: Matrices are [in, out], and queries, keys and values are one tensor.
    is_gpt2: bool = False

    def pieces(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        """Return where a weight of ours is in the folder's tensors."""
        if ".experts." in name:
            return self._of_experts(name, shape)
        owner, kind = name.split(".")[-2:]
        if self.is_gpt2 and owner in _FUSED:
            # Every head of GPT-2 has its own keys and values, so the three parts have equal widths.
            fused = self.translate(name.replace(owner, "c_attn"))
            column = _FUSED.index(owner) * shape[0]
            if kind == "bias":
                return (Piece(tensor=fused, start=(0,), size=shape, dims=(0,), offset=(column,)),)
            return (transposed(fused, shape, column),)
        if self.is_gpt2 and owner.endswith("_proj") and kind == "weight":
            return (transposed(self.translate(name), shape),)
        return (whole(self.translate(name), shape),)

    def translate(self, name: str) -> str:
        if name == "head.weight":
            return "lm_head.weight"
        return self.prefix + ".".join(self.parts.get(part, part) for part in name.split("."))

    def _of_experts(self, name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        place, _, kind = name.rpartition(".")
        if self.is_stacked:
            stacked = "down_proj" if kind == "down_proj" else "gate_up_proj"
            row = shape[2] if kind == "up_proj" else 0
            tensor = f"{self.translate(place)}.{stacked}"
            return (Piece(tensor=tensor, start=(0, 0, 0), size=shape, dims=(0, 2, 1), offset=(0, row, 0)),)
        return tuple(
            Piece(
                tensor=f"{self.translate(f'{place}.{expert}.{kind}')}.weight",
                start=(expert, 0, 0),
                size=(1, *shape[1:]),
                dims=(2, 1),
                offset=(0, 0),
            )
            for expert in range(shape[0])
        )


def llama_naming(names: Collection[str]) -> Naming:
    """Return the naming of a Llama-like folder with these tensors: experts of a layer stacked, or one tensor each."""
    return Naming(parts=LLAMA, is_stacked=any(name.endswith(".experts.gate_up_proj") for name in names))
