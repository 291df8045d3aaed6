"""Keepers as processes of their own: what they take, give and free, and what becomes of it when they are killed."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from shardwise.copies.keepers import (
    FAILURES,
    Keeper,
    Staying,
    find_keeper,
    forget_copies,
    holders_of,
    start_keeper,
    survey,
    wait_for_keeper,
)
from shardwise.copies.memory import Generation, Memory, draw_id, find_id, memory_of
from shardwise.copies.wire import WireError, receive_line

ROOT = Path(__file__).parents[2]
ONE, TWO = Generation(10, "aa", 2), Generation(20, "bb", 2)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run; its keepers end with the test."""
    monkeypatch.setenv("SHARDWISE_COPIES", str(tmp_path / "memory"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    folder = tmp_path / "run"
    draw_id(folder)
    yield folder
    forget_copies(folder)


Start = Callable[[str], tuple[Keeper, Staying, Memory]]


@pytest.fixture
def start(run: Path) -> Iterator[Start]:
    """Starts the keeper of a node, and stays with it."""
    with ExitStack() as stack:

        def one(node: str) -> tuple[Keeper, Staying, Memory]:
            memory = memory_of(find_id(run) or "", node)
            start_keeper(run, node, memory)
            staying = wait_for_keeper(run, node)
            stack.callback(staying.close)
            keeper = find_keeper(run, node)
            assert keeper is not None
            return keeper, staying, memory

        yield one


def test_a_keeper_holds_no_connection_of_the_rank_that_started_it(start: Start) -> None:
    """Else other ranks would not see that the rank is gone: gloo's connections are passed on."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.set_inheritable(True)
        start("one")
        theirs.close()
        ours.settimeout(20)
        assert ours.recv(1) == b"", "nobody has the other end"


def write_piece(memory: Memory, generation: Generation, rank: int, text: bytes = b"numbers") -> list[Path]:
    paths = [memory.path(generation, f"rank-{rank:05}{end}") for end in (".safetensors", ".json")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return paths


def test_pieces_go_to_a_neighbour_outlive_its_keeper_and_come_back(start: Start, run: Path, tmp_path: Path) -> None:
    first, staying, memory = start("one")
    second, other_staying, there = start("two")
    for path in write_piece(memory, ONE, 0, b"x" * 3_000_000):
        second.put(ONE, path)
    for path in write_piece(there, ONE, 1):
        first.put(ONE, path)
    assert survey(run).keys() == {"one", "two"}
    assert holders_of(survey(run)) == {ONE: {0: ["one", "two"], 1: ["one", "two"]}}
    # The keeper is killed, and its process alone is lost.
    process = json.loads((run / "copies/two.json").read_bytes())["process"]
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    while other_staying.is_heard:
        time.sleep(0.01)
    assert staying.is_heard
    assert survey(run).keys() == {"one"}
    again, _, _ = start("two")
    memory.forget()
    again.get(ONE, "rank-00000.safetensors", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == b"x" * 3_000_000


def test_a_generation_is_whole_only_with_every_ranks_piece(start: Start, run: Path) -> None:
    _, _, memory = start("one")
    write_piece(memory, ONE, 0)
    write_piece(memory, ONE, 1)
    write_piece(memory, TWO, 0)
    memory.path(TWO, "rank-00001.safetensors").write_bytes(b"not its last file")
    assert list(holders_of(survey(run))) == [ONE]
    memory.keep_only([TWO])
    assert memory.generations() == [TWO]


def test_who_has_no_token_or_asks_for_another_file_gets_nothing(start: Start, tmp_path: Path) -> None:
    keeper, _, memory = start("one")
    write_piece(memory, ONE, 0)
    stranger = Keeper(node="one", addresses=keeper.addresses, port=keeper.port, token="guessed")
    with pytest.raises(WireError, match="the token is another run's"):
        stranger.pieces()
    for file in ("../../.keeper", "/etc/passwd", ".keeper"):
        with pytest.raises(WireError, match="is not a file of a copy"):
            keeper.get(ONE, file, tmp_path / "stolen")
    with keeper.asked("dance") as (_, stream), pytest.raises(WireError, match="there is no verb 'dance'"):
        receive_line(stream)
    assert not (tmp_path / "stolen").exists()


def test_when_the_run_is_over_the_memory_is_free_and_nobody_listens(start: Start, run: Path) -> None:
    keeper, staying, memory = start("one")
    write_piece(memory, ONE, 0)
    forget_copies(run)
    while staying.is_heard or memory.folder.exists():
        time.sleep(0.01)
    with pytest.raises(FAILURES):
        keeper.pieces()
    assert find_id(run) is None
