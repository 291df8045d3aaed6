"""A sampled text: tokens drawn from the model's distribution, with a seed."""

from pathlib import Path

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.nets.generate import generate
from shardwise.nets.initialise import initialise
from shardwise.nets.transformer import Transformer
from shardwise.nets.weights import place
from shardwise.training.checkpoint.read import Reader
from shardwise.training.data.documents import STDLIB
from shardwise.training.data.tokenizer import get_tokenizer
from shardwise.training.model import make_module, settings_from
from shardwise.training.outcome import Outcome

#: Larger models are not assembled on one CPU for a sample.
_LARGEST_SAMPLED = 2_000_000_000
_PROMPT = "def "

#: Below 1, which makes the text of a small model more readable.
_TEMPERATURE = 0.8


def continued(model: Transformer, prompt: list[int], num_tokens: int, seed: int) -> list[int]:
    """Return `num_tokens` tokens that continue a prompt."""
    generator = torch.Generator().manual_seed(seed)

    def draw(logits: Tensor) -> Tensor:
        return torch.multinomial(torch.softmax(logits.float() / _TEMPERATURE, dim=-1), 1, generator=generator)

    written: list[int] = generate(model, torch.tensor([prompt]), num_tokens, draw)[0, len(prompt) :].tolist()
    return written


def sample_of(outcome: Outcome, num_tokens: int, seed: int) -> str | None:
    """Return a text by the last checkpoint's model, if it is our transformer, small, and has a known tokenizer."""
    is_ours, checkpoint = "family" in outcome.model, outcome.result.checkpoint
    if not is_ours or outcome.result.num_parameters > _LARGEST_SAMPLED or checkpoint is None:
        return None
    try:
        tokenizer = get_tokenizer(outcome.data["tokenizer"])
    except ShardwiseError:  # It is gone, or cannot be read here. The run is complete without a sample.
        return None
    model = load_transformer(Path(checkpoint))
    prompt = _PROMPT if outcome.data["source"] == STDLIB else "The "
    tokens = list(tokenizer.encode(prompt.encode()))
    if not tokens:  # A tokenizer may have no word for the prompt.
        prompt, tokens = "", [0]
    if model.positions is not None:
        num_tokens = min(num_tokens, model.settings.length - len(tokens))
    return prompt + tokenizer.decode(continued(model, tokens, num_tokens, seed))


def load_transformer(folder: Path) -> Transformer:
    """Return the whole model of a checkpoint, on the CPU."""
    reader = Reader(folder)
    model = make_module(settings_from(reader.index.extra.get("model", {}), origin=folder))
    initialise(model, 0, device="cpu")
    with torch.no_grad():
        for name in reader.weights:
            place(model, name).copy_(reader.whole(name))
    return model.eval()
