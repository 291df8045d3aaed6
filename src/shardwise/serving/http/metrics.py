"""Metrics for Prometheus at `/metrics`. Names are vLLM's after the prefix, so that dashboards can be reused."""

from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from shardwise.serving.http.api_error import ApiError
from shardwise.serving.http.engine_loop import EngineLoop, Ticket

PREFIX = "shardwise:"
_FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_STEP = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
#: Monotonic fields of the engine's load.
_COUNTERS = (
    "num_preemptions", "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits",
    "kv_offload_load_bytes", "kv_offload_store_bytes", "kv_offload_load_seconds", "kv_offload_store_seconds",
)  # fmt: skip
_RENAMED = {
    "num_running": "num_requests_running",
    "num_waiting": "num_requests_waiting",
    "kv_offload_load_seconds": "kv_offload_load_time",
    "kv_offload_store_seconds": "kv_offload_store_time",
    "kv_offload_host_usage": "kv_offload_cpu_cache_usage_perc",
}
_SHOWN_OTHERWISE = ("num_blocks", "num_used_blocks")


class ServerMetrics:
    """Request times are counted here; the engine's state is read at each scrape."""

    def __init__(self, model: str) -> None:
        from prometheus_client import CollectorRegistry, Counter, Histogram

        self._model, self._loop = model, None
        self.registry = CollectorRegistry()

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Any:
            made = Histogram(PREFIX + name, about, ["model_name"], buckets=buckets, registry=self.registry)
            return made.labels(model)

        self._first = histogram("time_to_first_token_seconds", "from the request to its first token", _FIRST)
        self._between = histogram("inter_token_latency_seconds", "between two tokens of a request", _BETWEEN)
        self._whole = histogram("e2e_request_latency_seconds", "from the request to its last token", _WHOLE)
        self._queued = histogram("request_queue_time_seconds", "from the request to the engine", _WHOLE)
        self._step = histogram("iteration_tokens_total", "tokens that a step has given", _STEP)
        self._success = Counter(
            PREFIX + "request_success", "requests answered, by how they ended", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self._refused = Counter(
            PREFIX + "request_refused", "requests refused, by the HTTP status", ["model_name", "status"],
            registry=self.registry,
        )  # fmt: skip

    def watch(self, loop: EngineLoop) -> None:
        """Report this engine from now on."""
        self.registry.register(_LoadCollector(loop, self._model))

    def stepped(self, num_tokens: int) -> None:
        self._step.observe(num_tokens)

    def first_token(self, ticket: Ticket) -> None:
        if ticket.first_at is not None:
            self._first.observe(ticket.first_at - ticket.asked_at)
        if ticket.begun_at is not None:
            self._queued.observe(ticket.begun_at - ticket.asked_at)

    def next_token(self, seconds: float) -> None:
        self._between.observe(seconds)

    def finished(self, seconds: float, reason: str) -> None:
        self._whole.observe(seconds)
        self._success.labels(self._model, reason).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def text(self) -> bytes:
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class NoMetrics:
    """Without prometheus_client nothing is counted, and a scrape returns an error that says so."""

    def watch(self, loop: EngineLoop) -> None: ...

    def stepped(self, num_tokens: int) -> None: ...

    def first_token(self, ticket: Ticket) -> None: ...

    def next_token(self, seconds: float) -> None: ...

    def finished(self, seconds: float, reason: str) -> None: ...

    def refused(self, status: int) -> None: ...

    def text(self) -> bytes:
        raise ApiError(
            501,
            "metrics need prometheus_client, which is not installed where the model is served. "
            "There: pip install 'shardwise[serve]'",
        )


def make_metrics(model: str) -> ServerMetrics | NoMetrics:
    return NoMetrics() if find_spec("prometheus_client") is None else ServerMetrics(model)


class _LoadCollector:
    """The engine's load in Prometheus's form. Fields that a later engine adds appear under their own names."""

    def __init__(self, loop: EngineLoop, model: str) -> None:
        self._loop, self._model = loop, model

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        load = self._loop.load
        values = asdict(load)
        values["num_waiting"] += self._loop.num_waiting
        for name, value in values.items():
            if name in _SHOWN_OTHERWISE or not isinstance(value, (int, float)):
                continue
            family = CounterMetricFamily if name in _COUNTERS else GaugeMetricFamily
            made = family(PREFIX + _RENAMED.get(name, name), name.replace("_", " "), labels=["model_name"])
            made.add_metric([self._model], value)
            yield made
        used = GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", "part of the KV blocks in use", labels=["model_name"])
        used.add_metric([self._model], load.num_used_blocks / max(1, load.num_blocks))
        yield used
