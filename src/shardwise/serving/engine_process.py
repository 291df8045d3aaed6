"""The engine in a process of its own, so that HTTP handling does not slow down its steps.

Threads of one Python process take turns holding the interpreter lock. A step is hundreds of short calls, each of which
could wait for HTTP work: parsing, JSON, refusals. With two processes it never waits:

    HTTP's process                              the engine's
    add, cancel   ----- requests ------------>  read before every step
    step          <---- tokens, load --------   written after every step; the next one begins at once

`EngineProcess` is an `Answering`, like the engine itself. If the process ends, `recover` starts another.
"""

import atexit
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import connection
from queue import Empty, SimpleQueue
from typing import Any

from shardwise.errors import ShardwiseError, warn_plainly
from shardwise.serving.request import Load, Request, Token, check, describe
from shardwise.serving.summary import Summary
from shardwise.serving.text.grammar import Grammars, SentGuide
from shardwise.serving.text.tokenizer import load_tokenizer

#: How often each side checks that the other is alive when nothing arrives; and how long an engine may take to close.
_LOOK_SECONDS, _CLOSE_SECONDS = 0.5, 25.0
#: A step that takes longer is told of.
_LONG_STEP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Properties of an engine, known once it is loaded."""

    max_length: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    tokenizer_source: str
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class _News:
    """The message after a step: tokens (most of them as two fields), the load, and the number of requests added."""

    tokens: list[Any]
    load: Load
    num_added: int


@dataclass(frozen=True, slots=True)
class _Failed:
    error: ShardwiseError


@dataclass(frozen=True, slots=True)
class _Recovered:
    load: Load


class EngineProcess:
    """A handle on the engine that `make` loads in another process. One thread calls all methods except `wake`.

    `first` is called there before `make`, and `meanwhile` is given its result here: what it refuses ends the loading.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        first: Callable[[], Any] | None = None,
        meanwhile: Callable[[Any], None] | None = None,
    ) -> None:
        self._make, self._first, self._meanwhile = make, first, meanwhile
        self._woken, self._waking = multiprocessing.Pipe(duplex=False)
        self._is_woken = False
        about = self._start()
        self.vocabulary_size, self.eos_token_ids = about.vocabulary_size, about.eos_token_ids
        self.tokenizer_source = about.tokenizer_source

    @property
    def process_id(self) -> int | None:
        return self._process.pid

    def add(self, request: Request) -> None:
        check(request, self.max_length, self.vocabulary_size)
        if request.id in self._open:
            raise ShardwiseError(f"request {request.id!r} is being answered already", remedy="another id")
        if not self._open:
            self._heard_at = time.monotonic()
        self._open.add(request.id)
        self._num_asked += 1
        self._outbox.append(("add", request))

    def cancel(self, request: str) -> None:
        if request in self._open:
            self._outbox.append(("cancel", request))

    def has_work(self) -> bool:
        return bool(self._open or self._outbox)

    def step(self) -> list[Token]:
        """Return the tokens of a step; none if `wake` is called first, because there is something to send."""
        self._send()
        return self._take_news(_LOOK_SECONDS) or []

    def wake(self) -> None:
        """Interrupt a waiting `step`. Any thread may call this."""
        if not self._is_woken:  # Otherwise a wake-up is pending already.
            self._is_woken = True
            self._waking.send_bytes(b"w")

    def load(self) -> Load:
        """Return the load after the last step; requests that are still in the pipe count as waiting."""
        silent = time.monotonic() - self._heard_at if self._open else 0.0
        return replace(
            self._load,
            num_waiting=self._load.num_waiting + self._num_asked - self._num_added,
            trouble=f"no step has ended for {silent:.0f} s" if silent > _LONG_STEP_SECONDS else self._load.trouble,
        )

    def check(self) -> None:
        self._send()
        while self._take_news(0) is not None:
            pass

    def recover(self) -> None:
        """Recover the engine; if its process has died, start another, which loads the model again."""
        self._forget()
        if not self._process.is_alive():
            self._end()
            self._check_same(self._start())
            return
        self._send([("recover",)])
        while not isinstance(news := self._receive(None), _Recovered):
            if isinstance(news, _Failed):
                raise news.error
        self._load = news.load

    def close(self) -> None:
        with suppress(OSError, ShardwiseError):
            self._send([("close",)])
        self._process.join(_CLOSE_SECONDS)
        self._end()
        self._woken.close()
        self._waking.close()

    def _start(self) -> About:
        self._forget()
        context = multiprocessing.get_context("spawn")  # A fork would inherit this process's threads and locks.
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._make, self._first), name="shardwise-engine")
        self._process.start()
        atexit.register(self._end)
        theirs.close()
        try:
            found = None if self._first is None else self._next_of_start()
            if self._meanwhile is not None:
                self._meanwhile(found)
            about, news = self._next_of_start(), self._next_of_start()
        except BaseException:
            self._end()
            raise
        assert isinstance(about, About), "an engine says what it is"
        assert isinstance(news, _News), "and then its load"
        self._load, self.max_length, self.summary = news.load, about.max_length, about.summary
        return about

    def _next_of_start(self) -> Any:
        news = self._receive(None)
        if isinstance(news, _Failed):
            raise news.error
        return news

    def _check_same(self, about: About) -> None:
        """Refuse an engine whose requests would have to be written otherwise than those of the first."""
        for name, said in (("vocabulary_size", "vocabulary"), ("tokenizer_source", "tokenizer")):
            before, now = getattr(self, name), getattr(about, name)
            if before != now:
                self._end()
                raise ShardwiseError(
                    f"the model has changed: its {said} was {before} and is {now}", remedy="start the server again"
                )

    def _forget(self) -> None:
        self._open: set[str] = set()
        self._heard_at = time.monotonic()
        self._outbox: list[tuple[Any, ...]] = []
        self._num_asked: int = 0
        self._num_added: int = 0

    def _end(self) -> None:
        """Kill the process now. The processes that it started end with it."""
        atexit.unregister(self._end)
        self._pipe.close()
        if self._process.is_alive():
            self._process.kill()
        self._process.join()

    def _send(self, what: Sequence[tuple[Any, ...]] | None = None) -> None:
        told, self._outbox = (self._outbox, []) if what is None else (list(what), self._outbox)
        if told:
            try:
                self._pipe.send(told)
            except OSError:
                raise self._gone() from None

    def _take_news(self, seconds: float) -> list[Token] | None:
        """Return the tokens of the next finished step, or None if none finishes within this many seconds."""
        news = self._receive(seconds)
        if news is None:
            return None
        if isinstance(news, _Failed):
            raise news.error
        assert isinstance(news, _News), "only steps are told of"
        self._heard_at = time.monotonic()
        self._load, self._num_added = news.load, news.num_added
        tokens = [Token(request=each[0], token=each[1]) if type(each) is tuple else each for each in news.tokens]
        self._open.difference_update(token.request for token in tokens if token.finish is not None)
        return tokens

    def _receive(self, seconds: float | None) -> Any:
        """Return the next message. With `seconds`, None if none arrives in time or `wake` is called."""
        watched: list[Any] = [self._pipe, self._process.sentinel, *([] if seconds is None else [self._woken])]
        try:
            if not self._pipe.poll(0):
                found = connection.wait(watched, seconds)
                if self._woken in found:
                    self._woken.recv_bytes()
                    self._is_woken = False
                if not self._pipe.poll(0):
                    if self._process.sentinel in found:
                        raise self._gone()
                    return None
            return self._pipe.recv()
        except (EOFError, OSError):
            raise self._gone() from None

    def _gone(self) -> ShardwiseError:
        self._process.join(_LOOK_SECONDS)
        status = self._process.exitcode
        how = f"was killed by {signal.Signals(-status).name}" if status is not None and status < 0 else "has ended"
        return ShardwiseError(f"the engine's process {how}", remedy="its log, or dmesg, says why")


# The code below runs in the engine's process.


def _serve(pipe: Any, make: Callable[[], Any], first: Callable[[], Any] | None) -> None:
    # A terminal or a service sends signals to all processes. The HTTP process handles them and ends this one.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda *_: None)
    warn_plainly()
    try:
        if first is not None:
            pipe.send(first())
        engine = make()
    except Exception as error:
        with suppress(OSError):  # Nobody waits for it any more.
            pipe.send(_Failed(_told(error)))
        return
    fields = {name: getattr(engine, name) for name in About.__dataclass_fields__}
    with suppress(EOFError, OSError):  # The other process is gone, so this one ends too.
        pipe.send(About(**fields))
        _Steps(engine, pipe).run()
    engine.close()


class _Steps:
    """The engine's loop: runs steps while there is work, and handles messages between them."""

    def __init__(self, engine: Any, pipe: Any) -> None:
        self._engine, self._pipe, self._num_added = engine, pipe, 0
        self._inbox = SimpleQueue[tuple[Any, ...]]()
        self._grammars: Grammars | None = None
        self._refused: list[Token] = []
        self._told: Load | None = None

    def run(self) -> None:
        # A thread reads the pipe, so that the two sides cannot deadlock while both send: a prompt and its
        # log-probabilities may each be larger than the pipe's buffer.
        threading.Thread(target=self._read, daemon=True).start()
        is_up, engine = True, self._engine
        self._tell([])
        while True:
            has_work = is_up and (engine.has_work() or bool(self._refused))
            while (asked := self._next(0 if has_work else _LOOK_SECONDS)) is not None:
                kind, *given = asked
                if kind == "close":
                    return
                if kind == "recover":
                    is_up = self._is_well(self._recover)
                elif is_up:
                    is_up = self._is_well(self._add if kind == "add" else engine.cancel, *given)
                has_work = True
            if is_up:
                is_up = self._is_well(self._step)

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                for each in self._pipe.recv():
                    self._inbox.put(each)
        self._inbox.put(("close",))  # The other process is gone.

    def _next(self, seconds: float) -> tuple[Any, ...] | None:
        try:
            return self._inbox.get(block=seconds > 0, timeout=seconds or None)
        except Empty:
            return None

    def _is_well(self, do: Callable[..., None], *given: Any) -> bool:
        """Call `do` and return whether it succeeded. An error is sent; after it, nothing runs until `recover`."""
        try:
            do(*given)
        except Exception as error:
            self._pipe.send(_Failed(_told(error)))
            return False
        return True

    def _step(self) -> None:
        if self._engine.has_work():
            self._tell(self._engine.step())
        else:
            self._engine.check()
            self._tell([])

    def _tell(self, tokens: Sequence[Token]) -> None:
        tokens, self._refused = [*self._refused, *tokens], []
        load = self._engine.load()
        if tokens or load != self._told:
            self._told = load
            self._pipe.send(_News(tokens=[_packed(each) for each in tokens], load=load, num_added=self._num_added))

    def _add(self, request: Request) -> None:
        self._num_added += 1
        try:
            guide: Any = request.sampling.guide
            if isinstance(guide, SentGuide):
                made = self._guides().guide(guide.schema)
                request = replace(request, sampling=replace(request.sampling, guide=made))
            self._engine.add(request)
        except ShardwiseError as error:
            self._refused.append(Token(request=request.id, token=None, finish="failed", failure=describe(error)))

    def _recover(self) -> None:
        self._num_added = 0
        self._refused.clear()
        self._engine.recover()
        self._pipe.send(_Recovered(self._engine.load()))

    def _guides(self) -> Grammars:
        if self._grammars is None:
            engine = self._engine
            text = load_tokenizer(engine.tokenizer_source)
            ends = sorted(engine.eos_token_ids)
            self._grammars = Grammars(text, size=engine.vocabulary_size, end_tokens=ends)
        return self._grammars


def _packed(token: Token) -> Any:
    """Send most tokens as a name and a number, at a tenth of the cost of a whole `Token`."""
    is_plain = token.finish is None and token.logprob is None and token.prompt_logprobs is None
    return (token.request, token.token) if is_plain and not token.num_cached else token


def _told(error: Exception) -> ShardwiseError:
    """Return an error with the same text that can be pickled."""
    if type(error) is ShardwiseError:
        return error
    return ShardwiseError(describe(error), remedy=getattr(error, "remedy", None))
