"""One request while it is answered: its tokens, how many of them are in the cache, and in which blocks."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from shardwise.serving.blocks import next_name
from shardwise.serving.request import Logprob, Request

#: In the place of a token that a step under way draws: it is known on the device alone.
UNKNOWN = -1


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """`tokens` are the prompt and what came so far; of the first `num_computed` keys and values are in `blocks`, or
    will be behind the step that is under way."""

    request: Request
    #: The how-many-th request this was, which decides among those of one priority.
    arrival: int
    #: What its draws come from: its own seed, or one that was drawn for it.
    seed: int
    #: The name that its chain of blocks begins with.
    root: bytes
    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    #: How much of its prompt was in the cache when it was first admitted; None before.
    num_cached: int | None = None
    #: Whether its guide allows no token at all: it ends with what it has.
    is_stuck: bool = False
    #: Of the tokens of the prompt from the second on, where they are asked for.
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    #: How many of its tokens are known here, and how many of its blocks have their names.
    num_known: int = 0
    num_named: int = 0
    #: Which row of the step under way draws its next token.
    row: int = 0
    #: How often it was admitted: then it has other blocks.
    num_begun: int = 0
    #: How its tokens are drawn, as the device is told.
    packed_sampling: tuple[int, ...] = ()
    #: Whether it has ended, or nobody waits for it any more.
    is_gone: bool = False
    _names: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_known = len(self.tokens)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def urgency(self) -> tuple[int, int]:
        """Lower comes first."""
        return self.request.priority, self.arrival

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that are to be computed before the next can be drawn; none where its last is being drawn."""
        if self.num_generated >= self.request.sampling.max_tokens:
            return 0
        return len(self.tokens) - self.num_computed

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    def names(self, num_blocks: int, block_size: int) -> list[bytes]:
        """The names of its first blocks, all of them full of tokens that are known."""
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
        """Whether the next token can be drawn behind it."""
        return self.start + self.count == len(self.sequence.tokens)


def num_tokens(pieces: Iterable[Piece]) -> int:
    return sum(piece.count for piece in pieces)
