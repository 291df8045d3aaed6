"""A token file from documents."""

from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import ShardwiseError
from shardwise.training.data.documents import documents_of
from shardwise.training.data.tokenizer import BYTES, Tokenizer
from shardwise.training.data.tokens import Tokens, TokenWriter, open_tokens


def make_tokens(
    sources: Sequence[str], path: Path, tokenizer: Tokenizer, *, field: str = "text", limit_bytes: int | None = None
) -> Tokens:
    """Write the documents of some sources, one after the other, and open the file. At most `limit_bytes` are read."""
    left = limit_bytes
    try:
        with TokenWriter(path, vocabulary=tokenizer.vocabulary, tokenizer=tokenizer.name) as writer:
            for source in sources:
                for document in documents_of(source, field=field):
                    taken = document if left is None else _beginning(document, left, tokenizer)
                    writer.add(tokenizer.encode(taken))
                    if left is not None:
                        left -= len(document)
                        if left <= 0:
                            break
            if not writer.num_tokens:
                raise ShardwiseError(f"there is no text in {', '.join(sources)}", remedy="a file with text in it")
    except OSError as error:
        raise ShardwiseError(f"{path} cannot be written: {error.strerror}", remedy="another place for it") from None
    return open_tokens(path)


def _beginning(document: bytes, num_bytes: int, tokenizer: Tokenizer) -> bytes:
    """So many bytes of a document; where tokens are made of characters, no half of one at the end."""
    taken = document[: max(0, num_bytes)]
    if tokenizer.name != BYTES and len(taken) < len(document):
        while taken and document[len(taken)] & 0b1100_0000 == 0b1000_0000:
            taken = taken[:-1]
    return taken
