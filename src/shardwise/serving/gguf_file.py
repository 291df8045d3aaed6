"""Read a GGUF file into a transformer of ours: dequantised weights, and the shape from the file's metadata.

The supported architectures are those whose tensors map to a model of `nets/` name by name. Llama's queries and keys are
stored there with the two elements of a rotary pair adjacent, which our rotation supports directly.
"""

from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ShardwiseError, some
from shardwise.nets.settings import Divided, Heads, Mlp, Rope, Settings
from shardwise.nets.transformer import Transformer
from shardwise.nets.weights import place, weights_of
from shardwise.serving.assemble import Identity
from shardwise.serving.text.gguf_tokenizer import open_gguf

#: Supported architectures, and whether rotary pairs are adjacent.
_INTERLEAVED = {"llama": True, "qwen2": False, "qwen3": False}
#: Parts of our parameter names, and theirs.
_PARTS = {
    "embed": "token_embd", "norm": "output_norm", "head": "output", "layers": "blk", "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}  # fmt: skip
#: Tokens that end a text: of the text, of a turn, and of a message.
_ENDS = ("eos", "eot", "eom")
#: A tensor that is no weight.
_DIVISORS = "rope_freqs.weight"
#: Modules that their names leave out.
_LEFT_OUT = ("attention", "mlp")


@torch.no_grad()
def read_gguf(path: Path, dtype: torch.dtype | None, device: torch.device) -> Transformer:
    """Read the model of a file with its weights."""
    reader = open_gguf(path)
    import gguf  # The reader's package, so it is there.

    tensors = {each.name: each for each in reader.tensors}
    settings = settings_from(reader, tensors, path)
    with torch.device("meta"):
        model = Transformer(settings)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype or torch.float32)
    held = {name: to_theirs(name) for name in weights_of(model)}
    _check(path, tensors, held)
    for name, weight in weights_of(model).items():
        part = tensors[held[name]]
        numbers = torch.from_numpy(gguf.dequantize(part.data, part.tensor_type).copy())
        if numbers.shape != weight.shape:
            raise ShardwiseError(
                f"{held[name]} in {path} is {list(numbers.shape)}, and by the file's entries it would be"
                f" {list(weight.shape)}", remedy="the model's Hugging Face folder",
            )  # fmt: skip
        place(model, name, device=device).copy_(numbers)
    if model.rotary is not None:
        model.rotary.to(device)
    return model.eval()


def identify_gguf(path: Path) -> Identity:
    """Return the identity of a file's model."""
    reader = open_gguf(path)
    found = [_find(reader, f"tokenizer.ggml.{kind}_token_id") for kind in _ENDS]
    return Identity(
        name=path.stem,
        fingerprint=f"{path.stat().st_size}-{path.stat().st_mtime_ns}",
        tokenizer_source=str(path),
        eos_token_ids=frozenset(int(end) for end in found if end is not None),
    )


def _check(path: Path, tensors: dict[str, Any], held: dict[str, str]) -> None:
    """Refuse a file that lacks a tensor, or has one that would be left out of what is computed."""
    missing = [theirs for theirs in held.values() if theirs not in tensors]
    if missing:
        raise ShardwiseError(f"{path} lacks {some(missing)}", remedy="a whole file: download it again")
    extra = sorted(set(tensors) - set(held.values()) - {_DIVISORS})
    if extra:
        raise ShardwiseError(
            f"{path} has tensors that are not read: {some(extra)}", remedy="the model's Hugging Face folder"
        )


def to_theirs(name: str) -> str:
    return ".".join(_PARTS.get(part, part) for part in name.split(".") if part not in _LEFT_OUT)


def settings_from(reader: Any, tensors: dict[str, Any], path: Path) -> Settings:
    """Return the shape of a file's model."""
    kind = _find(reader, "general.architecture")
    if kind not in _INTERLEAVED:
        raise ShardwiseError(
            f"{path} is of the architecture {kind}, and {', '.join(_INTERLEAVED)} are read",
            remedy="the model's Hugging Face folder",
        )

    def entry(key: str, default: Any = None) -> Any:
        found = _find(reader, f"{kind}.{key}")
        if found is None and default is None:
            raise ShardwiseError(f"{path} has no entry {kind}.{key}", remedy="a whole file: download it again")
        return default if found is None else found

    if "token_embd.weight" not in tensors:
        raise ShardwiseError(f"{path} lacks token_embd.weight", remedy="the file of a whole language model")
    width, num_heads = entry("embedding_length"), entry("attention.head_count")
    if not isinstance(num_heads, int) or not isinstance(entry("attention.head_count_kv", num_heads), int):
        raise ShardwiseError(f"the layers of {path} differ in their heads", remedy="its Hugging Face folder")
    head_dim = int(entry("attention.key_length", width // num_heads))
    computed: dict[str, Any] = {
        "rope.scaling.type": "none", "rope.scale_linear": 1.0, "rope.dimension_count": head_dim, "expert_count": 0,
        "attention.value_length": head_dim, "attention.causal": True,
    }  # fmt: skip
    for key, allowed in computed.items():
        if (said := entry(key, allowed)) != allowed:
            raise ShardwiseError(
                f"{path} has {kind}.{key}={said}, and only {allowed} is computed here",
                remedy="its Hugging Face folder",
            )
    window = int(entry("attention.sliding_window", 0)) or None
    return Settings(
        vocabulary=int(tensors["token_embd.weight"].shape[1]),
        width=width,
        num_layers=int(entry("block_count")),
        length=int(entry("context_length")),
        attention=Heads(
            num_heads=num_heads,
            num_kv_heads=int(entry("attention.head_count_kv", num_heads)),
            head_dim=head_dim,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
        ),
        mlp=Mlp(width=int(entry("feed_forward_length"))),
        rope=Rope(
            theta=float(entry("rope.freq_base", 10000.0)),
            scaling=_divisors(tensors.get(_DIVISORS)),
            interleaved=_INTERLEAVED[kind],
        ),
        window=window,
        norm_epsilon=float(entry("attention.layer_norm_rms_epsilon", 1e-6)),
        tied="output.weight" not in tensors,
    )


def _divisors(tensor: Any) -> Divided | None:
    """Return the divisors of frequencies, in which such files have the scaling of Llama 3.1 and later."""
    return None if tensor is None else Divided(by=tuple(float(each) for each in tensor.data))


def _find(reader: Any, key: str) -> Any:
    found = reader.get_field(key)
    return None if found is None else found.contents()
