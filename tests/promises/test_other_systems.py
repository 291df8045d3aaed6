"""What only Linux has is used where it is there, and everything works where it is not: many laptops are Macs."""

import ast
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import environment
from shardwise.cluster.local import available_bytes, peak_memory_bytes
from shardwise.copies.memory import draw_id
from shardwise.dataflow.buffers import disk_memory
from shardwise.planner.plan import Plan
from shardwise.probing.devices import _forget
from shardwise.ranks.clocks import this_machine
from shardwise.ranks.pulse import is_stopped
from shardwise.ranks.shared_gpus import network_namespace
from shardwise.ranks.shared_memory import _listen
from shardwise.ranks.spawn import Ranks, _context
from shardwise.standby.asker import find_server
from shardwise.standby.server import main as standby_server
from shardwise.states.tiers.disk import _fill
from shardwise.training.job import Job
from shardwise.training.recipe import Recipe
from shardwise.training.run_copies import open_copies
from shardwise.training.world import World
from tests.promises.sources import PACKAGE, all_sources

#: Calls of `os` and flags of `socket` that macOS does not have, or not every release of it.
OF_LINUX = {
    "os": [
        "copy_file_range",
        "eventfd",
        "memfd_create",
        "O_DIRECT",
        "pidfd_open",
        "posix_fadvise",
        "posix_fallocate",
        "preadv",
        "pwritev",
        "sched_getaffinity",
        "sched_setaffinity",
        "splice",
    ],
    "socket": ["MSG_NOSIGNAL", "SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK"],
}

# Loaded by every process before anything else, ranks too. /proc is not there either.
WITHOUT_LINUX = f"""
import io, os, socket
for module, names in {OF_LINUX}.items():
    for name in names:
        if hasattr(globals()[module], name):
            delattr(globals()[module], name)

def refusing(call):
    def ask(path, *args, **kwargs):
        if str(path).startswith("/proc"):
            raise FileNotFoundError(path)
        return call(path, *args, **kwargs)
    return ask

io.open, os.stat = refusing(io.open), refusing(os.stat)
"""

# Only what starts ranks is told that this is macOS: torch and others would look for libraries that are not here.
CHECK = """
import sys, types
from shardwise.cli import main
from shardwise.ranks import spawn
spawn.sys = types.SimpleNamespace(platform="darwin")
sys.exit(main(["check", "--plan", "pp=2,microbatches=2", "--steps", "1"]))
"""


def test_what_only_linux_has_is_asked_for_before_it_is_used() -> None:
    found = []
    for source in all_sources():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = node.value.id
                if node.attr in OF_LINUX.get(name, ()) and f'{name}, "{node.attr}"' not in source.text:
                    found.append(f"{source.name}:{node.lineno} {name}.{node.attr}")
    assert found == []


@pytest.mark.whole  # Each way that it goes is in a test of this file.
def test_a_plan_of_two_processes_is_checked_on_a_machine_that_is_not_linux(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX, encoding="utf-8")
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", CHECK], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""


def test_ranks_are_started_one_by_one_where_forking_is_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _context().get_start_method() == ("forkserver" if sys.platform == "linux" else "spawn")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert _context().get_start_method() == "spawn"


def test_messages_go_through_the_group_where_memory_cannot_be_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with ExitStack() as stack:
        assert _listen(stack, 2) == (None, None)


def test_a_file_takes_its_room_on_disk_without_the_call_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    allocate, free = disk_memory(tmp_path)
    num_bytes = 3 * 2**20 + 5
    buffer = allocate(num_bytes)
    assert (buffer.numel(), int(buffer.sum())) == (num_bytes, 0)
    buffer.fill_(7)
    assert int(buffer[-1]) == 7
    free(buffer)


def test_files_are_read_into_memory_without_the_call_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv", raising=False)
    memory = torch.zeros(5, dtype=torch.uint8)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(range(10)))
        file.flush()
        _fill(file.fileno(), 3, memory.numpy().data)
        with pytest.raises(EOFError, match="2 bytes too early"):
            _fill(file.fileno(), 7, memory.numpy().data)
    assert memory.tolist() == [7, 8, 9, 6, 7]


def test_cores_are_counted_where_none_can_be_kept_from_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert environment.num_cores() == 3


def test_a_machine_without_proc_has_a_name_a_network_and_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *_: object, **__: object) -> Any:
        raise FileNotFoundError(path)

    for name in ("read_text", "read_bytes", "stat"):
        monkeypatch.setattr(Path, name, refused)
    assert this_machine() == platform.node()
    assert network_namespace() == 0
    assert environment.processor_name() == platform.machine()
    assert available_bytes() == 2**62  # No limit is known.
    assert not is_stopped(0)


def test_no_rank_is_forked_from_one_on_standby_where_nobody_can_know_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_id(tmp_path)
    monkeypatch.delattr(socket, "SO_PEERCRED", raising=False)
    assert find_server(tmp_path) is None
    assert standby_server(["--folder", str(tmp_path), "--node", "here"]) == 0


def test_files_are_read_back_where_none_can_be_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    with (tmp_path / "file").open("wb") as file:
        _forget(file.fileno())


def without_shared_memory(folder: str) -> tuple[str, str]:
    """What a rank says of copies in memory on a machine that has no folder for them."""
    os.environ[environment.COPIES_ROOT] = "/dev/null/shm"
    world = World()
    try:
        job = Job(recipe=Recipe(name="tiny"), plan=Plan.parse("dp=2"), folder=Path(folder), command="", copies_every=1)
        opened = open_copies(job, world)
        return type(opened).__name__, str(opened)
    finally:
        world.close()
        del os.environ[environment.COPIES_ROOT]


def test_a_run_goes_on_without_copies_where_no_folder_is_in_memory(two: Ranks, tmp_path: Path) -> None:
    for kind, said in two.run(without_shared_memory, str(tmp_path)):
        assert kind == "str"
        assert "cannot keep copies in /dev/null/shm" in said


def test_the_peak_of_memory_is_in_bytes_on_both_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    found = type("Usage", (), {"ru_maxrss": 2048})
    monkeypatch.setattr(resource, "getrusage", lambda _: found)
    monkeypatch.setattr(sys, "platform", "linux")
    assert peak_memory_bytes() == 2048 * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak_memory_bytes() == 2048
