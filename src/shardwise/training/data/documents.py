"""Documents from text files, JSON lines and Parquet, or from Python's standard library."""

import json
import os
import sysconfig
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shardwise.errors import ShardwiseError, os_errors_as

#: The source that exists on every machine.
STDLIB = "stdlib"
_TEXT_ROWS = 1024
_LEFT_OUT = frozenset(
    ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "encodings", "pydoc_data")
)


def documents_of(source: str, *, field: str = "text") -> Iterator[bytes]:
    """Yield the documents of a source: `stdlib`, a folder, or a file whose suffix says its kind.

    `field` is the key in JSON lines, or the column in Parquet, that has the text.
    """
    if source == STDLIB:
        yield from _of_library()
        return
    path = Path(source)
    if not path.exists():
        raise ShardwiseError(f"{source} does not exist", remedy=f"a file of text, .jsonl or .parquet, or {STDLIB}")
    if path.is_dir():
        for each in sorted(path.rglob("*")):
            if each.is_file():
                yield from _of_file(each, field)
    else:
        yield from _of_file(path, field)


def _of_library() -> Iterator[bytes]:
    """Yield the modules of the standard library, shuffled by a hash of their names, so that all parts of the data are
    alike. Installed packages, tests and tables are left out."""
    root = sysconfig.get_paths()["stdlib"]
    inside: list[str] = []
    for folder, folders, files in os.walk(root):
        # Installed packages are often ten times as large, so their folders are not walked.
        folders[:] = [each for each in folders if each not in _LEFT_OUT]
        inside += [Path(folder, each).relative_to(root).as_posix() for each in files if each.endswith(".py")]
    for path in sorted(inside, key=lambda path: blake2b(path.encode()).digest()):
        yield Path(root, path).read_bytes()


def _of_file(path: Path, field: str) -> Iterator[bytes]:
    if path.suffix in (".jsonl", ".ndjson"):
        yield from _of_lines(path, field)
    elif path.suffix == ".parquet":
        yield from _of_parquet(path, field)
    else:
        with os_errors_as(f"{path} cannot be read", remedy="a file of text"):
            content = path.read_bytes()
        if not content:
            raise ShardwiseError(f"{path} is empty, at byte 0", remedy="a file with text in it")
        yield content


def _of_lines(path: Path, field: str) -> Iterator[bytes]:
    offset = 0
    with os_errors_as(f"{path} cannot be read", remedy="a file of JSON lines"), path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _text_of(line, field, f"line {number} of {path}, at byte {offset},")
            offset += len(line)
    if not offset:
        raise ShardwiseError(f"{path} is empty, at byte 0", remedy=f'lines like {{"{field}": "..."}}')


def _text_of(line: bytes, field: str, where: str) -> bytes:
    remedy = f'a line like {{"{field}": "..."}}'
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ShardwiseError(f"{where} is not valid JSON: {error}", remedy=remedy) from None
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        has = f"the keys {', '.join(map(str, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise ShardwiseError(f"{where} has no text under {field!r}: it has {has}", remedy=f"{remedy}, or --field NAME")
    try:
        return str(row[field]).encode()
    except UnicodeEncodeError as error:
        raise ShardwiseError(
            f"{where} has half a character under {field!r}, its {error.start}th: {error.reason}", remedy=remedy
        ) from None


def _of_parquet(path: Path, field: str) -> Iterator[bytes]:
    try:
        from pyarrow import ArrowException, parquet, types
    except ImportError:
        raise ShardwiseError(
            f"{path} is Parquet, which is read with pyarrow, and that is not installed",
            remedy="pip install 'shardwise[parquet]'",
        ) from None
    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise ShardwiseError(f"{path} is not a Parquet file: {error}", remedy="a whole file") from None
    schema = file.schema_arrow
    if field not in schema.names:
        raise ShardwiseError(f"{path} has no column {field!r}; it has {', '.join(schema.names)}", remedy="--field NAME")
    kind = schema.field(field).type
    if not any(is_text(kind) for is_text in (types.is_string, types.is_large_string, types.is_dictionary)):
        raise ShardwiseError(f"the column {field!r} of {path} has {kind}, and not text", remedy="--field NAME")
    num_read = 0
    try:
        for batch in file.iter_batches(batch_size=_TEXT_ROWS, columns=[field]):
            for text in batch.column(0).to_pylist():
                if text:
                    yield str(text).encode()
            num_read += batch.num_rows
    except (ArrowException, OSError) as error:
        raise ShardwiseError(f"{path} is damaged in rows {num_read} and on: {error}", remedy="a whole file") from None
