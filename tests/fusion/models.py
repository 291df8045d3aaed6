"""Small unmodified models of Hugging Face, a batch for them, and losses as users write them."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

WORDS = 29
SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_hidden_layers": 2, "num_key_value_heads": 2,
}  # fmt: skip
_PLAIN = {key: each for key, each in SMALL.items() if key != "num_key_value_heads"}

CONFIGS: dict[str, Any] = {
    "llama": lambda: hf.LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": lambda: hf.Qwen2Config(**SMALL),
    "qwen3": lambda: hf.Qwen3Config(**SMALL, head_dim=4),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=4),
    "gemma": lambda: hf.GemmaConfig(**SMALL, head_dim=4),
    "gemma2": lambda: hf.Gemma2Config(**SMALL, head_dim=4, sliding_window=4),
    "gemma3": lambda: hf.Gemma3TextConfig(**SMALL, head_dim=4, sliding_window=4),
    "phi3": lambda: hf.Phi3Config(**SMALL),
    "olmo2": lambda: hf.Olmo2Config(**SMALL),
    "granite": lambda: hf.GraniteConfig(**SMALL, logits_scaling=6.0),
    "stablelm": lambda: hf.StableLmConfig(**SMALL),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_PLAIN),
    "gpt2": lambda: hf.GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=4, n_positions=16, **{
        f"{each}_pdrop": 0.0 for each in ("resid", "embd", "attn")
    }),
    "mixtral": lambda: hf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **SMALL, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8
    ),
}  # fmt: skip


def make(name: str) -> nn.Module:
    """A model of two layers in which no norm is as it was made."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        module: nn.Module = hf.AutoModelForCausalLM.from_config(CONFIGS[name]())
        with torch.no_grad():
            for each in module.parameters():
                each.add_(torch.randn_like(each) * 0.1)
    return module.to(torch.get_default_device())


def make_batch() -> dict[str, Tensor]:
    generator = torch.Generator("cpu").manual_seed(5)
    ids = torch.randint(3, WORDS, (2, 6), generator=generator, device="cpu").to(torch.get_default_device())
    labels = ids.clone()
    labels[0, :2] = -100
    return {"input_ids": ids, "labels": labels}


def own_loss(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The next token's, as a user writes it."""
    labels = batch["labels"][:, 1:]
    scores = output.logits[:, :-1].reshape(-1, WORDS).float()
    return cross_entropy(scores, labels.reshape(-1), reduction="sum"), (labels != -100).sum()


def aligned_loss(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Of labels that lie at their tokens, as where sequences are cut."""
    labels = batch["labels"]
    return cross_entropy(output.logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def model_loss(output: Any, _: Any) -> Tensor:
    """That of the model, which was given labels."""
    loss: Tensor = output.loss
    return loss
