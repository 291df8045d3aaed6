"""Small models with experts, ours and those of transformers, unmodified; and a batch with labels missing."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from shardwise.nets.settings import Mixture
from shardwise.nets.transformer import Transformer
from tests.nets import families
from tests.nets.small import LATENT, small

IGNORED = -100
MIXTRAL = Mixture(num_experts=8, num_chosen=2, width=16, auxiliary=0.05)
DEEPSEEK = Mixture(
    num_experts=8,
    num_chosen=3,
    width=16,
    num_shared=2,
    scores="sigmoid",
    correction=True,
    num_groups=4,
    num_chosen_groups=2,
    scale=1.5,
    dense_layers=(0,),
    auxiliary=0.05,
)
QWEN2: dict[str, Any] = {
    **families.SMALL,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}
GPT_OSS: dict[str, Any] = {
    **families.SMALL,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
}


def _ours(mixture: Mixture, **changed: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(small(mixture=mixture, num_layers=2, **changed))
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.mul_(4.0) if each.dim() > 1 and "embed" not in name else each.add_(0.1 * torch.randn(each.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("correction"):
                buffer.add_(0.02 * torch.randn(buffer.shape))
    return model.train()


def _drawn(config: Any) -> nn.Module:
    """Biases of experts are made by nobody: these have numbers of their own."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for each in model.parameters():
            each.copy_(0.2 * torch.randn(each.shape) + (each.dim() == 1))
    return model  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ours like mixtral": lambda: _ours(MIXTRAL),
    "ours like deepseek": lambda: _ours(DEEPSEEK, attention=LATENT),
    "mixtral": lambda: families.make_theirs("mixtral"),
    "qwen3-moe": lambda: families.make_theirs("qwen3-moe"),
    "deepseek-v2": lambda: families.make_theirs("deepseek-v2"),
    "deepseek-v3": lambda: families.make_theirs("deepseek-v3"),
    "qwen2-moe": lambda: _drawn(hf.Qwen2MoeConfig(**QWEN2)),
    "gpt-oss": lambda: _drawn(hf.GptOssConfig(**GPT_OSS)),
}


class ListOfExperts(nn.Module):
    """Experts as modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))


def _with_balancing_loss() -> nn.Module:
    model = families.make_theirs("mixtral")
    model.config.output_router_logits = True  # type: ignore[union-attr]
    return model


#: Models that cannot be shared out, for one reason or another.
UNFIT: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 3),
    "list of experts": ListOfExperts,
    "one expert": lambda: _ours(Mixture(num_experts=1, num_chosen=1, width=16)),
    "mixtral with a balancing loss": _with_balancing_loss,
    "mixtral": lambda: families.make_theirs("mixtral"),
}


def make_model(name: str) -> nn.Module:
    return MODELS[name]()


def with_capacity(capacity: float) -> nn.Module:
    return _ours(replace(MIXTRAL, capacity=capacity, auxiliary=0.0))


def everyone_to_the_first(model: nn.Module) -> None:
    """Correct routers so that every token goes to the experts 0, 1 and 2."""
    for name, buffer in model.named_buffers():
        if name.endswith(("correction", "e_score_correction_bias")):
            buffer.zero_()
            buffer[:3] = 50.0


def make_batch(num_sequences: int = 4, length: int = 6) -> dict[str, Tensor]:
    """Labels are missing here and there, more in the first sequences."""
    ids = families.tokens(num_sequences, length + 1)
    labels = ids[:, 1:].clone()
    labels[0, :4] = labels[1, 2] = IGNORED
    return {"input_ids": ids[:, :-1].contiguous(), "labels": labels}
