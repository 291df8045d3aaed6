"""Several engines behind one interface: a request goes to the replica that has most of its prefix cached; among equals,
to the one with the least work.

When a replica fails, only its own requests fail. It recovers while the others answer:

    up --its step raises, or a rank of it is gone--> away --recovered, in a thread of its own--> up

Each replica steps in a thread of its own and waits for no other: a long prompt or a slower device delays only its own
requests. Messages to a replica in a step are delivered before its next step.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import fields

from shardwise.errors import ShardwiseError
from shardwise.serving.blocks import first_name, next_name
from shardwise.serving.engine import LLMEngine
from shardwise.serving.kv_folder import HeldFolder
from shardwise.serving.request import Load, Request, Token, check, describe

#: Seconds between two attempts to recover a replica.
_PAUSE_SECONDS = 1.0


class AllAwayError(Exception):
    """No replica is up."""


class Replicas:
    """Engines of the same model, each with its own cache. `step` returns the tokens of replicas whose step is done."""

    def __init__(self, engines: Sequence[LLMEngine]) -> None:
        self.engines = list(engines)
        first = self.engines[0]
        self.max_length, self.vocabulary_size = first.max_length, first.vocabulary_size
        self.eos_token_ids, self.tokenizer_source, self.summary = (
            first.eos_token_ids,
            first.tokenizer_source,
            first.summary,
        )
        self.folder = HeldFolder()
        self._homes: dict[str, LLMEngine] = {}
        self._told: list[Token] = []
        #: The running step of each replica that is in one; and calls to deliver before the next step.
        self._steps: dict[LLMEngine, Future[list[Token]]] = {}
        self._later: dict[LLMEngine, list[Callable[[], None]]] = {each: [] for each in self.engines}
        #: For each replica that is away: the reason, and its recovery.
        self._away: dict[LLMEngine, tuple[str, Future[None]]] = {}
        self._is_closing = threading.Event()
        self._threads = ThreadPoolExecutor(2 * len(self.engines))

    def add(self, request: Request) -> None:
        if request.id in self._homes:
            raise ShardwiseError(f"request {request.id!r} is being answered already", remedy="another id")
        check(request, self.max_length, self.vocabulary_size)
        best = max(self._up(), key=lambda each: (self._num_cached(each, request), -self._num_to_do(each)))
        self._homes[request.id] = best
        self._later[best].append(lambda: best.add(request))

    def cancel(self, request: str) -> None:
        home = self._homes.get(request)
        if home is not None:
            self._later[home].append(lambda: home.cancel(request))

    def has_work(self) -> bool:
        return bool(self._told or self._steps) or any(
            self._later[each] or each.has_work() for each in self.engines if each not in self._away
        )

    def step(self) -> list[Token]:
        """Begin a step on every idle replica, and wait for the first step that is done."""
        for engine in self._up():
            if engine not in self._steps:
                for tell in self._later[engine]:
                    tell()
                self._later[engine].clear()
                if engine.has_work():
                    self._steps[engine] = self._threads.submit(engine.step)
                else:
                    self._check([engine])
        if self._steps and not self._told:
            wait(self._steps.values(), return_when=FIRST_COMPLETED)
        for engine, running in list(self._steps.items()):
            if running.done():
                del self._steps[engine]
                try:
                    self._told += running.result()
                except Exception as error:
                    self._lose(engine, error)
        told, self._told = self._told, []
        for token in told:
            if token.finish is not None:
                self._homes.pop(token.request, None)
        return told

    def load(self) -> Load:
        loads = [each.load() for each in self.engines]
        usage = sum(load.kv_offload_host_usage for load in loads) / len(loads)
        trouble = [f"replica {self.engines.index(engine)}: {why}" for engine, (why, _) in self._away.items()]
        sums = {each.name: sum(getattr(load, each.name) for load in loads) for each in fields(Load)
                if each.name != "trouble"}  # fmt: skip
        return Load(**{**sums, "kv_offload_host_usage": usage}, trouble="; ".join(trouble) or None)

    def check(self) -> None:
        self._check(self._up())
        self._up()

    def recover(self) -> None:
        """Reset the replicas that are up. Those that are away are recovering already; one is enough to answer."""
        wait(self._steps.values())
        for waiting in (self._homes, self._told, self._steps):
            waiting.clear()
        for engine in self._up():
            engine.recover()

    def close(self) -> None:
        self.folder.tell_closing()
        self._is_closing.set()
        self._threads.shutdown()  # Waits for running steps.
        for each in self.engines:
            each.close()
        self.folder.release()

    def _up(self) -> list[LLMEngine]:
        """Return the replicas that answer, including those that have just recovered."""
        for engine, (_, coming) in list(self._away.items()):
            if coming.done():
                del self._away[engine]
                coming.result()
        found = [each for each in self.engines if each not in self._away]
        if not found:
            raise AllAwayError("; ".join(why for why, _ in self._away.values()))
        return found

    def _check(self, engines: Sequence[LLMEngine]) -> None:
        for engine in engines:
            try:
                engine.check()
            except Exception as error:
                self._lose(engine, error)

    def _lose(self, engine: LLMEngine, error: Exception) -> None:
        why = describe(error)
        self._later[engine].clear()
        for name in [name for name, home in self._homes.items() if home is engine]:
            del self._homes[name]
            self._told.append(Token(request=name, token=None, finish="failed", failure=f"a replica has failed: {why}"))
        self._away[engine] = why, self._threads.submit(self._bring_back, engine)

    def _bring_back(self, engine: LLMEngine) -> None:
        while not self._is_closing.is_set():
            try:
                engine.recover()
            except Exception:
                self._is_closing.wait(_PAUSE_SECONDS)
            else:
                return

    def _num_cached(self, engine: LLMEngine, request: Request) -> int:
        pool, name, names = engine.scheduler.pool, first_name(engine.model_name, request.salt), []
        for begin in range(0, len(request.prompt) - pool.block_size, pool.block_size):
            name = next_name(name, request.prompt[begin : begin + pool.block_size])
            names.append(name)
        num_found = len(pool.find(names))
        return num_found if engine.tiers is None else num_found + engine.tiers.store.count_known(names[num_found:])

    def _num_to_do(self, engine: LLMEngine) -> int:
        """Return the tokens to compute; a request that is not delivered yet counts as one."""
        there = (*engine.scheduler.running, *engine.scheduler.waiting)
        return sum(each.num_left + 1 for each in there) + len(self._later[engine])
