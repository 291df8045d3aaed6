"""The one thread that calls the engine, and its connection to asyncio's thread.

A request is a `Ticket` from its arrival to its last token:

    state      where                        leaves it
    waiting    in the fair queue            when the engine has room to queue it, or the client is gone
    running    in the engine                with its last token, or the client is gone
    over       nowhere

All results of a ticket come through `Ticket.news`, as lists: a step's tokens are handed to asyncio in one call.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from shardwise.errors import ShardwiseError
from shardwise.serving.http.fair_queue import FairQueue
from shardwise.serving.http.retry_after import RetryAfter
from shardwise.serving.request import Answering, Load, Request, Token, describe

#: The least number of requests queued in the engine, so that it can plan and prefetch. More wait here, in fair order.
_AHEAD = 8
#: Seconds between two attempts to recover a failed engine.
_PAUSE_SECONDS = 1.0
_IDLE_SECONDS = 0.2
_JOIN_SECONDS = 30.0
_DRAIN_LOOK_SECONDS = 0.02
_STOPPING = "the server is stopping"


class EngineFailedError(Exception):
    """The engine has raised, so its requests cannot be answered."""


class OverloadedError(Exception):
    """The queue is full. There may be room after `seconds`."""

    def __init__(self, why: str, seconds: int) -> None:
        super().__init__(why)
        self.seconds = seconds


@dataclass(eq=False, slots=True, kw_only=True)
class Ticket:
    """One sequence from its arrival to its end. Times are of `time.monotonic`."""

    request: Request
    client: str
    asked_at: float
    begun_at: float | None = None
    first_at: float | None = None
    num_tokens: int = 0
    is_over: bool = False
    _news: list[Token | Exception] = field(default_factory=list)
    _has_news: asyncio.Event = field(default_factory=asyncio.Event)

    async def news(self) -> list[Token]:
        """Wait for the tokens since the last call. Raises the request's error, if any."""
        await self._has_news.wait()
        self._has_news.clear()
        found, self._news = self._news, []
        tokens = [each for each in found if isinstance(each, Token)]
        wrong = next((each for each in found if isinstance(each, Exception)), None)
        if wrong is not None:
            raise wrong
        return tokens

    def tell(self, news: Token | Exception) -> None:
        """Deliver a token or an error. Called in asyncio's thread."""
        self._news.append(news)
        self._has_news.set()


class EngineLoop:
    """The thread, and the tickets. Its methods are called in asyncio's thread."""

    def __init__(
        self, engine: Answering, *, most_waiting: int = 256, watch: Callable[[int], None] | None = None
    ) -> None:
        self.engine = engine
        #: The engine's load after its last step; and its error, until it has recovered.
        self.load: Load = engine.load()
        self.failure: str | None = None
        self._queue, self._retry = FairQueue[Ticket](most_waiting), RetryAfter()
        self._tickets: dict[str, Ticket] = {}
        self._gone: list[str] = []
        self._watch = watch
        #: An engine in another process waits for its own tokens, not for our requests: `wake` interrupts that.
        self._wake: Callable[[], None] = getattr(engine, "wake", lambda: None)
        self._lock = threading.Condition()
        self._is_closing = self._is_draining = False
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._asyncio = asyncio.get_running_loop()
        self._thread.start()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, fail those that wait, and after this many seconds those that have begun."""
        with self._lock:
            self._is_draining = True
            waiting = [ticket for ticket in self._tickets.values() if ticket.begun_at is None]
        self._stop_all(waiting)
        until = time.monotonic() + seconds
        while self.tickets() and time.monotonic() < until:
            await asyncio.sleep(_DRAIN_LOOK_SECONDS)
        self._stop_all(self.tickets())

    def _stop_all(self, tickets: Sequence[Ticket]) -> None:
        self.cancel(tickets)
        for ticket in tickets:
            ticket.tell(EngineFailedError(_STOPPING))

    async def close(self) -> None:
        """Stop: waiting requests get an error, and the engine is closed by its own thread."""
        with self._lock:
            self._is_closing = True
            self._lock.notify()
        self._wake()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)

    def tickets(self) -> list[Ticket]:
        """Return the tickets that are not over."""
        with self._lock:
            return list(self._tickets.values())

    @property
    def num_waiting(self) -> int:
        with self._lock:
            return len(self._queue)

    def check_room(self) -> None:
        """Raise what `ask` would raise, if that is certain for any client and request."""
        with self._lock:
            if self.failure is None and not self._is_closing and self._queue.refuses_all():
                raise self._overloaded()

    def _overloaded(self, why: str | None = None) -> OverloadedError:
        why = why or f"{self._queue.most} requests are waiting already"
        return OverloadedError(why, self._retry.refused(len(self._queue), time.monotonic()))

    def ask(self, requests: Sequence[Request], *, client: str) -> list[Ticket]:
        """Queue requests: all of them, or none and `OverloadedError`."""
        now = time.monotonic()
        made = [Ticket(request=request, client=client, asked_at=now) for request in requests]
        left = list[Ticket]()
        with self._lock:
            self._check_up()
            if len(made) > self._queue.most:
                raise ShardwiseError(
                    f"{len(made)} answers at once are more than the {self._queue.most} that may wait here",
                    remedy="fewer prompts, or a smaller n",
                )
            for place, ticket in enumerate(made):
                leaves = self._queue.put(ticket, client=client, priority=ticket.request.priority)
                if leaves is not None and leaves in made:
                    for mine in made[:place]:
                        self._let_go(mine)
                    raise self._overloaded()
                self._tickets[ticket.request.id] = ticket
                if leaves is not None:
                    self._let_go(leaves)
                    left.append(leaves)
            self._lock.notify()
        self._wake()
        for ticket in left:
            ticket.tell(self._overloaded("another client was waiting with fewer requests"))
        return made

    def _check_up(self) -> None:
        if self._is_closing or self._is_draining:
            raise EngineFailedError(_STOPPING)
        if self.failure is not None:
            raise EngineFailedError(self.failure)

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Cancel tickets. The engine drops them before its next step."""
        with self._lock:
            num_gone = len(self._gone)
            for ticket in tickets:
                self._let_go(ticket)
            has_gone = len(self._gone) > num_gone
            if has_gone:
                self._lock.notify()
        if has_gone:
            self._wake()

    def _let_go(self, ticket: Ticket) -> None:
        if ticket.is_over:
            return
        ticket.is_over = True
        self._tickets.pop(ticket.request.id, None)
        if not self._queue.remove(ticket):
            self._gone.append(ticket.request.id)

    # The methods below run in the engine's thread.

    def _run(self) -> None:
        while not self._is_closing:
            try:
                if self._prepare():
                    if self.engine.has_work():
                        self._tell(self.engine.step())
                    else:
                        self.engine.check()
                self.load = self.engine.load()
            except Exception as error:
                self._fail(error)
                self._recover()
        self._end()

    def _prepare(self) -> bool:
        """Cancel and add requests, and wait a moment if there is nothing to do. Returns False when stopping."""
        with self._lock:
            if not (self._is_closing or self._gone or len(self._queue) or self.engine.has_work()):
                self._lock.wait(_IDLE_SECONDS)
            if self._is_closing:
                return False
            gone, self._gone = self._gone, []
            # As many as can run, and a few more: when several end in one step, others replace them in the next.
            ahead = max(_AHEAD, self.load.max_running // 4)
            room = max(0, self.load.max_running - self.load.num_running) + ahead - self.load.num_waiting
            added = [ticket for _ in range(max(0, room)) if (ticket := self._queue.take()) is not None]
            for ticket in added:
                ticket.begun_at = time.monotonic()  # From here on, a failure of the engine fails it too.
        for name in gone:
            self.engine.cancel(name)
        for ticket in added:
            self._add(ticket)
        return True

    def _add(self, ticket: Ticket) -> None:
        if ticket.is_over:
            return  # The client left between the queue and here.
        try:
            self.engine.add(replace(ticket.request, asked_at=ticket.asked_at))
        except ShardwiseError as error:
            self._tell_one(ticket, error)

    def _tell(self, tokens: Sequence[Token]) -> None:
        now = time.monotonic()
        told = list[tuple[Ticket, Token | Exception]]()
        num_tokens = num_ended = 0
        with self._lock:
            for token in tokens:
                ticket = self._tickets.get(token.request)
                if ticket is None:
                    continue
                if token.token is not None:
                    ticket.first_at = ticket.first_at or now
                    ticket.num_tokens += 1
                    num_tokens += 1
                if token.finish is not None:
                    ticket.is_over = True
                    num_ended += 1
                    del self._tickets[token.request]
                told.append((ticket, EngineFailedError(token.failure) if token.finish == "failed" else token))
            self._retry.ended(num_ended, now)
        if self._watch is not None and tokens:  # Without tokens, it was woken during a step.
            self._watch(num_tokens)
        self._to_asyncio(told)

    def _tell_one(self, ticket: Ticket, error: Exception) -> None:
        with self._lock:
            ticket.is_over = True
            self._tickets.pop(ticket.request.id, None)
        self._to_asyncio([(ticket, error)])

    def _to_asyncio(self, told: list[tuple[Ticket, Token | Exception]]) -> None:
        if told and self._asyncio is not None and not self._asyncio.is_closed():
            self._asyncio.call_soon_threadsafe(_tell_all, told)

    def _fail(self, error: Exception) -> None:
        """Fail all requests that are in the engine; those that wait are tried when it has recovered."""
        failure = f"the engine has failed: {describe(error)}"
        with self._lock:
            self.failure = failure
            hit = [ticket for ticket in self._tickets.values() if ticket.begun_at is not None]
            for ticket in hit:
                ticket.is_over = True
                del self._tickets[ticket.request.id]
        self._to_asyncio([(ticket, EngineFailedError(failure)) for ticket in hit])

    def _recover(self) -> None:
        """Recover the engine, retrying until it is up or the server stops. It then has no requests."""
        while not self._is_closing:
            try:
                self.engine.recover()
                with self._lock:
                    self._gone.clear()
                    self.load, self.failure = self.engine.load(), None
                return
            except Exception as error:
                self.failure = f"the engine has failed: {describe(error)}"
                with self._lock:
                    self._lock.wait_for(lambda: self._is_closing, _PAUSE_SECONDS)

    def _end(self) -> None:
        with self._lock:
            left = list(self._tickets.values())
            self._tickets.clear()
        for ticket in left:
            ticket.is_over = True
        self._to_asyncio([(ticket, EngineFailedError(_STOPPING)) for ticket in left])
        self.engine.close()


def _tell_all(told: list[tuple[Ticket, Token | Exception]]) -> None:
    for ticket, news in told:
        ticket.tell(news)
