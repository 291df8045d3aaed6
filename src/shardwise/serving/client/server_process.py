"""A server for a model, in a process of its own, that lives as long as it is needed."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.serving.client.http_client import Address

_STOP_SECONDS = 20


@contextmanager
def server_for(target: str | None, options: Sequence[str] = (), key: str | None = None) -> Iterator[Address]:
    """Yield the address to ask: a given one, or that of a model served meanwhile. None: the newest run."""
    if target is not None and target.startswith(("http://", "https://")):
        yield Address(target, key)
        return
    words = [sys.executable, "-m", "shardwise", "serve", *([target] if target else []), "--port", "0", "--json"]
    serving = subprocess.Popen([*words, *options], stdout=subprocess.PIPE, text=True)
    try:
        yield Address(_ready(serving)["url"])
    finally:
        serving.terminate()
        try:
            serving.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            serving.kill()
            serving.wait()
        assert serving.stdout is not None, "its output is read"
        serving.stdout.close()


def _ready(serving: "subprocess.Popen[str]") -> dict[str, Any]:
    """Return the line that it prints when it is ready; its refusals are raised here in the same words."""
    assert serving.stdout is not None, "its output is read"
    line = serving.stdout.readline()
    try:
        return dict(json.loads(line))
    except ValueError:
        pass
    try:
        error = json.loads(line + serving.stdout.read())["error"]
    except (ValueError, KeyError):
        raise ShardwiseError("the server ended before it was ready", remedy="shardwise serve MODEL") from None
    raise ShardwiseError(error["problem"], remedy=error["remedy"])
