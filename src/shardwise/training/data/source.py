"""The token file of a run: the user's own, or one made of the standard library."""

from pathlib import Path

from shardwise.training.data.documents import STDLIB
from shardwise.training.data.make import make_tokens
from shardwise.training.data.tokenizer import ByteTokenizer
from shardwise.training.data.tokens import Tokens, open_tokens
from shardwise.training.recipe import DataChoice
from shardwise.training.world import World

#: Data up to this size is compared with its checksums before it is trained on.
_VERIFIED_BYTES = 1 << 28


def check_data(choice: DataChoice) -> int:
    """Refuse data that cannot be read; how many words it has."""
    if choice.source == STDLIB:
        return ByteTokenizer.vocabulary
    tokens = open_tokens(Path(choice.source))
    if tokens.tokens.nbytes <= _VERIFIED_BYTES:
        tokens.verify()
    return tokens.vocabulary


def open_data(choice: DataChoice, folder: Path, world: World) -> Tokens:
    """The token file of a run. That of the standard library is made once, in the run's folder."""
    if choice.source != STDLIB:
        return open_tokens(Path(choice.source))
    path = folder / f"{STDLIB}-{choice.limit_bytes}.tokens"
    if world.is_first and not path.is_file():
        make_tokens([STDLIB], path, ByteTokenizer(), limit_bytes=choice.limit_bytes)
    world.wait()
    return open_tokens(path)
