"""The engine: requests in, tokens out. `step` is schedule, run, collect."""

from collections.abc import Iterable
from collections.abc import Sequence as Several
from random import Random
from time import perf_counter

from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.serving.blocks import first_name
from shardwise.serving.request import Finish, Load, Logprob, Request, Sampling, Token
from shardwise.serving.runner import Runner, prepare, wanted_of
from shardwise.serving.sampler import draw, ends_of, tell_logprobs
from shardwise.serving.scheduler import Scheduler
from shardwise.serving.sequence import Piece, Sequence
from shardwise.serving.summary import Summary
from shardwise.serving.tiers import Tiers
from shardwise.units import counted


class LLMEngine:
    """Answers requests over one runner. One thread calls all of it."""

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
        #: The folder or file where a tokenizer lies, or "bytes".
        self.tokenizer_source = tokenizer_source
        self.model_name = model_name
        self.tiers = tiers
        self._seeds = Random(seed)
        self._num_arrived = 0
        self._told: list[Token] = []
        self._num_prompt_tokens = self._num_generated = 0

    def add(self, request: Request) -> None:
        """Take a request, or say why it can never be answered."""
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
        """Free its blocks now; the next step says that it is cancelled."""
        sequence = self.scheduler.find(request)
        if sequence is not None:
            self.scheduler.remove(sequence)
            self._told.append(Token(request=request, token=None, finish="cancelled"))

    def has_work(self) -> bool:
        return bool(self._told or self.scheduler.running or self.scheduler.waiting)

    def step(self) -> list[Token]:
        """Schedule, run, collect."""
        told, self._told = self._told, []
        pieces = self.scheduler.schedule()
        if not pieces:
            return told
        begun = perf_counter()
        logits = self.runner.run(prepare(pieces, self.scheduler.pool.block_size, self.runner.device))
        told += self._collect(pieces, logits)
        if self.tiers is not None and any(piece.count > 1 for piece in pieces):
            self.tiers.note_computed(sum(piece.count for piece in pieces), perf_counter() - begun)
        return told

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
            **({} if self.tiers is None else self.tiers.load()),
        )

    def check(self) -> None:
        self.runner.check()

    def recover(self) -> None:
        """As new: nobody is answered and nothing is cached. It is up again when it has computed a token."""
        self.scheduler.clear()
        self._told.clear()
        self.runner.recover()
        self.add(Request(id="trial", prompt=(0,), sampling=Sampling(max_tokens=1, temperature=0.0)))
        while self.has_work():
            self.step()

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()
        self.runner.close()

    def _collect(self, pieces: Several[Piece], logits: Tensor) -> list[Token]:
        """Note what is computed, draw the next tokens, and let those go that are done."""
        last: list[Sequence] = []
        rows: list[int] = []
        row = 0
        for piece in pieces:
            sequence, num_rows = piece.sequence, len(wanted_of(piece))
            if sequence.request.sampling.prompt_logprobs is not None:
                self._note_prompt(piece, logits[row : row + num_rows])
            row += num_rows
            if piece.is_last:
                last.append(sequence)
                rows.append(row - 1)
            self._note_computed(piece)
        if not last:
            return []
        own = logits if len(rows) == len(logits) else logits[rows]
        tokens = draw(own, last, self.eos_token_ids).tolist()
        logprobs = self._logprobs(own, last, tokens)
        return [self._take(*each) for each in zip(last, tokens, logprobs, strict=True)]

    def _note_computed(self, piece: Piece) -> None:
        """Its keys and values are in the blocks; those that are full now can be found by others."""
        sequence, pool = piece.sequence, self.scheduler.pool
        num_full = (piece.start + piece.count) // pool.block_size
        names = sequence.names(num_full, pool.block_size)
        for number in range(piece.start // pool.block_size, num_full):
            pool.fill(sequence.blocks[number], names[number])
        sequence.num_computed = piece.start + piece.count

    def _note_prompt(self, piece: Piece, logits: Tensor) -> None:
        sequence = piece.sequence
        first, num_likeliest = len(sequence.prompt_logprobs), sequence.request.sampling.prompt_logprobs
        about = sequence.tokens[first + 1 : min(piece.start + piece.count + 1, sequence.num_prompt)]
        if about and num_likeliest is not None:
            sequence.prompt_logprobs += tell_logprobs(logits[: len(about)], about, num_likeliest)

    def _logprobs(self, logits: Tensor, sequences: Several[Sequence], tokens: Several[int]) -> list[Logprob | None]:
        asked = [each.request.sampling.logprobs for each in sequences]
        rows = [row for row, num_likeliest in enumerate(asked) if num_likeliest is not None]
        told: list[Logprob | None] = [None] * len(sequences)
        if rows:
            most = max(num_likeliest or 0 for num_likeliest in asked)
            for row, each in zip(rows, tell_logprobs(logits[rows], [tokens[row] for row in rows], most), strict=True):
                told[row] = Logprob(token=each.token, logprob=each.logprob, top=each.top[: asked[row]])
        return told

    def _take(self, sequence: Sequence, token: int, logprob: Logprob | None) -> Token:
        """The next token of a sequence has come; or none could, and it ends."""
        if sequence.is_stuck:
            self.scheduler.remove(sequence)
            return Token(request=sequence.id, token=None, finish="stop")
        is_first = not sequence.num_generated
        sequence.tokens.append(token)
        manner = sequence.request.sampling
        if manner.guide is not None:
            manner.guide.advance(token)
        self._num_generated += 1
        if is_first:
            self._num_prompt_tokens += sequence.num_prompt
        finish: Finish | None = None
        if token in ends_of(sequence, self.eos_token_ids):
            finish = "stop"
        elif sequence.num_generated >= manner.max_tokens:
            finish = "length"
        if finish is not None:
            self.scheduler.remove(sequence)
        has_prompt = is_first and manner.prompt_logprobs is not None
        return Token(
            request=sequence.id,
            token=token,
            logprob=logprob,
            finish=finish,
            num_cached=(sequence.num_cached or 0) if is_first else 0,
            prompt_logprobs=tuple(sequence.prompt_logprobs) if has_prompt else None,
        )


def check(request: Request, max_length: int, vocabulary_size: int) -> None:
    """Refuse what can never be answered."""
    num_prompt, most = len(request.prompt), request.sampling.max_tokens
    if not num_prompt:
        raise ShardwiseError("a prompt without tokens has nothing to be continued", remedy="at least one token")
    if most < 1:
        raise ShardwiseError(f"max_tokens={most} asks for no token", remedy="max_tokens=1 or more")
    if num_prompt + most > max_length:
        room = max_length - num_prompt
        raise ShardwiseError(
            f"{counted(num_prompt, 'token')} of prompt and {most:,} to come are {num_prompt + most:,}, and this model"
            f" takes {max_length:,}",
            remedy=f"max_tokens={room}" if room > 0 else f"a prompt of at most {max_length - 1:,} tokens",
        )
    wrong = [token for token in request.prompt if not 0 <= token < vocabulary_size]
    wrong += [token for token in request.sampling.logit_bias if not 0 <= token < vocabulary_size]
    if wrong:
        raise ShardwiseError(
            f"token {wrong[0]} is outside the vocabulary of {vocabulary_size:,}",
            remedy=f"tokens from 0 to {vocabulary_size - 1}",
        )
