"""Read a GGUF file into a transformer of ours: dequantised weights, and the shape from the file's metadata.

The supported architectures are those whose tensors map to a model of `nets/` name by name. Llama's queries and keys are
stored there with the two elements of a rotary pair adjacent, which our rotation supports directly.
"""

from pathlib import Path
from typing import Any

import torch

from shardwise.errors import ShardwiseError
from shardwise.nets.settings import Heads, Mlp, Rope, Settings
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
    for name in weights_of(model):
        theirs = to_theirs(name)
        if theirs not in tensors:
            raise ShardwiseError(f"{path} has no tensor {theirs}", remedy="a whole file: download it again")
        held = tensors[theirs]
        numbers = torch.from_numpy(gguf.dequantize(held.data, held.tensor_type).copy())
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

    if _find(reader, f"{kind}.rope.scaling.type") not in (None, "none"):
        raise ShardwiseError(f"{path} has scaled positions, which are not supported", remedy="its Hugging Face folder")
    width, num_heads = int(entry("embedding_length")), int(entry("attention.head_count"))
    return Settings(
        vocabulary=int(tensors["token_embd.weight"].shape[1]),
        width=width,
        num_layers=int(entry("block_count")),
        length=int(entry("context_length")),
        attention=Heads(
            num_heads=num_heads,
            num_kv_heads=int(entry("attention.head_count_kv", num_heads)),
            head_dim=int(entry("attention.key_length", width // num_heads)),
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
        ),
        mlp=Mlp(width=int(entry("feed_forward_length"))),
        rope=Rope(theta=float(entry("rope.freq_base", 10000.0)), interleaved=_INTERLEAVED[kind]),
        norm_epsilon=float(entry("attention.layer_norm_rms_epsilon", 1e-6)),
        tied="output.weight" not in tensors,
    )


def _find(reader: Any, key: str) -> Any:
    found = reader.get_field(key)
    return None if found is None else found.contents()
