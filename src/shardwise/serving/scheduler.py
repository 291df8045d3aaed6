"""Choose what each step computes: next tokens of running requests, and pieces of prompts beside them (chunked prefill).

    waiting --admit--> running --finish, cancel--> gone
       ^                  |
       +----- preempt ----+      its blocks are freed; its tokens are kept, and computed again

A step is filled in this order, up to the token budget: the next token of every sequence whose prompt is computed; the
next pieces of prompts; waiting prompts. So a long prompt never delays the next tokens of others. If there is no block
for a sequence's next token, the least urgent sequence is preempted. The most urgent one is never preempted, and there
is room for its longest answer, so the engine always makes progress.
"""

from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Several
from itertools import islice
from time import perf_counter
from typing import Literal, Protocol

from shardwise.serving.blocks import BlockPool
from shardwise.serving.sequence import Piece, Sequence


class Beneath(Protocol):
    """The tiers below the cache, addressed by the names of blocks."""

    def prefetch(self, names: Several[bytes]) -> None:
        """Announce that a waiting sequence has these names."""

    def reload(self, names: list[bytes]) -> list[int]:
        """At admission: load blocks for the first of these names, and return them, filled and taken."""


class Scheduler:
    """Requests by urgency: lower priority first, then first come. `beneath` are the tiers below the cache."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        token_budget: int,
        max_running: int,
        beneath: Beneath | None = None,
    ) -> None:
        assert token_budget >= max_running, "everyone who runs gets a token in every step"
        self.pool = pool
        self.token_budget, self.max_running = token_budget, max_running
        self.beneath = beneath
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._by_name: dict[str, Sequence] = {}
        self.num_preemptions = 0
        self.num_queried = self.num_hit = 0
        #: Of the last step: its pieces, what the first waiting sequence waits for, and the seconds of reloads.
        self.pieces: list[Piece] = []
        self.held_up: Literal["blocks", "tokens", "places"] | None = None
        self.reload_seconds = 0.0

    def add(self, sequence: Sequence) -> None:
        self._by_name[sequence.id] = sequence
        insort(self.waiting, sequence, key=lambda each: each.urgency)
        if self.beneath is not None:
            self.beneath.prefetch(self._find_shared(sequence)[1])

    def find(self, name: str) -> Sequence | None:
        return self._by_name.get(name)

    def next_ones(self) -> Iterator[Sequence]:
        """Yield the sequences that the next step can compute, and perhaps more."""
        yield from self.running
        yield from islice(self.waiting, self.max_running)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that has ended or was cancelled, and free its blocks at once."""
        sequence.is_gone = True
        del self._by_name[sequence.id]
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._let_go(sequence)

    def clear(self) -> None:
        """Remove all sequences, and free all blocks."""
        self.waiting.clear()
        self.running.clear()
        self._by_name.clear()
        self.pool.clear()

    def schedule(self) -> list[Piece]:
        """Return the pieces of the next step, with blocks reserved for each."""
        self.held_up, self.reload_seconds = None, 0.0
        self._make_room_for_urgent()
        num_before = self.num_preemptions
        pieces = self._continue_running()
        if self.num_preemptions == num_before:  # Otherwise a preempted sequence would take the same blocks again.
            self._admit(pieces)
        elif self.waiting:
            self.held_up = "blocks"
        self.pieces = pieces
        return pieces

    def _continue_running(self) -> list[Piece]:
        self.running.sort(key=lambda each: each.urgency)
        answering = [each for each in self.running if each.num_left == 1]
        reading = [each for each in self.running if each.num_left > 1]
        todo, budget, pieces = answering + reading, self.token_budget, []
        while todo and budget:
            sequence = todo.pop(0)
            count = min(sequence.num_left, budget)
            while not self._reserve(sequence, sequence.num_computed + count):
                victim = max((sequence, *todo), key=lambda each: each.urgency)
                self._preempt(victim)
                if victim is sequence:
                    break
                todo.remove(victim)
            else:
                pieces.append(Piece(sequence=sequence, start=sequence.num_computed, count=count))
                budget -= count
        return pieces

    def _admit(self, pieces: list[Piece]) -> None:
        budget = self.token_budget - sum(piece.count for piece in pieces)
        while self.waiting and budget and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            if not self._fits(sequence):
                self.held_up = "blocks"
                return
            self.waiting.pop(0)
            self.running.append(sequence)
            self._begin(sequence)
            # Reserve all of its blocks now, so that others do not take those of its later pieces meanwhile.
            has_room = self._reserve(sequence, len(sequence.tokens))
            assert has_room, "a sequence that fits has blocks for all of its tokens"
            count = min(sequence.num_left, budget)
            pieces.append(Piece(sequence=sequence, start=sequence.num_computed, count=count))
            budget -= count
        if self.waiting:
            self.held_up = "places" if budget else "tokens"

    def _make_room_for_urgent(self) -> None:
        """Preempt the least urgent running sequences for a waiting one with a better priority."""
        while self.waiting and self.running:
            first, last = self.waiting[0], max(self.running, key=lambda each: each.urgency)
            has_place = len(self.running) < self.max_running and self._fits(first)
            if has_place or first.request.priority >= last.request.priority:
                return
            self._preempt(last)

    def _find_shared(self, sequence: Sequence) -> tuple[list[int], list[bytes]]:
        """Return the cached blocks of its prefix, and all names it could use. At least one token is computed."""
        if sequence.request.sampling.prompt_logprobs is not None and not sequence.num_generated:
            return [], []  # Prompt log-probabilities exist only for tokens that are computed.
        size = self.pool.block_size
        names = sequence.names((len(sequence.tokens) - 1) // size, size)
        return self.pool.find(names), names

    def _fits(self, sequence: Sequence) -> bool:
        """Whether there are blocks for all of its tokens so far."""
        shared, _ = self._find_shared(sequence)
        num_needed = self._num_blocks(len(sequence.tokens)) - len(shared)
        return num_needed <= self.pool.num_available - self.pool.num_idle(shared)

    def _begin(self, sequence: Sequence) -> None:
        """Take the blocks that hold its prefix, from the cache or the tiers below it."""
        blocks, names = self._find_shared(sequence)
        for block in blocks:
            self.pool.take(block)
        if self.beneath is not None and len(blocks) < len(names):
            begun = perf_counter()
            blocks = blocks + self.beneath.reload(names[len(blocks) :])
            self.reload_seconds += perf_counter() - begun
        sequence.blocks = blocks
        sequence.num_begun += 1
        sequence.num_named = len(blocks)
        sequence.num_computed = len(blocks) * self.pool.block_size
        if sequence.num_cached is None:
            sequence.num_cached = sequence.num_computed
            self.num_queried += len(sequence.tokens)
            self.num_hit += sequence.num_computed

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        num_missing = self._num_blocks(num_tokens) - len(sequence.blocks)
        if num_missing > self.pool.num_available:
            return False
        sequence.blocks.extend(self.pool.allocate() for _ in range(num_missing))
        return True

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._let_go(sequence)
        self.add(sequence)
        self.num_preemptions += 1

    def _let_go(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_named = 0
