"""`shardwise bench`: measure how fast a server answers."""

import argparse
import asyncio
from pathlib import Path
from typing import Any

from shardwise.answer import Answer, Canvas, table
from shardwise.errors import ShardwiseError
from shardwise.output import check_output, save_output
from shardwise.serving.client.bench_requests import SHAPES, BenchRequest, make_requests
from shardwise.serving.client.bench_run import Measured, measure
from shardwise.serving.client.http_client import Address, HttpStatusError
from shardwise.serving.client.server_process import server_for
from shardwise.units import format_seconds
from shardwise.working import working_at

DESCRIPTION = """
Measure a server: time to the first token, time between tokens, and throughput.
The requests of a --workload are always the same. They are sent all at once, or
at random times with each of the given rates.

TARGET is the address of a server with OpenAI's API that returns token ids, or
a model, which is served during the run. --save writes a page with curves.
"""

EXAMPLE = """
shardwise bench runs/first --workload 256-requests --show
shardwise bench http://127.0.0.1:8000 --rate 1,2,4 --requests 16 --save bench.html --show
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", nargs="?", metavar="TARGET", help="http://host:port, or a model (default: newest run)"
    )
    parser.add_argument(
        "--workload", default="256-requests", metavar="NAME", help=f"{', '.join(SHAPES)} (default: 256-requests)"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="send only the first N requests")
    parser.add_argument(
        "--rate", metavar="R,R,...", help="requests per second, one rate after another (default: all at once)"
    )
    parser.add_argument("--vocabulary", type=int, metavar="N", help="vocabulary of prompts (default: found by asking)")
    parser.add_argument("--random-weights", action="store_true", help="use random weights, for a known model")
    parser.add_argument("--api-key", metavar="K", help="API key of the server")
    parser.add_argument("--save", metavar="FILE", help="write a page with curves")
    parser.add_argument("--show", action="store_true", help="show the requests, and do not send them")


def run(arguments: argparse.Namespace) -> Answer:
    rates = _rates(arguments.rate)
    requests = make_requests(arguments.workload, vocabulary=arguments.vocabulary, count=arguments.requests)
    if arguments.save is not None:
        check_output(Path(arguments.save))
    if arguments.show:
        return _shown(arguments.workload, requests)
    working_at("the model")
    options = ["--random-weights"] if arguments.random_weights else []
    with server_for(arguments.target, options, arguments.api_key) as address:
        try:
            measured = asyncio.run(_measure_all(address, arguments, rates))
        except HttpStatusError as error:
            raise error.told() from None
    if arguments.save is not None:
        from shardwise.serving.client.bench_page import make_bench_page

        title = f"{arguments.workload} on {arguments.target or 'the newest run'}"
        save_output(Path(arguments.save), make_bench_page(title, measured))
    data = {"workload": arguments.workload, "measured": [each.figures() for each in measured], "page": arguments.save}
    return Answer(data=data, render=lambda canvas: _render(canvas, measured, arguments.save))


async def _measure_all(address: Address, arguments: argparse.Namespace, rates: list[float | None]) -> list[Measured]:
    vocabulary = arguments.vocabulary or await _find_vocabulary(address)
    requests = make_requests(arguments.workload, vocabulary=vocabulary, count=arguments.requests)
    measured = []
    for place, rate in enumerate(rates):
        working_at("requests", place, len(rates))
        measured.append(await measure(address, requests, rate))
    return measured


async def _find_vocabulary(address: Address) -> int | None:
    """Return the size of the model's vocabulary, if its server reports it."""
    models: Any = await address.get("/v1/models")
    size = models["data"][0].get("vocabulary_size")
    return int(size) if size else None


def _rates(text: str | None) -> list[float | None]:
    if text is None:
        return [None]
    try:
        rates = [float(each) for each in text.split(",")]
    except ValueError:
        rates = [0.0]
    if any(not 0 < rate < 1e6 for rate in rates):
        raise ShardwiseError(f"--rate {text}: rates are positive numbers of requests a second", remedy="--rate 1,2,4")
    return list(rates)


def _shown(name: str, requests: list[BenchRequest]) -> Answer:
    num_in, num_out = sum(len(each.prompt) for each in requests), sum(each.max_tokens for each in requests)
    data = {"workload": name, "num_requests": len(requests), "input_tokens": num_in, "output_tokens": num_out}

    def render(canvas: Canvas) -> None:
        canvas.print(f"{canvas.paint(name, 'bold')}: {len(requests)} requests, {num_in:,} tokens in, {num_out:,} out")

    return Answer(data=data, render=render)


def _render(canvas: Canvas, measured: list[Measured], page: str | None) -> None:
    from shardwise.serving.client.bench_page import rate_text

    rows = []
    for each in measured:
        found = each.figures()
        times = [found["first_token_seconds"], found["between_tokens_seconds"]]
        rows.append(
            [
                rate_text(each.rate), found["num_requests"], found["num_refused"],
                f"{found['output_tokens_per_second']:,.0f}",
                *(format_seconds(part[name]) if part else "-" for part in times for name in ("p50", "p99")),
            ]
        )  # fmt: skip
    names = ["rate", "requests", "refused", "tokens/s", "first p50", "p99", "between p50", "p99"]
    table(names, rows, canvas)
    if page is not None:
        canvas.print(f"\nwritten: {page}")
