"""A step that was begun, and its results. On most devices it is over before `begin` returns.

On a GPU the host does not wait: sampled tokens stay on the device, where the next step reads them. The host gets them
one step later (`device_runner.py`).
"""

from collections.abc import Collection
from collections.abc import Sequence as Several
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol, runtime_checkable

from torch import Tensor

from shardwise.serving.request import Logprob
from shardwise.serving.runner import Runner, prepare, wanted_of
from shardwise.serving.sampler import draw, tell_logprobs
from shardwise.serving.sequence import Piece, Sequence


class Flight(Protocol):
    """Tokens that are being copied from the device."""

    def wait(self) -> list[int]: ...


@runtime_checkable
class Launching(Protocol):
    """A runner that can begin a step without waiting for it, and samples on its device."""

    def launch(self, pieces: Several[Piece]) -> Flight:
        """Compute these pieces, and sample the next token after each piece that is a sequence's last, in order."""

    def logits(self, pieces: Several[Piece]) -> Tensor:
        """Compute these pieces without sampling. Returns logits of wanted tokens, valid until the next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The sequences whose next tokens a step samples, and the positions in their `tokens`; the rest after waiting."""

    last: tuple[Sequence, ...]
    places: tuple[int, ...]
    flight: Flight
    logprobs: tuple[Logprob | None, ...]
    #: When it was begun; and how many tokens it computes, if there are prompts among them.
    begun: float
    num_read: int


@dataclass(frozen=True, slots=True)
class _Landed:
    tokens: list[int]

    def wait(self) -> list[int]:
        return self.tokens


def needs_host(sequence: Sequence) -> bool:
    """Whether the host must see each token of a sequence before the next is sampled, or needs the logits themselves."""
    sampling = sequence.request.sampling
    return (
        sampling.guide is not None
        or sampling.logprobs is not None
        or sampling.prompt_logprobs is not None
        or bool(sampling.logit_bias)
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.repetition_penalty != 1
        or sequence.num_generated < sampling.min_tokens
    )


def begin(runner: Runner, pieces: Several[Piece], block_size: int, eos: Collection[int], *, waits: bool) -> Step:
    """Begin a step. With `waits` it is over on return, and everything about its tokens is known."""
    last = tuple(piece.sequence for piece in pieces if piece.is_last)
    num_read = sum(piece.count for piece in pieces) if any(piece.count > 1 for piece in pieces) else 0
    made = partial(
        Step,
        last=last,
        places=tuple(len(sequence.tokens) for sequence in last),
        begun=perf_counter(),
        num_read=num_read,
    )
    if not waits:
        assert isinstance(runner, Launching), "only such a runner does not wait"
        return made(flight=runner.launch(pieces), logprobs=(None,) * len(last))
    if isinstance(runner, Launching):
        logits = runner.logits(pieces)
    else:
        logits = runner.run(prepare(pieces, block_size, runner.device))
    row, rows = 0, []
    for piece in pieces:
        num_rows = len(wanted_of(piece))
        if piece.sequence.request.sampling.prompt_logprobs is not None:
            _note_prompt(piece, logits[row : row + num_rows])
        row += num_rows
        if piece.is_last:
            rows.append(row - 1)
    if not last:
        return made(flight=_Landed([]), logprobs=())
    own = logits if len(rows) == len(logits) else logits[rows]
    tokens = draw(own, last, eos).tolist()
    return made(flight=_Landed(tokens), logprobs=_logprobs(own, last, tokens))


def _note_prompt(piece: Piece, logits: Tensor) -> None:
    sequence = piece.sequence
    first, num_likeliest = len(sequence.prompt_logprobs), sequence.request.sampling.prompt_logprobs
    about = sequence.tokens[first + 1 : min(piece.start + piece.count + 1, sequence.num_prompt)]
    if about and num_likeliest is not None:
        sequence.prompt_logprobs += tell_logprobs(logits[: len(about)], about, num_likeliest)


def _logprobs(logits: Tensor, sequences: Several[Sequence], tokens: Several[int]) -> tuple[Logprob | None, ...]:
    asked = [each.request.sampling.logprobs for each in sequences]
    rows = [row for row, num_likeliest in enumerate(asked) if num_likeliest is not None]
    told: list[Logprob | None] = [None] * len(sequences)
    if rows:
        most = max(num_likeliest or 0 for num_likeliest in asked)
        for row, each in zip(rows, tell_logprobs(logits[rows], [tokens[row] for row in rows], most), strict=True):
            told[row] = Logprob(token=each.token, logprob=each.logprob, top=each.top[: asked[row]])
    return tuple(told)
