"""Token files made from documents, and the token file of a run: the user's, or one of the standard library."""

from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import ShardwiseError, os_errors_as
from shardwise.training.data.documents import STDLIB, documents_of
from shardwise.training.data.images import RandomImages, find_size
from shardwise.training.data.tokenizer import BYTES, ByteTokenizer, Tokenizer
from shardwise.training.data.tokens import Tokens, TokenWriter, open_tokens
from shardwise.training.recipe import DataChoice
from shardwise.training.world import World

#: Data up to this size is verified before training.
_VERIFIED_BYTES = 1 << 28


def check_data(choice: DataChoice, *, verify: bool = True) -> int:
    """Refuse data that cannot be read. Return its vocabulary size. Without `verify`, only the header is read."""
    if choice.source == STDLIB:
        return ByteTokenizer.vocabulary
    size = find_size(choice.source)
    if size is not None:
        return RandomImages(size=size).vocabulary
    tokens = open_tokens(Path(choice.source))
    if verify and tokens.tokens.nbytes <= _VERIFIED_BYTES:
        tokens.verify()
    return tokens.vocabulary


def open_data(choice: DataChoice, folder: Path, world: World) -> Tokens | RandomImages:
    """Open the token file of a run, or its images. That of `stdlib` is written once, to the run's folder."""
    size = find_size(choice.source)
    if size is not None:
        return RandomImages(size=size)
    if choice.source != STDLIB:
        return open_tokens(Path(choice.source))
    path = folder / f"{STDLIB}-{choice.limit_bytes}.tokens"
    if world.is_first and not path.is_file():
        make_tokens([STDLIB], path, ByteTokenizer(), limit_bytes=choice.limit_bytes)
    world.wait()
    return open_tokens(path)


def make_tokens(
    sources: Sequence[str], path: Path, tokenizer: Tokenizer, *, field: str = "text", limit_bytes: int | None = None
) -> Tokens:
    """Write the documents of all sources to a token file, and open it. At most `limit_bytes` are read."""
    left = limit_bytes
    writer = TokenWriter(path, vocabulary=tokenizer.vocabulary, tokenizer=tokenizer.name)
    with os_errors_as(f"{path} cannot be written", remedy="another place for it"), writer:
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
    return open_tokens(path)


def _beginning(document: bytes, num_bytes: int, tokenizer: Tokenizer) -> bytes:
    """Return the first bytes of a document. Unless tokens are bytes, do not split a character at the end."""
    taken = document[: max(0, num_bytes)]
    if tokenizer.name != BYTES and len(taken) < len(document):
        while taken and document[len(taken)] & 0b1100_0000 == 0b1000_0000:
            taken = taken[:-1]
    return taken
