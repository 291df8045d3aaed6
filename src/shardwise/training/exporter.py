"""Metrics of a run in Prometheus' text format: over HTTP, or in a file for node_exporter's textfile collector.

Only the first rank exports. Values are those of the last logged step. Ages are computed at each request.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.output import write_whole
from shardwise.trace.journal import Event
from shardwise.training.job import Watching

PREFIX = "shardwise_train_"
_HELP = {
    "info": "the run and its plan",
    "step": "steps that are done",
    "steps": "steps of the whole run",
    "loss": "of the last step",
    "tokens_per_second": "since the line before",
    "mfu": "part of the devices' peak that is used",
    "memory_bytes": "what the fullest rank has held at most",
    "restarts_total": "how often ranks were started again",
    "checkpoint_age_seconds": "since the last checkpoint was begun",
    "copy_age_seconds": "since the last copy in memory",
    "part_seconds": "of a step, what the mean rank did with it",
    "slow_rank": "ranks that are slow, and by what",
    "corruptions_total": "how often ranks computed or held other numbers than they should",
}


@dataclass(slots=True, kw_only=True)
class Facts:
    """The exported values. Times are of `time.monotonic`, so changes of the system clock do not matter."""

    run: str
    plan: str
    numbers: dict[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    slow: tuple[tuple[int, str, str], ...] = ()
    saved: float | None = None
    copied: float | None = None

    def count(self, events: list[Event]) -> None:
        """Count restarts and corruptions in the journal of the run."""
        starts = sum(each["event"] == "start" for each in events)
        self.numbers["restarts_total"] = max(0, starts - 1)
        self.numbers["corruptions_total"] = sum(each["event"] == "corrupt" for each in events)


def text_of(facts: Facts, now: float) -> str:
    """Return all metrics in Prometheus' text format."""
    return "".join(_lines(facts, now))


def _lines(facts: Facts, now: float) -> Iterator[str]:
    ages = {"checkpoint_age_seconds": facts.saved, "copy_age_seconds": facts.copied}
    numbers = {**facts.numbers, **{name: now - then for name, then in ages.items() if then is not None}}
    yield from _family("info", [({"run": facts.run, "plan": facts.plan}, 1)])
    for name, value in numbers.items():
        yield from _family(name, [({}, value)])
    if facts.parts:
        yield from _family("part_seconds", [({"part": part}, value) for part, value in facts.parts.items()])
    slow = [({"rank": str(rank), "host": host, "cause": cause}, 1) for rank, host, cause in facts.slow]
    yield from _family("slow_rank", slow)


def _family(name: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    kind = "counter" if name.endswith("_total") else "gauge"
    yield f"# HELP {PREFIX}{name} {_HELP[name]}\n# TYPE {PREFIX}{name} {kind}\n"
    for labels, value in samples:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{PREFIX}{name}{f'{{{inside}}}' if inside else ''} {float(value)!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class Exporter:
    """Exports the metrics of a run at a port, in a file, both or neither."""

    def __init__(self, watching: Watching, facts: Facts) -> None:
        self.facts, self._file = facts, watching.file
        self._server: ThreadingHTTPServer | None = None
        if watching.port is not None:
            self._server = _serve(watching.host, watching.port, facts)

    @property
    def port(self) -> int | None:
        return None if self._server is None else int(self._server.server_address[1])

    def tell(self) -> None:
        """Write the file again after a change. A full disk does not end the run."""
        if self._file is not None:
            with suppress(OSError, ShardwiseError):
                write_whole(self._file, text_of(self.facts, time.monotonic()))

    def close(self) -> None:
        """Stop the server, and delete the file, which would be stale."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)


def check_exporter(watching: Watching) -> None:
    """Refuse, before ranks are started, a port that is taken and a file that node_exporter would not read."""
    if watching.port is not None and not 0 <= watching.port <= 65535:
        raise ShardwiseError(f"--metrics-port {watching.port}: ports are 1 to 65535", remedy="--metrics-port 9400")
    if watching.port:
        _serve(watching.host, watching.port, None).server_close()
    if watching.file is None:
        return
    if watching.file.suffix != ".prom":
        raise ShardwiseError(
            f"--metrics-file {watching.file}: node_exporter reads files that end in .prom",
            remedy=f"--metrics-file {watching.file.with_suffix('.prom')}",
        )
    if not watching.file.parent.is_dir():
        raise ShardwiseError(
            f"--metrics-file {watching.file}: there is no folder {watching.file.parent}",
            remedy="the folder of node_exporter's --collector.textfile.directory",
        )


def _serve(host: str, port: int, facts: Facts | None) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = self.path.partition("?")[0] in ("/metrics", "/")
            body = text_of(facts, time.monotonic()).encode() if facts is not None and is_known else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Keep requests out of the training log."""

    try:
        server = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ShardwiseError(
            f"metrics cannot be served at {host}:{port}: {error.strerror}", remedy=f"--metrics-port {port + 1}"
        ) from None
    server.daemon_threads = True
    if facts is not None:
        threading.Thread(target=server.serve_forever, name="shardwise-metrics", daemon=True).start()
    return server
