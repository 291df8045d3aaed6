"""Compute one step: pieces of sequences to inputs, inputs through the model, logits of the tokens that need them."""

from collections.abc import Sequence as Several
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from shardwise.nets.mask import AttentionMask
from shardwise.nets.norm import normed
from shardwise.nets.settings import Settings
from shardwise.nets.transformer import Transformer
from shardwise.serving.kv_cache import Inputs, KVCache
from shardwise.serving.sequence import Piece


class Runner(Protocol):
    """The part of a runner that the engine uses: one device, or many ranks."""

    #: The device of the logits.
    device: torch.device

    def run(self, inputs: Inputs) -> Tensor:
        """Return logits, [wanted tokens, vocabulary]."""

    def check(self) -> None:
        """Raise if one of the ranks is gone."""

    def recover(self) -> None:
        """Become able to run again after a failure. The contents of the cache may be lost."""

    def close(self) -> None: ...


def for_serving(settings: Settings) -> Settings:
    """Return the model's settings without training-only parts: a capacity would drop tokens depending on the batch."""
    if settings.mixture is None:
        return settings
    return replace(settings, mixture=replace(settings.mixture, capacity=None, auxiliary=0.0))


def prepare(pieces: Several[Piece], block_size: int, device: torch.device) -> Inputs:
    """Make a step's inputs. Logits are wanted for last tokens, and for a whole prompt if its logprobs are requested."""
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, lengths, wanted = [0], [], []
    for piece in pieces:
        sequence, end = piece.sequence, piece.start + piece.count
        tokens += sequence.tokens[piece.start : end]
        positions += range(piece.start, end)
        slots += (
            sequence.blocks[position // block_size] * block_size + position % block_size
            for position in range(piece.start, end)
        )
        wanted += wanted_of(piece, starts[-1])
        starts.append(len(tokens))
        lengths.append(end)
    width = max(-(-length // block_size) for length in lengths)
    tables = [(piece.sequence.blocks + [0] * width)[:width] for piece in pieces]

    def to_device(numbers: object) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)

    return Inputs(
        tokens=to_device(tokens),
        positions=to_device(positions),
        slots=to_device(slots),
        tables=to_device(tables),
        lengths=lengths,
        starts=starts,
        wanted=to_device(wanted),
    )


def wanted_of(piece: Piece, begin: int = 0) -> list[int]:
    """Return which tokens of a piece need logits: those of the prompt if requested, and the last."""
    sequence, end = piece.sequence, piece.start + piece.count
    if sequence.request.sampling.prompt_logprobs is None:
        return [begin + piece.count - 1] if piece.is_last else []
    # Logits at one token predict the next. Those that were returned before a preemption are not repeated.
    first = len(sequence.prompt_logprobs)
    about_prompt = [
        begin + at - piece.start for at in range(max(piece.start, first), min(end, sequence.num_prompt - 1))
    ]
    return [*about_prompt, begin + piece.count - 1] if piece.is_last else about_prompt


class Part(nn.Module):
    """Consecutive layers of a model over a cache: all of them, or one pipeline stage."""

    def __init__(self, model: Transformer, cache: KVCache, layers: range) -> None:
        super().__init__()
        self.model, self.cache, self.layers = model, cache, layers

    @property
    def is_first(self) -> bool:
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        return self.layers.stop == self.model.settings.num_layers

    @torch.inference_mode()
    def forward(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor:
        """Return hidden states of all tokens, [1, tokens, width]; with the last layer, logits of the wanted tokens."""
        self.cache.inputs = inputs
        return self.compute(inputs, hidden)

    def compute(self, inputs: Inputs, hidden: Tensor | None = None) -> Tensor:
        """Run the layers over a cache that has the step's inputs set."""
        model, positions = self.model, inputs.positions[None]
        if hidden is None:
            hidden = model.embed(inputs.tokens)[None]
            if model.positions is not None:
                hidden = hidden + model.positions(positions)
        rotation = None if model.rotary is None else model.rotary(positions)
        whole = AttentionMask(None, positions, None, None)
        windowed = whole._replace(window=model.settings.window)
        for number, layer in enumerate(self.layers):
            # Attach in every step: engines may share a model, each with its own cache.
            self.cache.attach(number, model.layers[layer])  # type: ignore[arg-type]
            mask = windowed if model.settings.is_windowed(layer) else whole
            hidden, _ = model.layers[layer](hidden, None, rotation, mask, self.cache)
        if not self.is_last:
            return hidden
        chosen = hidden[0, inputs.wanted]
        logits: Tensor = model.head(normed(model.norm, chosen, kernels=model.kernels))
        return logits


class LocalRunner:
    """A whole model on one device."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self.device = model.embed.weight.device
        self._part = Part(model.eval(), cache, range(model.settings.num_layers))

    def run(self, inputs: Inputs) -> Tensor:
        made: Tensor = self._part(inputs)
        return made

    def check(self) -> None: ...

    def recover(self) -> None: ...

    def close(self) -> None:
        vars(self).pop("_part", None)
