"""`shardwise generate`: answer a file of requests without a server."""

import argparse
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from shardwise.answer import Answer, Canvas
from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.output import check_output, save_output
from shardwise.serving.batch_file import CHAT_URL, Line, answer_all, answer_of, read_lines, write_line
from shardwise.serving.batch_part import AnswersSoFar, hash_of
from shardwise.serving.engine_options import add_engine_arguments, load_as_told
from shardwise.serving.served import Words, read_words, served_by
from shardwise.serving.summary import Summary
from shardwise.units import counted
from shardwise.working import working_at

DESCRIPTION = """
Answer a file of requests in OpenAI's batch format, and write the answers to
another file. What is answered is kept in FILE.part until all is; after an
interruption, the same command goes on from there.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ran:
    """What this run has computed."""

    summary: Summary | None = None
    seconds: float = 0.0
    num_tokens: int = 0

    @property
    def tokens_per_second(self) -> float | None:
        return self.num_tokens / self.seconds if self.seconds else None


def run(arguments: argparse.Namespace) -> Answer:
    target = Path(arguments.save)
    if arguments.prompt is not None:
        text = json.dumps({"custom_id": "prompt", "body": {"prompt": arguments.prompt}})
    else:
        text = _read(Path(arguments.requests), target)
    check_output(target)
    lines = list(read_lines(text))
    _warn_of_refused(lines)
    words, model = _look_at_model(arguments, lines)
    with AnswersSoFar(target) as so_far:
        hashes = {line.name: hash_of(model, line.custom_id, line.url, line.body) for line in lines}
        num_kept = _take_over(so_far, lines, hashes)
        ran = _Ran()
        if any(line.is_open for line in lines):
            try:
                ran = _answer(arguments, words, lines, so_far, hashes)
            except BaseException:  # Also Ctrl-C.
                _tell_interrupted(so_far, lines)
                raise
        save_output(target, "".join(write_line(line) + "\n" for line in lines))
        so_far.remove()
    return _told(arguments, lines, num_kept, ran)


def _warn_of_refused(lines: Sequence[Line]) -> None:
    """Say before the weights are read what will not be answered."""
    refused = [line for line in lines if line.error is not None]
    if refused and len(lines) > 1:
        first = refused[0]
        warnings.warn(
            f"{len(refused)} of {counted(len(lines), 'request')} cannot be answered; the first, line {first.number}:"
            f" {first.error.message if first.error is not None else ''}", stacklevel=2,
        )  # fmt: skip


def _look_at_model(arguments: argparse.Namespace, lines: Sequence[Line]) -> tuple[Words, list[Any]]:
    """Read all that is needed of the model but its weights, and return what answers depend on beside a request."""
    from shardwise.serving.identify import find_newest_run, identify  # Loads torch.

    if arguments.model is None:
        arguments.model = str(find_newest_run())
    identity = identify(arguments.model, random_weights=arguments.random_weights)
    words = read_words(identity.tokenizer_source, identity.suggested, chats=any(line.url == CHAT_URL for line in lines))
    told = [identity.name, identity.fingerprint, arguments.precision, arguments.weights, arguments.seed]
    return words, told


def _take_over(so_far: AnswersSoFar, lines: Sequence[Line], hashes: dict[str, str]) -> int:
    """Take the answers of an interrupted run that are to these requests, and return how many they are."""
    num_kept = 0
    for line in lines:
        kept = so_far.found.get(hashes[line.name])
        if line.is_open and kept is not None:
            line.answer = kept
            num_kept += 1
    num_found = len(so_far.found)
    if num_found and not num_kept:
        raise ShardwiseError(
            f"{so_far.path} has {counted(num_found, 'answer')} of an interrupted run, and none to these requests with"
            " this model, precision and seed",
            remedy=f"the same command as then, another --save, or rm {so_far.path}",
        )
    if num_found > num_kept:
        warnings.warn(
            f"{counted(num_found - num_kept, 'answer')} in {so_far.path} are to requests that have changed, and are"
            " not used", stacklevel=2,
        )  # fmt: skip
    return num_kept


def _answer(
    arguments: argparse.Namespace, words: Words, lines: Sequence[Line], so_far: AnswersSoFar, hashes: dict[str, str]
) -> _Ran:
    """Answer what has no answer."""
    working_at("weights read")
    engine = load_as_told(arguments)
    num_done, num_tokens = sum(not line.is_open for line in lines), 0

    def answered(line: Line) -> None:
        nonlocal num_done, num_tokens
        num_done, num_tokens = num_done + 1, num_tokens + line.num_tokens
        so_far.add(hashes[line.name], answer_of(line))
        working_at("requests answered", num_done, len(lines))

    try:
        served = served_by(engine, words=words)
        working_at("requests answered", num_done, len(lines))
        begun = perf_counter()
        answer_all(engine, served, lines, seed=arguments.seed, answered=answered)
        return _Ran(summary=engine.summary, seconds=perf_counter() - begun, num_tokens=num_tokens)
    finally:
        engine.close()


def _tell_interrupted(so_far: AnswersSoFar, lines: Sequence[Line]) -> None:
    num_answered = sum(line.answer is not None for line in lines)
    if num_answered:
        warnings.warn(
            f"{num_answered} of {counted(len(lines), 'request')} are answered, in {so_far.path}; the same command goes"
            " on from there", stacklevel=2,
        )  # fmt: skip


def _told(arguments: argparse.Namespace, lines: Sequence[Line], num_kept: int, ran: _Ran) -> Answer:
    summary, speed = ran.summary, ran.tokens_per_second
    num_refused = sum(line.error is not None for line in lines)
    data = {
        "saved": arguments.save,
        "num_requests": len(lines),
        "num_refused": num_refused,
        "num_kept": num_kept,
        "num_tokens": sum(line.num_tokens for line in lines),
        "seconds": ran.seconds,
        "tokens_per_second": speed,
        "num_blocks": None if summary is None else summary.num_blocks,
        "weight_bytes": None if summary is None else summary.weight_bytes,
        "kv_bytes": None if summary is None else summary.kv_bytes,
    }

    def render(canvas: Canvas) -> None:
        for number, said in enumerate([] if summary is None else summary.lines()):
            canvas.print(said if number else canvas.paint(said, "bold"))
        refused = f", {num_refused} refused" if num_refused else ""
        before = f", {num_kept} of them before" if num_kept else ""
        took = "" if speed is None else f": {ran.num_tokens:,} tokens in {ran.seconds:.1f} s, {speed:,.0f} a second"
        num_answered = counted(len(lines) - num_refused, "request")
        canvas.print(f"{num_answered} answered{before}{refused}{took}; {arguments.save}")
        first = next((line for line in lines if line.error is not None), None)
        if first is not None and first.error is not None:
            canvas.print(f"the first refused, {first.custom_id}: {first.error.message}")
        elif arguments.prompt is not None and lines[0].answer is not None:
            canvas.print(f"\n{arguments.prompt}{lines[0].answer['choices'][0]['text']}")

    return Answer(data=data, render=render, status=1 if num_refused == len(lines) else 0)


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
