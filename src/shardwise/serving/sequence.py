"""One request while it is answered: its tokens, how many of them are in the cache, and in which blocks."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.serving.blocks import next_name
from shardwise.serving.request import Logprob, Request

#: Placeholder for a token that the step in flight samples: it is known on the device only.
UNKNOWN = -1


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """`tokens` are the prompt and the answer so far. Keys and values of the first `num_computed` are in `blocks`, or
    will be after the step in flight."""

    request: Request
    #: The number of the request in the order of arrival, which breaks ties of priority.
    arrival: int
    #: The seed of its samples: the request's own, or a random one.
    seed: int
    #: The root name of its chain of blocks.
    root: bytes
    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    #: How many tokens of its prompt were cached when it was first admitted; None before.
    num_cached: int | None = None
    #: Whether its guide allows no token at all: it ends with the tokens so far.
    is_stuck: bool = False
    #: Log-probabilities of the prompt's tokens from the second on, if requested.
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    #: How many of its tokens are known on the host, and how many of its blocks have names.
    num_known: int = 0
    num_named: int = 0
    #: The row of the step in flight that samples its next token.
    row: int = 0
    #: How often it was admitted: each time it gets other blocks.
    num_begun: int = 0
    #: Its sampling parameters, packed for the device.
    packed_sampling: tuple[int, ...] = ()
    #: Whether it has ended or was cancelled.
    is_gone: bool = False
    _names: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_known = len(self.tokens)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def urgency(self) -> tuple[int, int]:
        """The sort key of urgency: lower comes first."""
        return self.request.priority, self.arrival

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens to compute before the next one can be sampled; none while its last token is being sampled."""
        if self.num_generated >= self.request.sampling.max_tokens:
            return 0
        return len(self.tokens) - self.num_computed

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def names(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Return the names of its first blocks, which must be full of known tokens."""
        assert num_blocks * block_size <= self.num_known, "a block whose tokens are not all known has no name"
        while len(self._names) < num_blocks:
            begin = len(self._names) * block_size
            before = self._names[-1] if self._names else self.root
            self._names.append(next_name(before, self.tokens[begin : begin + block_size]))
        return self._names[:num_blocks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one step computes of a sequence: `count` tokens from `start` on."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether the next token can be sampled after it."""
        return self.start + self.count == len(self.sequence.tokens)


def num_tokens(pieces: Iterable[Piece]) -> int:
    return sum(piece.count for piece in pieces)
