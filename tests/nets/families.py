"""Small random models of transformers, unmodified: one of each family and of each of its turns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

VOCABULARY = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
}
LATENT: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}


def _gpt2(**changed: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
    dry = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": None}
    return hf.GPT2Config(**sizes, **dry, **changed)


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "llama, tied": lambda: hf.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama, biases": lambda: hf.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, head_dim=16),
    "llama, linear": lambda: hf.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 50.0, "factor": 2.5}
    ),
    "qwen2": lambda: hf.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2, windows": lambda: hf.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=2, rope_parameters=YARN
    ),
    "qwen3": lambda: hf.Qwen3Config(**SMALL, head_dim=16),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(
        **SMALL,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        mlp_only_layers=[2],
    ),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=6),
    "mixtral": lambda: hf.MixtralConfig(**SMALL, num_local_experts=4, sliding_window=None),
    "deepseek-v2": lambda: hf.DeepseekV2Config(
        **LATENT, q_lora_rank=None, topk_method="group_limited_greedy", routed_scaling_factor=1.5, rope_parameters=YARN
    ),
    "deepseek-v3": lambda: hf.DeepseekV3Config(**LATENT, q_lora_rank=12, rope_parameters=YARN),
    "deepseek-v3, halves": lambda: hf.DeepseekV3Config(
        **LATENT, q_lora_rank=12, rope_interleave=False, attention_bias=True
    ),
    "gpt2": _gpt2,
    "gpt2, untied": lambda: _gpt2(tie_word_embeddings=False, activation_function="gelu", n_inner=40),
}


def make_theirs(name: str, seed: int = 0) -> nn.Module:
    """A model of transformers whose every weight matters: norms, biases and corrections are drawn too."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for key, each in [*model.named_parameters(), *model.named_buffers()]:
            if each.dim() == 1 and "inv_freq" not in key:
                each.add_(0.1 * torch.randn(each.shape))
            elif each.dim() > 1:
                each.mul_(4.0)  # From 0.02: attention should prefer some tokens, and routers some experts.
    return model  # type: ignore[no-any-return]


def save_theirs(name: str, folder: Path, seed: int = 0, **how: Any) -> nn.Module:
    model = make_theirs(name, seed)
    model.save_pretrained(folder, **how)  # type: ignore[operator]
    return model


def tokens(num_sequences: int = 2, length: int = 12, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (num_sequences, length), generator=generator)
