"""A server in this process, on a free port, with an engine that tests can look into."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from shardwise.serving.http.app import Server
from shardwise.serving.http.asked import Served
from shardwise.serving.http.server import Serving, open_socket, url_of
from shardwise.serving.text.chat_template import ChatTemplate
from shardwise.serving.text.grammar import Grammars
from shardwise.serving.text.tokenizer import ByteText, Text
from tests.serving.http.repeating import END, RepeatingEngine

NAME = "repeating"


def served_by(engine: RepeatingEngine, text: Text | None = None) -> Served:
    text = text or ByteText()
    return Served(
        name=NAME, text=text, template=ChatTemplate(text), max_length=engine.max_length,
        grammars=Grammars(text, size=engine.vocabulary_size, end_tokens=[END]), vocabulary_size=engine.vocabulary_size,
    )  # fmt: skip


@dataclass
class Running:
    """A server that is up: where, what it is, and its engine."""

    url: str
    server: Server
    engine: Any
    serving: Serving

    def client(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **more)

    def complete(self, **body: Any) -> httpx.Response:
        with self.client() as client:
            return client.post("/v1/completions", json=body)

    def chat(self, text: str, **body: Any) -> httpx.Response:
        with self.client() as client:
            messages = [{"role": "user", "content": text}]
            return client.post("/v1/chat/completions", json={"messages": messages, **body})


@contextmanager
def running(
    engine: Any, *, served: Served | None = None, key: str | None = None, most_waiting: int = 256,
    grace_seconds: float = 2.0,
) -> Iterator[Running]:  # fmt: skip
    """Serve a repeating engine, or any that comes with the words for its model."""
    server = Server(engine, served or served_by(engine), key=key, most_waiting=most_waiting)
    listening = open_socket("127.0.0.1", 0)
    serving = Serving(server.app(), drain=server.loop.drain, grace_seconds=grace_seconds)
    thread = threading.Thread(target=lambda: asyncio.run(serving.serve(sockets=[listening])), daemon=True)
    thread.start()
    url = url_of(listening)
    while not serving.started:
        assert thread.is_alive(), "the server has ended before it was up"
        thread.join(0.01)
    try:
        yield Running(url=url, server=server, engine=engine, serving=serving)
    finally:
        serving.should_exit = True
        thread.join(20)
        listening.close()
        assert not thread.is_alive(), "the server stops when it is told to"
        assert served is not None or engine.is_closed
