"""Modules that are not ours, to be trained by `shardwise train --set model.source=tests.training.own_models:...`."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

VOCABULARY = 256


class Reader(nn.Module):
    """Looks at one byte and guesses the next, with a skip around every layer and dropout within."""

    def __init__(self, width: int = 16, num_layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))
            for _ in range(num_layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden: Tensor = self.embed(input_ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def reader() -> nn.Module:
    return Reader()


def reader_with_a_loss() -> tuple[nn.Module, Any]:
    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100) * 2

    return Reader(), loss


def a_llama() -> nn.Module:
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    config.use_cache = False
    made: nn.Module = hf.LlamaForCausalLM(config)
    return made


def a_tied_gpt2() -> nn.Module:
    import transformers as hf

    made: nn.Module = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2))
    return made


def a_mixtral() -> nn.Module:
    import transformers as hf

    config = hf.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        num_key_value_heads=1, num_local_experts=4,
    )  # fmt: skip
    made: nn.Module = hf.MixtralForCausalLM(config)
    return made


class ReaderOfDocuments(Reader):
    def forward(self, input_ids: Tensor, documents: Tensor | None = None) -> Tensor:
        del documents
        return super().forward(input_ids)


def reader_of_documents() -> nn.Module:
    return ReaderOfDocuments()


def no_module() -> Tensor:
    return torch.zeros(1)
