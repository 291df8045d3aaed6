"""A folder of KV blocks: one engine at a time, and nothing in it beyond the budget."""

import os
import re
import subprocess
import sys
from pathlib import Path
from threading import Timer
from time import monotonic

import pytest

from shardwise.errors import ShardwiseError
from shardwise.serving import kv_folder
from shardwise.serving.kv_folder import HeldFolder
from shardwise.serving.load import load_engine
from tests.nets.families import save_theirs

HOLDS = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(handle, fcntl.LOCK_EX)
os.write(handle, sys.argv[2].encode())
print("held", flush=True)
sys.stdin.read()
"""


def holder(folder: Path, word: str) -> "subprocess.Popen[str]":
    """Another process that has the folder."""
    folder.mkdir(exist_ok=True)
    words = [sys.executable, "-c", HOLDS, str(folder / "lock"), word]
    made = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    assert made.stdout.readline() == "held\n"
    return made


def test_a_second_engine_on_a_folder_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_theirs("llama", tmp_path / "model")
    monkeypatch.setattr(kv_folder, "_GONE_SECONDS", 0.0)
    kv = tmp_path / "kv"
    first = load_engine(tmp_path / "model", kv_bytes=2**20, device="cpu", file_bytes=2**20, kv_folder=kv)
    said = f"--kv-folder {kv} belongs to another server or generate that is running (process {os.getpid()})"
    with pytest.raises(ShardwiseError, match=re.escape(said)):
        load_engine(tmp_path / "nothing", kv_bytes=2**20, device="cpu", file_bytes=2**20, kv_folder=kv)
    first.close()
    load_engine(tmp_path / "model", kv_bytes=2**20, device="cpu", file_bytes=2**20, kv_folder=kv).close()
    with pytest.raises(ShardwiseError, match="is not a folder"):
        load_engine(tmp_path / "nothing", kv_bytes=2**20, device="cpu", file_bytes=2**20, kv_folder=kv)
    HeldFolder(kv).release()  # The refused one did not keep it.


@pytest.mark.parametrize(("word", "gone"), [("12", 2.0), ("closing", 0.0)])
def test_an_engine_that_was_killed_or_writes_its_last_blocks_is_waited_for(
    word: str, gone: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_folder, "_GONE_SECONDS", gone)
    with holder(tmp_path, word) as other:
        begun = monotonic()
        Timer(0.3, other.kill).start()
        held = HeldFolder(tmp_path)
        assert monotonic() - begun >= 0.2
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    held.tell_closing()
    assert (tmp_path / "lock").read_text() == "closing"
    held.release()


def test_what_another_split_and_a_killed_process_have_left_goes_and_files_of_others_stay(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "model")
    kv, name = tmp_path / "kv", "0123456789abcdef" * 2
    (kv / "rank-0").mkdir(parents=True)
    (kv / "replica-1" / "rank-0").mkdir(parents=True)
    gone = [kv / "rank-0" / f"{name}.kv", kv / "replica-1" / "rank-0" / f"{name}.kv", kv / f"{name}.4711"]
    stay = [kv / "rank-0" / "notes.kv", kv / "thesis.4711", kv / f"{name}.txt", kv / f"{name}.kv"]
    for each in (*gone, *stay):
        each.touch()
    load_engine(tmp_path / "model", kv_bytes=2**20, device="cpu", file_bytes=2**20, kv_folder=kv).close()
    assert not any(each.exists() for each in gone)
    assert all(each.exists() for each in stay)
