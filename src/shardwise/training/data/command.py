"""`shardwise data`: make and check token files."""

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.answer import Answer, Canvas
from shardwise.errors import ShardwiseError
from shardwise.output import check_output
from shardwise.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from shardwise.training.data.tokens import Tokens

DESCRIPTION = """
Make a token file from text, JSON lines (.jsonl), Parquet (.parquet), a folder
of these, or `stdlib`, the sources of Python's standard library. Training maps
it into memory. Without --save, the file is made, measured and discarded.
"""

EXAMPLE = """
shardwise data stdlib --limit 200kB
shardwise data stdlib --limit 1MB --save stdlib.tokens
shardwise data --check stdlib.tokens
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", nargs="*", metavar="INPUT", help="files, folders, or stdlib")
    parser.add_argument("--save", metavar="FILE", help="write the token file here")
    parser.add_argument("--check", metavar="FILE", help="verify the checksums of a token file")
    parser.add_argument(
        "--tokenizer", default="bytes", metavar="T", help="bytes, a tokenizer.json or its folder (default: bytes)"
    )
    parser.add_argument("--field", default="text", metavar="NAME", help="key or column with the text (default: text)")
    parser.add_argument("--limit", metavar="SIZE", help="read at most this much text, such as 10MB")


def run(arguments: argparse.Namespace) -> Answer:
    from shardwise.training.data.tokens import open_tokens  # Loads numpy.

    if arguments.check is not None:
        if arguments.sources or arguments.save:
            raise ShardwiseError(
                "--check reads one token file and makes none", remedy=f"shardwise data --check {arguments.check}"
            )
        tokens = open_tokens(Path(arguments.check))
        tokens.verify()
        return _answer(tokens, verb="is whole", path=arguments.check)
    if not arguments.sources:
        raise ShardwiseError("there is nothing to read", remedy="shardwise data stdlib, or a file of text")
    from shardwise.training.data.source import make_tokens
    from shardwise.training.data.tokenizer import get_tokenizer

    if arguments.save and Path(arguments.save).parent.is_dir():  # Otherwise the folder is created.
        check_output(Path(arguments.save), remedy="--save FILE, at another place")
    limit = None if arguments.limit is None else parse_bytes(arguments.limit)
    tokenizer = get_tokenizer(arguments.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(arguments.save) if arguments.save else Path(folder) / "tokens"
        tokens = make_tokens(arguments.sources, path, tokenizer, field=arguments.field, limit_bytes=limit)
        return _answer(tokens, verb="saved" if arguments.save else "would be made", path=arguments.save)


def _answer(tokens: "Tokens", *, verb: str, path: str | None) -> Answer:
    data: dict[str, object] = {
        "path": path,
        "num_tokens": tokens.num_tokens,
        "num_documents": tokens.num_documents,
        "vocabulary": tokens.vocabulary,
        "tokenizer": tokens.tokenizer,
        "bytes": tokens.tokens.nbytes,
        "digest": tokens.digest,
    }

    def render(canvas: Canvas) -> None:
        canvas.print(
            f"{canvas.paint(path or 'a token file', 'bold')} {verb}: {data['num_tokens']} tokens of a vocabulary of"
            f" {data['vocabulary']} ({data['tokenizer']}), {data['num_documents']} documents,"
            f" {format_bytes(tokens.tokens.nbytes)}"
        )
        canvas.print(f"digest {data['digest']}")

    return Answer(data=data, render=render)
