"""`shardwise generate`: answer a file of requests without a server."""

import argparse
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from shardwise.answer import Answer, Canvas
from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.output import check_output, save_output
from shardwise.serving.batch_file import CHAT_URL, Line, answer_all, read_lines, write_line
from shardwise.serving.engine_options import add_engine_arguments, load_as_told
from shardwise.serving.served import served_by
from shardwise.units import counted
from shardwise.working import working_at

DESCRIPTION = """
Answer a file of requests in OpenAI's batch format, and write the answers to
another file.
"""
EXAMPLE = """
shardwise generate gpt2 --random-weights --prompt def --save out.jsonl
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--requests", metavar="FILE", help="one request per line, with its url and body")
    given.add_argument("--prompt", metavar="TEXT", help="continue this text by 16 tokens, instead of a file")
    parser.add_argument("--save", required=True, metavar="FILE", help="write one answer per line")
    parser.add_argument("--seed", type=int, metavar="N", help="seed for requests without one")


def run(arguments: argparse.Namespace) -> Answer:
    target = Path(arguments.save)
    if arguments.prompt is not None:
        text = json.dumps({"custom_id": "prompt", "body": {"prompt": arguments.prompt}})
    else:
        text = _read(Path(arguments.requests), target)
    check_output(target)
    lines = list(read_lines(text))
    working_at("weights read")
    engine = load_as_told(arguments, seed=arguments.seed)
    try:
        served = served_by(engine, chats=any(line.url == CHAT_URL for line in lines))
        working_at("requests answered")
        begun = perf_counter()
        try:
            answer_all(engine, served, lines)
        except BaseException:  # Also Ctrl-C: hours of answers are not for nothing.
            _keep_answered(target, lines)
            raise
        seconds = perf_counter() - begun
    finally:
        engine.close()
    save_output(target, "".join(write_line(line) + "\n" for line in lines))
    num_tokens = sum(line.num_tokens for line in lines)
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
        first, *others = engine.summary.lines()
        canvas.print(canvas.paint(first, "bold"))
        for line in others:
            canvas.print(line)
        refused = f", {num_refused} refused" if num_refused else ""
        first_refusal = next(((line.custom_id, line.error) for line in lines if line.error is not None), None)
        num_answered = counted(len(lines) - num_refused, "request")
        canvas.print(
            f"{num_answered} answered{refused}: {num_tokens:,} tokens in {seconds:.1f} s,"
            f" {num_tokens / seconds:,.0f} a second; {target}"
        )
        if first_refusal is not None:
            canvas.print(f"the first refused, {first_refusal[0]}: {first_refusal[1].message}")
        elif arguments.prompt is not None:
            canvas.print(f"\n{arguments.prompt}{lines[0].written[0].whole().text}")

    return Answer(data=data, render=render, status=1 if lines and num_refused == len(lines) else 0)


def _keep_answered(target: Path, lines: Sequence[Line]) -> None:
    """Save the answers of an interrupted run, under another name: the file that was asked for is whole or absent."""
    done = [line for line in lines if line.is_answered]
    if not done:
        return
    part = target.with_name(f"{target.name}.part")
    save_output(part, "".join(write_line(line) + "\n" for line in done))
    warnings.warn(f"{len(done)} of {len(lines)} requests were answered; their answers are in {part}", stacklevel=2)


def _read(path: Path, target: Path) -> str:
    """Read the requests. The answers may not replace them."""
    with os_errors_as(f"{path} cannot be read", remedy="--requests FILE, a request a line"):
        content = path.read_bytes()
        if target.exists() and target.samefile(path):
            raise ShardwiseError(f"--save {target} would replace the requests", remedy="--save out.jsonl")
    try:
        return content.decode().removeprefix("\ufeff")  # Programs of Windows begin files with it.
    except UnicodeDecodeError as error:
        raise ShardwiseError(
            f"{path} is not text in UTF-8: byte {error.start} is {content[error.start]:#04x}",
            remedy="--requests with a file of JSON lines",
        ) from None
