"""`shardwise generate`: a file of requests answered without a server."""

import argparse
from pathlib import Path
from time import perf_counter

from shardwise.answer import Answer, Canvas
from shardwise.errors import os_errors_as
from shardwise.output import check_output, save_output
from shardwise.serving.batch_file import answer_all, read_lines, write_line
from shardwise.serving.load import load_engine
from shardwise.training.data.tokenizer import get_tokenizer
from shardwise.units import parse_bytes
from shardwise.working import working_at

DESCRIPTION = """
Answer a file of requests in OpenAI's batch form, and write their answers to another.
"""
EXAMPLE = "shardwise generate runs/first --requests in.jsonl --save out.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="a Hugging Face folder, a run of shardwise train (default: the newest), a file.gguf, or a name",
    )  # fmt: skip
    parser.add_argument("--requests", required=True, metavar="FILE", help="a request a line, as /v1/completions")
    parser.add_argument("--save", required=True, metavar="FILE", help="an answer a line")
    parser.add_argument("--random-weights", action="store_true", help="for a name of the catalogue: weights are drawn")
    parser.add_argument("--precision", metavar="P", help="fp32, bf16 or fp16 (default: as the weights are)")
    parser.add_argument("--kv", metavar="BYTES", help="for the KV cache, such as 4GiB (default: what is free)")
    parser.add_argument("--seed", type=int, metavar="N", help="for requests that have no seed of their own")


def run(arguments: argparse.Namespace) -> Answer:
    requests, target = Path(arguments.requests), Path(arguments.save)
    with os_errors_as(f"{requests} cannot be read", remedy="--requests FILE, a request a line"):
        text = requests.read_text(encoding="utf-8")
    check_output(target)
    working_at("weights read")
    engine = load_engine(
        arguments.model,
        random_weights=arguments.random_weights,
        precision=arguments.precision,
        kv_bytes=None if arguments.kv is None else parse_bytes(arguments.kv),
        seed=arguments.seed,
    )
    tokenizer = get_tokenizer(engine.tokenizer_source)
    lines = list(read_lines(text, tokenizer))
    working_at("requests answered")
    begun = perf_counter()
    answer_all(engine, lines)
    seconds = perf_counter() - begun
    engine.close()
    save_output(target, "".join(write_line(line, engine.summary.model, tokenizer) + "\n" for line in lines))
    num_tokens = sum(len(line.tokens) for line in lines)
    num_refused = sum(line.error is not None for line in lines)
    data = {
        "saved": str(target),
        "num_requests": len(lines),
        "num_refused": num_refused,
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "num_blocks": engine.summary.num_blocks,
        "weight_bytes": engine.summary.weight_bytes,
        "kv_bytes": engine.summary.kv_bytes,
    }

    def render(canvas: Canvas) -> None:
        for line in engine.summary.lines():
            canvas.print(line)
        refused = f", {num_refused} refused" if num_refused else ""
        canvas.print(
            f"{len(lines)} requests answered{refused}: {num_tokens:,} tokens in {seconds:.1f} s,"
            f" {num_tokens / seconds:,.0f} a second; {target}"
        )

    return Answer(data=data, render=render, status=1 if lines and num_refused == len(lines) else 0)
