"""Several engines behind one: a request goes where most of its beginning is cached, else where least is to be done."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

from shardwise.errors import ShardwiseError
from shardwise.serving.blocks import first_name, next_name
from shardwise.serving.engine import LLMEngine
from shardwise.serving.request import Load, Request, Token


class Replicas:
    """Engines of the same model, each with its own cache. They step at once, each in a thread."""

    def __init__(self, engines: Sequence[LLMEngine]) -> None:
        self.engines = list(engines)
        first = self.engines[0]
        self.max_length, self.vocabulary_size = first.max_length, first.vocabulary_size
        self.eos_token_ids, self.tokenizer_source, self.summary = (
            first.eos_token_ids,
            first.tokenizer_source,
            first.summary,
        )
        self._homes: dict[str, LLMEngine] = {}
        self._threads = ThreadPoolExecutor(len(self.engines))

    def add(self, request: Request) -> None:
        if request.id in self._homes:
            raise ShardwiseError(f"request {request.id!r} is being answered already", remedy="another id")
        best = max(self.engines, key=lambda each: (self._num_cached(each, request), -self._num_to_do(each)))
        best.add(request)
        self._homes[request.id] = best

    def cancel(self, request: str) -> None:
        if request in self._homes:
            self._homes[request].cancel(request)

    def has_work(self) -> bool:
        return any(each.has_work() for each in self.engines)

    def step(self) -> list[Token]:
        busy = [each for each in self.engines if each.has_work()]
        told = [token for tokens in self._threads.map(LLMEngine.step, busy) for token in tokens]
        for token in told:
            if token.finish is not None:
                del self._homes[token.request]
        return told

    def load(self) -> Load:
        loads = [each.load() for each in self.engines]
        return Load(**{each.name: sum(getattr(load, each.name) for load in loads) for each in fields(Load)})

    def close(self) -> None:
        self._threads.shutdown()
        for each in self.engines:
            each.close()

    def _num_cached(self, engine: LLMEngine, request: Request) -> int:
        pool, name, names = engine.scheduler.pool, first_name(engine.model_name, request.salt), []
        for begin in range(0, len(request.prompt) - pool.block_size, pool.block_size):
            name = next_name(name, request.prompt[begin : begin + pool.block_size])
            names.append(name)
        return len(pool.find(names))

    @staticmethod
    def _num_to_do(engine: LLMEngine) -> int:
        return sum(each.num_left + 1 for each in (*engine.scheduler.running, *engine.scheduler.waiting))
