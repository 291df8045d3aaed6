"""`shardwise chat`: talk with a model in the terminal."""

import argparse
import asyncio
import sys
from typing import Any

from shardwise.answer import Answer, Canvas, canvas_on
from shardwise.errors import ShardwiseError
from shardwise.serving.client.http_client import Address, HttpStatusError
from shardwise.serving.client.server_process import server_for
from shardwise.units import counted
from shardwise.working import step_aside, working_at

DESCRIPTION = """
Chat with a model: each line that you type is a message, and the answer is
printed as it arrives. An empty line or the end of the input ends the chat.

TARGET is the address of a server, or a model to serve for the chat (default: the
newest run under runs/).
"""

EXAMPLE = "shardwise chat runs/first --show"
_MOST_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", nargs="?", metavar="TARGET", help="http://host:port, or a model (default: newest run)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens per answer (default: 512, or what the model has room for)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0 takes the likeliest token (default: 0.7)"
    )
    parser.add_argument("--random-weights", action="store_true", help="use random weights, for a known model")
    parser.add_argument("--api-key", metavar="K", help="API key of the server")
    parser.add_argument("--show", action="store_true", help="show the model to chat with, and do not start")


def run(arguments: argparse.Namespace) -> Answer:
    if arguments.max_tokens is not None and arguments.max_tokens < 1:
        raise ShardwiseError(f"--max-tokens {arguments.max_tokens}: it must be at least 1", remedy="--max-tokens 512")
    if not 0 <= arguments.temperature <= 2:
        raise ShardwiseError(
            f"--temperature {arguments.temperature:g}: it must be from 0 to 2", remedy="--temperature 0.7"
        )
    if arguments.show:
        target = arguments.target or "the newest run under runs/"
        data = {"target": target, "max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
        return Answer(
            data=data, render=lambda canvas: canvas.print(f"one would talk with {canvas.paint(target, 'bold')}")
        )
    working_at("the model")
    options = ["--random-weights"] if arguments.random_weights else []
    with server_for(arguments.target, options, arguments.api_key) as address:
        step_aside()
        messages = asyncio.run(_talk(address, arguments, canvas_on(sys.stderr if arguments.json else sys.stdout)))
    said = [message for message in messages if message["role"] == "assistant"]
    return Answer(
        data={"messages": messages},
        render=lambda canvas: canvas.print(canvas.paint(counted(len(said), "answer"), "dim")),
    )


async def _talk(address: Address, arguments: argparse.Namespace, canvas: Canvas) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages: list[dict[str, Any]] = []
    first = 0  # The first message that the model still has room for.
    while text := _next_line(canvas):
        messages.append({"role": "user", "content": text})
        most = arguments.max_tokens or _MOST_TOKENS
        body = {"stream": True, "max_tokens": most, "temperature": arguments.temperature}
        while True:
            try:
                written = await _print_answer(address, body | {"messages": [*system, *messages[first:]]}, canvas)
                break
            except HttpStatusError as error:
                too_long = error.code == "context_length_exceeded"
                if too_long and error.param == "max_tokens" and arguments.max_tokens is None and "max_tokens" in body:
                    del body["max_tokens"]  # The server takes what is left of the model's length.
                elif too_long and error.param == "prompt" and first < len(messages) - 1:
                    first += 2
                    canvas.print(
                        canvas.paint("(the conversation is too long for the model: it begins later now)", "dim")
                    )
                else:
                    raise error.told() from None
        messages.append({"role": "assistant", "content": written})
    return [*system, *messages]


async def _print_answer(address: Address, body: dict[str, Any], canvas: Canvas) -> str:
    """Print an answer as it arrives, and return it."""
    written = ""
    async for event in address.events("/v1/chat/completions", body):
        part = event["choices"][0]["delta"].get("content") or "" if event["choices"] else ""
        written += part
        canvas.stream.write(part)
        canvas.stream.flush()
    canvas.print()
    return written


def _next_line(canvas: Canvas) -> str:
    if sys.stdin.isatty():
        canvas.stream.write(canvas.paint("> ", "bold"))
        canvas.stream.flush()
    return sys.stdin.readline().strip()
