"""The engine: requests in, tokens out. `step` is schedule, run, collect.

On a GPU a step is collected while the next one runs:

    host     schedule 1, begin 1    schedule 2, begin 2, collect 1    schedule 3, begin 3, collect 2
    device              1                      2                                3

So a sequence that ends in step 1 is still in step 2; the token that step 2 samples for it is dropped.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from random import Random
from time import perf_counter

from shardwise.errors import ShardwiseError
from shardwise.serving.blocks import first_name
from shardwise.serving.kv_folder import HeldFolder
from shardwise.serving.request import Finish, Load, Logprob, Request, Sampling, Token, check
from shardwise.serving.runner import Runner
from shardwise.serving.sampler import ends_of
from shardwise.serving.scheduler import Scheduler
from shardwise.serving.sequence import UNKNOWN, Piece, Sequence
from shardwise.serving.steps import Launching, Step, begin, needs_host
from shardwise.serving.summary import Summary
from shardwise.serving.tiers import Tiers


class LLMEngine:
    """Answers requests over one runner. All methods are called from one thread."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        summary: Summary,
        vocabulary_size: int,
        max_length: int,
        eos_token_ids: Iterable[int] = (),
        tokenizer_source: str = "bytes",
        model_name: str = "",
        tiers: Tiers | None = None,
        seed: int | None = None,
    ) -> None:
        self.runner, self.scheduler, self.summary = runner, scheduler, summary
        self.vocabulary_size, self.max_length = vocabulary_size, max_length
        self.eos_token_ids = frozenset(eos_token_ids)
        #: The folder or file of the tokenizer, or "bytes".
        self.tokenizer_source = tokenizer_source
        self.model_name = model_name
        self.tiers = tiers
        #: Where the files of the tiers are, if they have files.
        self.folder = HeldFolder()
        #: Whether the next step may begin before the tokens of this one are known.
        self.overlaps = isinstance(runner, Launching)
        self._under_way: Step | None = None
        self._seeds = Random(seed)
        self._num_arrived = 0
        self._told: list[Token] = []
        self._num_prompt_tokens = self._num_generated = 0
        #: When the last step ended.
        self._collected = 0.0

    def add(self, request: Request) -> None:
        """Accept a request, or refuse one that can never be answered."""
        check(request, self.max_length, self.vocabulary_size)
        if self.scheduler.find(request.id) is not None:
            raise ShardwiseError(f"request {request.id!r} is being answered already", remedy="another id")
        seed = request.sampling.seed
        self._num_arrived += 1
        self.scheduler.add(
            Sequence(
                request=request,
                arrival=self._num_arrived,
                seed=self._seeds.getrandbits(63) if seed is None else seed,
                root=first_name(self.model_name, request.salt),
                tokens=list(request.prompt),
            )
        )

    def cancel(self, request: str) -> None:
        """Free its blocks now; the next step reports that it was cancelled."""
        sequence = self.scheduler.find(request)
        if sequence is not None:
            self.scheduler.remove(sequence)
            self._told.append(Token(request=request, token=None, finish="cancelled"))

    def has_work(self) -> bool:
        return bool(self._told or self._under_way or self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[Token]:
        """Schedule, run, collect."""
        told, self._told = self._told, []
        waits = not self.overlaps or any(map(needs_host, self.scheduler.next_ones()))
        if waits:
            told += self._collect()
        pieces = self.scheduler.schedule()
        begun = self._begin(pieces, waits=waits) if pieces else None
        told += self._collect()
        self._under_way = begun
        return told + self._collect() if waits else told

    def load(self) -> Load:
        scheduler, pool = self.scheduler, self.scheduler.pool
        return Load(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=pool.num_blocks,
            num_used_blocks=pool.num_used,
            num_preemptions=scheduler.num_preemptions,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_generated,
            prefix_cache_queries=scheduler.num_queried,
            prefix_cache_hits=scheduler.num_hit,
            max_running=scheduler.max_running,
            **({} if self.tiers is None else self.tiers.load()),
        )

    def check(self) -> None:
        self.runner.check()

    def recover(self) -> None:
        """Reset: drop all requests and the cache. The engine is up again once it has computed a trial token."""
        self.scheduler.clear()
        self._told.clear()
        self._under_way = None
        self.runner.recover()
        self.add(Request(id="trial", prompt=(0,), sampling=Sampling(max_tokens=1, temperature=0.0)))
        while self.has_work():
            self.step()

    def close(self) -> None:
        """Stop answering, and free the memory of weights and blocks."""
        self.folder.tell_closing()
        if self.tiers is not None:
            self.tiers.close()
            self.tiers = self.scheduler.beneath = None
        self._under_way = None
        self.runner.close()
        self.folder.release()

    def _begin(self, pieces: Several[Piece], *, waits: bool) -> Step:
        """Begin a step and update sequences as if it were done; the tokens that it samples are not known yet."""
        if self.tiers is not None:
            self.tiers.fence()
        step = begin(self.runner, pieces, self.scheduler.pool.block_size, self.eos_token_ids, waits=waits)
        for piece in pieces:
            piece.sequence.num_computed = piece.start + piece.count
            self._name_blocks(piece.sequence)
        for row, sequence in enumerate(step.last):
            sequence.tokens.append(UNKNOWN)
            sequence.row = row
        if self.tiers is not None:
            self.tiers.write_ahead(sum(piece.count for piece in pieces))
        return step

    def _collect(self) -> list[Token]:
        """Return the tokens sampled by the step in flight, if there is one, and remove sequences that have ended."""
        step, self._under_way = self._under_way, None
        if step is None:
            return []
        drawn = zip(step.last, step.places, step.flight.wait(), step.logprobs, strict=True)
        # Steps run one after another, even if one is launched while another runs.
        before, self._collected = max(step.begun, self._collected), perf_counter()
        if step.num_read and self.tiers is not None:
            self.tiers.note_computed(step.num_read, self._collected - before)
        return [self._take(*each) for each in drawn if not each[0].is_gone]

    def _name_blocks(self, sequence: Sequence) -> None:
        """Name blocks that are full, or will be after the step in flight. Others may share them: steps run in order."""
        pool = self.scheduler.pool
        num_full = min(sequence.num_computed, sequence.num_known) // pool.block_size
        if num_full > sequence.num_named:
            names = sequence.names(num_full, pool.block_size)
            for number in range(sequence.num_named, num_full):
                pool.fill(sequence.blocks[number], names[number])
            sequence.num_named = num_full

    def _take(self, sequence: Sequence, place: int, token: int, logprob: Logprob | None) -> Token:
        """Accept the next token of a sequence, or end the sequence if its guide allows none."""
        if sequence.is_stuck:
            del sequence.tokens[place:]
            self.scheduler.remove(sequence)
            return Token(request=sequence.id, token=None, finish="stop")
        is_first = place == sequence.num_prompt
        sequence.tokens[place] = token
        sequence.num_known = place + 1
        self._name_blocks(sequence)
        sampling = sequence.request.sampling
        if sampling.guide is not None:
            sampling.guide.advance(token)
        self._num_generated += 1
        if is_first:
            self._num_prompt_tokens += sequence.num_prompt
        finish: Finish | None = None
        if token in ends_of(sequence, self.eos_token_ids):
            finish = "stop"
        elif sampling.guide is not None and sampling.guide.is_complete:
            finish = "complete"
        elif sequence.num_known - sequence.num_prompt >= sampling.max_tokens:
            finish = "length"
        if finish is not None:
            self.scheduler.remove(sequence)
        has_prompt = is_first and sampling.prompt_logprobs is not None
        return Token(
            request=sequence.id,
            token=token,
            logprob=logprob,
            finish=finish,
            num_cached=(sequence.num_cached or 0) if is_first else 0,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if has_prompt else None,
        )
