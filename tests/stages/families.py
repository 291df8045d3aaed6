"""Small random models of Hugging Face, unmodified: one of each family that we promise to split."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

NUM_LAYERS = 4
SMALL = {"vocab_size": 97, "hidden_size": 32, "num_attention_heads": 4}
GATED = {
    **SMALL,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {**GATED, "num_experts_per_tok": 2, "num_local_experts": 4}


def _gpt2(num_layers: int = NUM_LAYERS) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=97,
        n_embd=32,
        n_layer=num_layers,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return hf.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def _causal(config: Any) -> nn.Module:
    return hf.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def _t5(num_layers: int = NUM_LAYERS) -> nn.Module:
    config = hf.T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=num_layers,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def _bert(num_layers: int = NUM_LAYERS) -> nn.Module:
    config = hf.BertConfig(
        **SMALL,
        num_hidden_layers=num_layers,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.BertForMaskedLM(config)  # type: ignore[no-any-return]


def _vit(num_layers: int = NUM_LAYERS) -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return hf.ViTForImageClassification(config)  # type: ignore[no-any-return]


def _deepseek(num_layers: int = NUM_LAYERS) -> nn.Module:
    return _causal(
        hf.DeepseekV3Config(
            **{**GATED, "num_key_value_heads": 4},
            num_hidden_layers=num_layers,
            moe_intermediate_size=16,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            n_shared_experts=1,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    )


def _dense(make: Any, **settings: Any) -> Callable[..., nn.Module]:
    return lambda num_layers=NUM_LAYERS: _causal(make(**{**settings, "num_hidden_layers": num_layers}))


#: Each makes a model of four layers, or of as many as it is told.
FAMILIES: dict[str, Callable[..., nn.Module]] = {
    "gpt2": _gpt2,
    "llama": _dense(hf.LlamaConfig, **GATED, tie_word_embeddings=True),
    "qwen3": _dense(hf.Qwen3Config, **GATED, head_dim=8, tie_word_embeddings=True),
    "mistral": _dense(hf.MistralConfig, **GATED, sliding_window=6),
    "gemma2": _dense(hf.Gemma2Config, **GATED, head_dim=8, sliding_window=6),
    "phi3": _dense(hf.Phi3Config, **GATED),
    "opt": _dense(hf.OPTConfig, **SMALL, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=32, dropout=0.0),
    "bloom": _dense(hf.BloomConfig, vocab_size=97, hidden_size=32, n_head=4),
    "falcon": _dense(hf.FalconConfig, **SMALL),
    "gpt-neox": _dense(hf.GPTNeoXConfig, **SMALL, intermediate_size=64),
    "mixtral": _dense(hf.MixtralConfig, **MOE),
    "qwen3-moe": _dense(
        hf.Qwen3MoeConfig, **GATED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "deepseek-v3": _deepseek,
    "t5": _t5,
    "bert": _bert,
    "vit": _vit,
}


def recompute(module: Any, **settings: Any) -> None:
    """Let a model recompute its layers by itself, in the words of the transformers that is installed (new in 5.23)."""
    new = getattr(module, "activation_checkpointing_enable", None)
    (new or module.gradient_checkpointing_enable)(settings or None)


def make_family(name: str, seed: int = 0, num_layers: int = NUM_LAYERS) -> nn.Module:
    """A model of the family, in training mode, with weights that depend on the seed."""
    made, drawn = _made(name, seed, num_layers)
    torch.set_rng_state(drawn)
    return copy.deepcopy(made)


@cache
def _made(name: str, seed: int, num_layers: int) -> tuple[nn.Module, Tensor]:
    """A model that others are copied from, in a third of the time, and the state of the generator once it is made."""
    torch.manual_seed(seed)
    return FAMILIES[name](num_layers).train(), torch.get_rng_state()


def make_batch(name: str, num_sequences: int = 2, length: int = 8, seed: int = 1) -> dict[str, Tensor]:
    """A batch for the family. Language models get a mask with padding on the left of the first sequence."""
    generator = torch.Generator().manual_seed(seed)
    if name == "vit":
        return {"pixel_values": torch.randn(num_sequences, 3, 16, 16, generator=generator)}
    tokens = torch.randint(3, 97, (num_sequences, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    batch = {"input_ids": tokens, "attention_mask": mask}
    if name == "t5":
        batch["decoder_input_ids"] = torch.randint(3, 97, (num_sequences, length - 3), generator=generator)
    return batch
