"""A small configuration of every family and of its variations, as Hugging Face's own class makes it."""

from typing import Any

import transformers as hf
from torch import nn

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GATED = {**SMALL, **ENDS, "intermediate_size": 64, "num_key_value_heads": 2}
DRY_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LATENT = {
    **GATED,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
HYBRID = {
    "vocab_size": 97,
    "hidden_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
}
T5 = {
    "vocab_size": 97,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
DRY_BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
OPT = {**SMALL, **ENDS, "ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0}

CONFIGURATIONS: dict[str, Any] = {
    "gpt2": hf.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0, **DRY_GPT2
    ),
    "llama": hf.LlamaConfig(**GATED, tie_word_embeddings=True),
    "llama with biases": hf.LlamaConfig(**GATED, attention_bias=True, mlp_bias=True),
    "mistral": hf.MistralConfig(**GATED, sliding_window=6),
    "qwen2": hf.Qwen2Config(**GATED),
    "qwen3": hf.Qwen3Config(**GATED, head_dim=16),
    "gemma": hf.GemmaConfig(**GATED, head_dim=8),
    "gemma2": hf.Gemma2Config(**GATED, head_dim=8, sliding_window=6),
    "gemma3": hf.Gemma3TextConfig(**{**GATED, "num_hidden_layers": 6}, head_dim=16, sliding_window=6),
    "phi": hf.PhiConfig(**GATED),
    "phi3": hf.Phi3Config(**GATED),
    "nemotron": hf.NemotronConfig(**GATED),
    "falcon 7b": hf.FalconConfig(**SMALL),
    "falcon 40b": hf.FalconConfig(**SMALL, num_kv_heads=2, new_decoder_architecture=True),
    "falcon 11b": hf.FalconConfig(**SMALL, num_kv_heads=2, new_decoder_architecture=True, num_ln_in_parallel_attn=1),
    "falcon rw": hf.FalconConfig(**SMALL, multi_query=False, parallel_attn=False, bias=True, alibi=True),
    "bloom": hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4),
    "opt": hf.OPTConfig(**OPT, word_embed_proj_dim=32),
    "opt 350m": hf.OPTConfig(**OPT, word_embed_proj_dim=16, do_layer_norm_before=False),
    "mpt": hf.MptConfig(vocab_size=97, d_model=32, n_layers=2, n_heads=4, max_seq_len=64),
    "gpt-neox": hf.GPTNeoXConfig(**SMALL, intermediate_size=64),
    "mixtral": hf.MixtralConfig(**GATED, num_local_experts=4, num_experts_per_tok=2),
    "qwen2 moe": hf.Qwen2MoeConfig(
        **GATED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24
    ),
    "qwen3 moe": hf.Qwen3MoeConfig(
        **GATED, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[1]
    ),
    "gpt-oss": hf.GptOssConfig(**GATED, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6),
    "phi moe": hf.PhimoeConfig(
        **GATED, num_local_experts=4, num_experts_per_tok=2, attention_bias=True, lm_head_bias=True
    ),
    "llama4": hf.Llama4TextConfig(
        **{**GATED, "num_hidden_layers": 4},
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        interleave_moe_layer_step=2,
    ),
    "deepseek v2 lite": hf.DeepseekV2Config(**LATENT, n_shared_experts=2, q_lora_rank=None),
    "deepseek v3": hf.DeepseekV3Config(**LATENT, n_shared_experts=1, n_group=2, topk_group=1, q_lora_rank=16),
    "nemotron-h": hf.NemotronHConfig(**HYBRID, hybrid_override_pattern="ME*-"),
    "nemotron 3 super": hf.NemotronHConfig(**HYBRID, hybrid_override_pattern="ME", moe_latent_size=16),
    "t5": hf.T5Config(**T5),
    "t5 v1.1": hf.T5Config(**T5, feed_forward_proj="gated-gelu"),
    "bert": hf.BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=64, **DRY_BERT),
    "vit": hf.ViTConfig(
        **{key: value for key, value in SMALL.items() if key != "vocab_size"},
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
        **DRY_BERT,
    ),
    "resnet 50": hf.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32, 64, 128], num_labels=5),
    "resnet basic": hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[2, 1, 1, 1], layer_type="basic", num_labels=5
    ),
}

_CLASSES = {
    "t5": "T5ForConditionalGeneration",
    "bert": "BertForMaskedLM",
    "vit": "ViTForImageClassification",
    "resnet": "ResNetForImageClassification",
}


def build(configuration: Any) -> nn.Module:
    """The module of a configuration, on whatever device is set."""
    named = _CLASSES.get(configuration.model_type)
    made = hf.AutoModelForCausalLM.from_config(configuration) if named is None else getattr(hf, named)(configuration)
    made.tie_weights()
    return made  # type: ignore[no-any-return]
