"""`shardwise serve`: a model behind OpenAI's API."""

import argparse
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise import environment
from shardwise.answer import Answer, Canvas, canvas_on
from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.output import check_output
from shardwise.serving.engine_options import add_engine_arguments, load_as_told
from shardwise.serving.text.tokenizer import BYTES
from shardwise.trace.run import MANIFEST
from shardwise.units import counted
from shardwise.working import step_aside, working_at

if TYPE_CHECKING:
    from shardwise.serving.engine_process import EngineProcess
    from shardwise.serving.http.app import Server

DESCRIPTION = """
Serve a model over HTTP with OpenAI's API: /v1/completions and
/v1/chat/completions, with /health, /metrics, /openapi.json, and a chat page at
/ that shows what the engine does.

MODEL is a Hugging Face folder, a run of `shardwise train` (default: the newest
under runs/), a GGUF file, or a known model with --random-weights. With --json,
one line with `url` and the figures is printed when the server is ready. Ctrl-C
or SIGTERM stops it: requests under way have 5 seconds to end.
"""

EXAMPLE = """
shardwise serve runs/first --port 0 --show
shardwise serve llama-3.1-8b --random-weights --port 0 --show
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port; 0 takes a free one (default: 8000)")
    parser.add_argument("--api-key", metavar="K", help="key for clients (default: variable SHARDWISE_API_KEY)")
    parser.add_argument("--name", metavar="NAME", help="name of the model for clients (default: its own)")
    parser.add_argument("--queue", type=int, default=256, metavar="N", help="requests that may wait (default: 256)")
    parser.add_argument(
        "--record", type=Path, metavar="DIR", help="record what requests wait for, for doctor and report"
    )
    parser.add_argument("--show", action="store_true", help="show what would be served, and do not serve")


def run(arguments: argparse.Namespace) -> Answer:
    _check_installed()
    from shardwise.serving.http.app import Server
    from shardwise.serving.http.server import check_address, open_socket, serve_app, url_of

    key = arguments.api_key or environment.find_variable("SHARDWISE_API_KEY") or None
    if arguments.api_key == "":
        raise ShardwiseError("--api-key is empty, so any client could ask", remedy="--api-key KEY, or leave it out")
    check_address(arguments.host, key)
    if arguments.queue < 1:
        raise ShardwiseError(f"--queue {arguments.queue}: it must be at least 1", remedy="--queue 256")
    if arguments.record is not None and not arguments.show:
        with os_errors_as(f"--record {arguments.record} is no folder to write to", remedy="--record with another"):
            arguments.record.mkdir(parents=True, exist_ok=True)
        check_output(arguments.record / MANIFEST)
    with open_socket(arguments.host, arguments.port) as listening:
        url = url_of(listening)
        if arguments.show:
            return _shown(arguments, url, has_key=key is not None)
        working_at("the weights")
        from shardwise.serving.engine_process import EngineProcess
        from shardwise.serving.reading import Reading, look_at_model
        from shardwise.serving.served import served_by

        reading = Reading(arguments)
        engine = EngineProcess(
            partial(load_to_serve, arguments), first=partial(look_at_model, arguments), meanwhile=reading.look
        )
        try:
            served = served_by(engine, arguments.name, words=reading.words)
            server = Server(engine, served, key=key, most_waiting=arguments.queue)
        except BaseException:
            engine.close()
            raise
        step_aside()
        serve_app(
            server.app(), listening, drain=server.loop.drain,
            ready=lambda: _tell_ready(engine, server, url, as_json=arguments.json),
        )  # fmt: skip
    count = server.num_answered
    data = {"url": url, "num_answered": count, "generation_tokens": server.loop.load.generation_tokens}
    return Answer(data=data, render=lambda canvas: canvas.print(f"stopped; {counted(count, 'answer')} given"))


def load_to_serve(arguments: argparse.Namespace) -> Any:
    """Load the engine in its own process; if requested, with a recorder of the waiting times of requests."""
    engine = load_as_told(arguments)
    if arguments.record is None:
        return engine
    from shardwise.serving.request_trace import RecordedEngine

    return RecordedEngine(engine, arguments.record)


def _tell_ready(engine: "EngineProcess", server: "Server", url: str, *, as_json: bool) -> None:
    """Print one line of JSON for programs, or a few lines for people."""
    summary, served = engine.summary, server.served
    if as_json:
        data: dict[str, Any] = {
            "url": url,
            "model": served.name,
            "max_length": served.max_length,
            "num_blocks": summary.num_blocks,
            "block_size": summary.block_size,
            "block_bytes": summary.block_bytes,
            "kv_bytes": summary.kv_bytes,
            "weight_bytes": summary.weight_bytes,
            "reserve_bytes": summary.reserve_bytes,
            "host_bytes": summary.host_bytes,
            "file_bytes": summary.file_bytes,
            "num_ranks": summary.num_ranks,
            "plan": summary.plan,
            "seats": summary.seats,
            "predicted": None if summary.forecast is None else asdict(summary.forecast),
            "tokenizer": served.text.name,
            "has_chat_template": served.text.template is not None,
            "sampling": dict(served.sampling),
        }
        print(json.dumps(data), flush=True)
        return
    canvas = canvas_on(sys.stdout)
    for line in summary.lines():
        canvas.print(line)
    if served.text.name == BYTES:
        canvas.print("it has no tokenizer: every byte of a text is a token")
    if served.text.template is None:
        canvas.print("it has no chat template: messages are written as lines, `role: content`")
    if served.sampling:
        said = ", ".join(f"{field} {value:g}" for field, value in served.sampling.items())
        canvas.print(f"where a request does not say, its generation_config.json does: {said}")
    canvas.print(f"{canvas.paint('ready', 'bold')}: {url} (a page), {url}/v1 (OpenAI's API, model {served.name})")
    sys.stdout.flush()


def _shown(arguments: argparse.Namespace, url: str, *, has_key: bool) -> Answer:
    model = arguments.model or "the newest run under runs/"
    data = {"model": model, "url": url, "plan": arguments.plan, "has_key": has_key, "queue": arguments.queue}

    def render(canvas: Canvas) -> None:
        canvas.print(f"{canvas.paint(str(model), 'bold')} would be served at {url}")
        canvas.print(f"API key: {'wanted' if has_key else 'none; only this machine may ask'}")
        canvas.print(f"at most {counted(arguments.queue, 'request')} would wait")

    return Answer(data=data, render=render)


def _check_installed() -> None:
    """Refuse without the packages that every request needs. `/metrics` and chats report missing packages themselves."""
    missing = [name for name in ("starlette", "uvicorn") if not _is_there(name)]
    if missing:
        raise ShardwiseError(
            f"serving needs {', '.join(missing)}, not installed here", remedy="pip install 'shardwise[serve]'"
        )


def _is_there(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
