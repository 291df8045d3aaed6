"""Blocks beneath the cache: what comes back is what went, to the bit, whatever happens to files and disks."""

import os
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from shardwise.serving.assemble import Identity, assemble
from shardwise.serving.blocks import BlockPool, first_name, next_name
from shardwise.serving.engine import LLMEngine
from shardwise.serving.eviction import Arc
from shardwise.serving.file_tier import FileTier
from shardwise.serving.kv_cache import Inputs
from shardwise.serving.limits import Limits
from shardwise.serving.replicas import Replicas
from shardwise.serving.sharded import load_sharded
from shardwise.serving.tier_speeds import Speeds
from shardwise.serving.tier_store import HostTier, TierStore
from shardwise.serving.tiers import Tiers
from tests.nets.families import save_theirs
from tests.serving.answers import answer, ask, both, engine_over, expected, prompts

SIZE = 4 * 4 * 2 * 2 * 8 * 4  # A block of "llama": tokens, layers, keys and values, heads, dim, bytes.


def with_tiers(family: str, folder: Path | None, *, host: int = 6, files: int = 100) -> LLMEngine:
    given: dict[str, Any] = {"kv_folder": folder, "file_bytes": files * (SIZE + 16)} if folder is not None else {}
    return engine_over(both(family)[1], num_blocks=9, host_bytes=host * SIZE, measured=False, **given)


def files_of(engine: LLMEngine) -> int:
    assert engine.tiers is not None
    assert isinstance(engine.tiers.store, TierStore)
    assert engine.tiers.store.files is not None
    engine.tiers.store.files.settle()
    return len(engine.tiers.store.files)


def watched(engine: LLMEngine) -> list[Tensor]:
    """All logits that it computes from now on."""
    seen: list[Tensor] = []
    plain = engine.runner.run

    def run(inputs: Inputs) -> Tensor:
        seen.append(plain(inputs).clone())
        return seen[-1]

    engine.runner.run = run  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
def test_logits_are_the_same_bit_for_bit_with_tiers_and_with_room_for_all(family: str, tmp_path: Path) -> None:
    theirs = both(family)[0]
    given = prompts(6, shortest=14, longest=20)
    roomy, tight = engine_over(both(family)[1], num_blocks=200), with_tiers(family, tmp_path)
    wanted, found = watched(roomy), watched(tight)
    for turn in range(3):
        for number, prompt in enumerate(given):
            request = ask(prompt, f"{turn}-{number}", num_tokens=4)
            answers = [answer(engine, [request])[0] for engine in (roomy, tight)]
            assert answers[0] == answers[1] == expected(theirs, prompt, 4)
    assert len(wanted) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert tight.load().prefix_cache_hits == roomy.load().prefix_cache_hits > 0
    assert tight.load().kv_offload_load_bytes > 0
    assert files_of(tight) > 0
    tight.close()


def test_files_survive_a_restart_and_damaged_ones_are_misses(tmp_path: Path) -> None:
    theirs = both("llama")[0]
    prompt = prompts(1, shortest=20, longest=20)[0]
    first = with_tiers("llama", tmp_path, host=20)
    answer(first, [ask(prompt)])
    answer(first, [ask(each, f"o{number}") for number, each in enumerate(prompts(4, seed=9))])
    first.close()
    again = with_tiers("llama", tmp_path)
    assert answer(again, [ask(prompt)]) == [expected(theirs, prompt)]
    assert again.load().prefix_cache_hits == 16
    again.close()
    files = sorted(tmp_path.glob("*.kv"))
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        content[-1 - number] ^= 1
        file.write_bytes(content[: -1 if number % 2 else None])
    damaged = with_tiers("llama", tmp_path)
    assert answer(damaged, [ask(prompt)]) == [expected(theirs, prompt)]
    assert damaged.load().prefix_cache_hits == 0


@pytest.mark.parametrize("place", [0, 9, 16, 40, 16 + 99, "shorter", "longer"])
def test_a_file_that_is_damaged_anywhere_is_a_miss_and_goes(place: int | str, tmp_path: Path) -> None:
    """Its checksum, its name, its words, and the bytes behind the last whole one."""
    files = FileTier(tmp_path, 10_000, 100)
    name, block = first_name("m", ""), torch.arange(100, dtype=torch.uint8)
    assert files.put(name, block)
    files.settle()
    found = files.find(name)
    assert found is not None
    assert torch.equal(files.places.views[found], block)
    (path,) = tmp_path.glob("*.kv")
    content = bytearray(path.read_bytes())
    if isinstance(place, int):
        content[place] ^= 1
    path.write_bytes(content[:-1] if place == "shorter" else content + b"!" if place == "longer" else content)
    assert files.find(name) is None
    assert name not in files
    files.close()
    assert not path.exists()


def test_a_disk_that_cannot_be_written_to_turns_the_files_off_with_one_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"the file tier in .* is off"):
        engine = with_tiers("llama", blocked)
    given = prompts(6)
    answers = answer(engine, [ask(prompt, f"r{number}") for number, prompt in enumerate(given)])
    assert answers == [expected(both("llama")[0], prompt) for prompt in given]


@contextmanager
def small_disk(folder: Path, options: str) -> Iterator[None]:
    """A file system of its own, in memory."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize(
    ("options", "why"),
    [("size=16k", "No space left on device"), ("ro", "Read-only file system")],
    ids=["full", "read-only"],
)
@pytest.mark.skipif(shutil.which("mount") is None or os.geteuid() != 0, reason="needs to mount a file system")
def test_a_real_disk_that_is_full_or_read_only_turns_the_files_off_and_all_is_answered(
    options: str, why: str, tmp_path: Path
) -> None:
    given = prompts(5, shortest=14, longest=20)
    wanted = [[expected(both("llama")[0], prompt, 4)] for prompt in given]

    def serve() -> list[list[list[int]]]:
        engine = with_tiers("llama", tmp_path, host=3)
        found = [answer(engine, [ask(prompt, num_tokens=4)]) for prompt in given * 2]
        engine.close()
        return found

    with small_disk(tmp_path, options):
        with pytest.warns(UserWarning, match=f"the file tier in .* is off: {why}") as told:
            found = serve()
        assert found == wanted * 2
        assert len([each for each in told if "file tier" in str(each.message)]) == 1


def test_what_a_disk_has_no_room_for_turns_the_files_off_and_what_is_there_is_found(tmp_path: Path) -> None:
    """Wherever tests run: this process may write no file as long as a block."""
    tier = FileTier(tmp_path, 10 * 4112, 4096)
    tier.put(b"a" * 16, torch.ones(4096, dtype=torch.uint8))
    tier.settle()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        tier.put(b"b" * 16, torch.ones(4096, dtype=torch.uint8))
        with pytest.warns(UserWarning, match="is off: File too large"):
            tier.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    tier.put(b"c" * 16, torch.ones(4096, dtype=torch.uint8))
    assert tier.find(b"a" * 16) is not None
    assert len(tier) == 1
    tier.close()
    assert [each.suffix for each in tmp_path.iterdir()] == [".kv"]


@pytest.mark.parametrize("begins", [False, True], ids=["at once", "one by one"])
def test_where_a_disk_does_not_keep_up_those_are_kept_that_left_last(begins: bool, tmp_path: Path) -> None:
    """They are nearest to the beginning of what they are part of; what lies behind a block that is missing is lost."""
    size, count, gate = 16, 7, Event()
    data = torch.arange(count, dtype=torch.uint8)[:, None].repeat(1, size)
    files = FileTier(tmp_path, 100 * (size + 16), size)
    store = TierStore(data, HostTier(0, size, num_leaving=3), files)
    for writer in files._writers:
        writer.submit(gate.wait)
    names = [number.to_bytes(16, "big") for number in range(count)]
    try:
        for block, name in enumerate(names):
            assert store.put(block, name)
            data[block] = 99  # Another's from now on.
            if begins:
                store.begin()
        store.begin()
    finally:
        gate.set()  # Whatever has happened: threads that wait for it would never end.
    files.settle()
    assert (sorted(store.file_names()), files.num_skipped) == (names[-3:], count - 3)
    assert store.bring([(name, block) for block, name in enumerate(names[-3:])]) == 3
    assert data[:3, 0].tolist() == [count - 3, count - 2, count - 1]
    assert store.host.places.num_free == 3
    store.close()


def three_blocks(load: float, compute: float) -> tuple[Tiers, list[bytes]]:
    """Names of which the host has all, with what was measured of them."""
    data, pool = torch.zeros(2, 8, dtype=torch.uint8), BlockPool(2, 4)
    tiers = Tiers(TierStore(data, HostTier(80, 8)), pool)
    names = [bytes([number]) for number in range(5)]
    for name in names:
        block = pool.allocate()
        pool.fill(block, name)
        pool.release([block])
    tiers.speeds.seconds["host"] = load
    tiers.note_computed(4096, 1024 * compute)
    return tiers, names


def test_what_is_slower_to_bring_than_to_compute_is_computed_but_for_a_try_now_and_then() -> None:
    slow, names = three_blocks(2.0, 1.0)
    found = [len(slow.reload(names[:1])) for _ in range(128)]
    assert sum(found) == 2 or found[63] == 1  # What was tried has been fast, so it may be believed from then on.
    assert not any(found[:63])
    quick, names = three_blocks(1.0, 2.0)
    assert len(quick.reload(names[:2])) == 2


def test_a_slow_disk_is_found_out_after_a_few_blocks(tmp_path: Path) -> None:
    """Whoever would wait for 64 blocks of it waits for 8: bringing is never much later than computing."""
    size, count = 16, 64
    data, pool = torch.zeros(count, size, dtype=torch.uint8), BlockPool(count, 4)
    files = FileTier(tmp_path, 100 * (size + 16), size)
    tiers = Tiers(TierStore(data, HostTier(0, size), files), pool)
    names = [number.to_bytes(16, "big") for number in range(count)]
    for name in names:
        files.put(name, torch.zeros(size, dtype=torch.uint8))
    files.settle()
    plain = files.find

    def slow(name: bytes, until: float | None = None) -> int | None:
        time.sleep(0.002)
        return plain(name, until)

    files.find = slow  # type: ignore[method-assign]
    tiers.note_computed(4096, 1.024)
    assert len(tiers.reload(names)) == 8
    assert tiers.reload(names[8:]) == []
    tiers.close()


def test_a_block_that_does_not_come_is_computed(tmp_path: Path) -> None:
    """Nobody waits for a disk that hangs; what comes later is there for whoever asks then."""
    size, count = 16, 4
    data, pool = torch.zeros(count, size, dtype=torch.uint8), BlockPool(count, 4)
    files = FileTier(tmp_path, 100 * (size + 16), size)
    tiers = Tiers(TierStore(data, HostTier(0, size), files), pool)
    names = [number.to_bytes(16, "big") for number in range(count)]
    for name in names:
        files.put(name, torch.ones(size, dtype=torch.uint8))
    files.settle()
    plain, comes = files._read, Event()

    def late(name: bytes, place: int) -> bool:
        return comes.wait(60) and plain(name, place)

    files._read = late  # type: ignore[method-assign]
    tiers.note_computed(4096, 1.024)
    assert tiers.reload(names) == []
    comes.set()
    tiers.speeds = Speeds(4)
    assert len(tiers.reload(names)) == 4
    tiers.close()


def test_what_a_long_prompt_costs_is_not_told_by_short_ones() -> None:
    speeds = Speeds(16)
    assert speeds.compute(500) is None
    speeds.predicted = 1e-5
    assert speeds.compute(500) == pytest.approx(16e-5)
    for _ in range(9):
        speeds.note_step(20, 6e-3)  # As long as one of 1,024 might take: too little rather than too much.
    assert speeds.compute(500) == pytest.approx(16 * 6e-3 / 1024)
    for seconds in (3.0, 0.227, 0.24):  # The first was compiled.
        speeds.note_step(8192, seconds)
    assert speeds.compute(500) == pytest.approx(16 * 0.227 / 8192)
    assert speeds.compute(1) == pytest.approx(16 * 6e-3 / 20)


def test_blocks_of_who_waits_are_read_ahead(tmp_path: Path) -> None:
    size = 16
    data, pool = torch.zeros(8, size, dtype=torch.uint8), BlockPool(8, 4)
    files = FileTier(tmp_path, 100 * (size + 16), size)
    tiers = Tiers(TierStore(data, HostTier(0, size), files), pool)
    names = [number.to_bytes(16, "big") for number in range(4)]
    for number, name in enumerate(names):
        files.put(name, torch.full((size,), number, dtype=torch.uint8))
    files.settle()
    tiers.prefetch(names)
    wait([each for each, _ in files._reading.values()])
    for each in tmp_path.iterdir():  # What was read ahead is not read again.
        each.unlink()
    blocks = tiers.reload(names)
    assert [data[block, 0].item() for block in blocks] == [0, 1, 2, 3]
    assert not files._reading
    tiers.close()


@pytest.mark.parametrize("plan", ["tp=2", pytest.param("pp=2,layers=3+1", marks=pytest.mark.whole)])
def test_tiers_of_ranks_give_the_same_tokens_and_survive_a_restart(plan: str, two: Ranks, tmp_path: Path) -> None:
    theirs = save_theirs("llama", tmp_path / "model")
    given = prompts(4, shortest=14, longest=20)
    limits = Limits(
        kv_bytes=9 * SIZE, block_size=4, token_budget=24, max_running=24, host_bytes=6 * SIZE, file_bytes=100 * SIZE,
        kv_folder=tmp_path / "kv", measured=False,
    )  # fmt: skip
    hits = []
    for start in range(2):
        engine = load_sharded(str(tmp_path / "model"), plan, limits, ranks=two)
        for turn in range(2):
            for number, prompt in enumerate(given):
                request = ask(prompt, f"{start}-{turn}-{number}", num_tokens=4)
                assert answer(engine, [request]) == [expected(theirs, prompt, 4)]
        hits.append((engine.load().prefix_cache_hits, engine.load().kv_offload_load_bytes))
        engine.close()
    assert hits[1] > hits[0] > (0, 0)
    assert {each.name for each in (tmp_path / "kv").iterdir()} == {"rank-0", "rank-1"}


def test_replicas_have_tiers_of_their_own_and_requests_go_where_their_blocks_lie(tmp_path: Path) -> None:
    theirs, ours = both("llama")
    whole = Limits(
        kv_bytes=18 * SIZE, block_size=4, host_bytes=12 * SIZE, file_bytes=200 * SIZE, kv_folder=tmp_path,
        measured=False,
    )  # fmt: skip
    shares = [whole.of_replica(number, 2) for number in range(2)]
    assert [each.kv_folder for each in shares] == [tmp_path / "replica-0", tmp_path / "replica-1"]
    assert [(each.host_bytes, each.file_bytes) for each in shares] == [(6 * SIZE, 100 * SIZE)] * 2
    engine = Replicas([assemble(ours, each, Identity(fingerprint="small"), seed=0) for each in shares])
    given = prompts(8, shortest=14, longest=20)
    # One model's modules are shared here, so the two step one after the other.
    for turn in range(2):
        for number, prompt in enumerate(given):
            assert answer(engine, [ask(prompt, f"{turn}-{number}", num_tokens=4)]) == [expected(theirs, prompt, 4)]
    # Everyone's second turn finds all of the first's blocks, though neither cache has room for them.
    assert engine.load().prefix_cache_hits == sum((len(prompt) - 1) // 4 * 4 for prompt in given)
    assert engine.load().kv_offload_load_bytes > 0
    assert 0 < engine.load().kv_offload_host_usage <= 1
    engine.close()


@pytest.mark.whole
def test_replicas_of_ranks_have_tiers_and_give_the_same_tokens(tmp_path: Path) -> None:
    theirs = save_theirs("llama", tmp_path / "model")
    given = prompts(10, shortest=14, longest=20)
    limits = Limits(
        kv_bytes=18 * SIZE, block_size=4, token_budget=24, max_running=24, host_bytes=12 * SIZE,
        file_bytes=200 * SIZE, kv_folder=tmp_path / "kv", measured=False,
    )  # fmt: skip
    hits = []
    for start in range(2):
        engine = load_sharded(str(tmp_path / "model"), "dp=2", limits)
        for turn in range(2):
            requests = [ask(prompt, f"{start}-{turn}-{number}", num_tokens=4) for number, prompt in enumerate(given)]
            assert answer(engine, requests) == [expected(theirs, prompt, 4) for prompt in given]
        hits.append((engine.load().prefix_cache_hits, engine.load().kv_offload_load_bytes))
        engine.close()
    assert hits[1] > hits[0] > (0, 0)
    assert {each.name for each in (tmp_path / "kv").iterdir()} == {"replica-0", "replica-1"}


def test_what_is_seen_once_does_not_push_out_what_is_asked_for_again() -> None:
    kept = Arc(10)
    again = [bytes([0, number]) for number in range(4)]
    for name in again:
        kept.add(name)
        kept.touch(name)
    for number in range(100):
        while len(kept) >= 10:
            kept.evict()
        kept.add(bytes([1, number]))
    assert all(name in kept for name in again)
    assert len(kept) == len(list(kept)) == 10


@pytest.mark.parametrize("num_operations", [1_500, pytest.param(100_000, marks=pytest.mark.whole)])
def test_random_operations_over_tiers_read_nothing_stale_and_keep_to_their_budgets(
    num_operations: int, tmp_path: Path
) -> None:
    """The bytes of a block are its name. Whoever has a block finds the bytes that its name says."""
    dice, pool = random.Random(1), BlockPool(8, 2)
    data = torch.zeros(8, 16, dtype=torch.uint8)
    num_loaded = 0

    def make() -> Tiers:
        store = TierStore(data, HostTier(5 * 16, 16), FileTier(tmp_path, 9 * 32, 16))
        return Tiers(store, pool, measured=False)

    tiers = make()
    held: list[list[tuple[int, bytes]]] = []
    for _ in range(num_operations):
        if held and (dice.random() < 0.5 or pool.num_available < 4):
            pool.release([block for block, _ in held.pop(dice.randrange(len(held)))])
            continue
        chain, name = [], first_name("m", "")
        for _ in range(dice.randint(1, 4)):
            name = next_name(name, [dice.randint(0, 2)])
            chain.append(name)
        blocks = pool.find(chain)
        for block in blocks:
            pool.take(block)
        loaded = tiers.reload(chain[len(blocks) :])
        num_loaded += len(loaded)
        blocks += loaded
        for name in chain[len(blocks) :]:
            block = pool.allocate()
            data[block] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
            pool.fill(block, name)
            blocks.append(block)
        held.append(list(zip(blocks, chain, strict=True)))
        for mine in held:
            for block, name in mine:
                assert bytes(data[block].tolist()) == name
        assert isinstance(tiers.store, TierStore)
        assert len(tiers.store.host) <= 5
        assert len(tiers.store.files or ()) <= 9
        assert pool.num_used == len({block for mine in held for block, _ in mine})
        if dice.random() < 0.3:  # Somebody else waits.
            tiers.prefetch([next_name(first_name("m", ""), [dice.randint(0, 2)])])
        if dice.random() < 0.01:  # A restart: the host forgets, files do not.
            tiers.store.close()
            tiers = make()
    tiers.store.close()
    assert num_loaded > num_operations / 10
    assert len(list(tmp_path.iterdir())) <= 9


def test_files_have_both_a_folder_and_a_budget(tmp_path: Path) -> None:
    """With none, all files of an earlier start would go."""
    with pytest.raises(ShardwiseError, match=f"0 B of files, in the folder {tmp_path}"):
        Limits(kv_folder=tmp_path)
    with pytest.raises(ShardwiseError, match="KiB of files, in no folder"):
        Limits(file_bytes=1024)


def test_blocks_of_another_split_are_not_taken_for_its_own(two: Ranks, tmp_path: Path) -> None:
    """A rank of either split has blocks of as many bytes: half of the heads of all layers, or all of half of them."""
    theirs = save_theirs("llama", tmp_path / "model")
    given = prompts(3, shortest=14, longest=20)
    limits = Limits(
        kv_bytes=9 * SIZE, block_size=4, host_bytes=6 * SIZE, file_bytes=100 * SIZE, kv_folder=tmp_path / "kv",
        measured=False,
    )  # fmt: skip
    for plan in ("tp=2", "pp=2"):
        engine = load_sharded(str(tmp_path / "model"), plan, limits, ranks=two)
        for number, prompt in enumerate(given):
            assert answer(engine, [ask(prompt, f"{plan}-{number}", num_tokens=4)]) == [expected(theirs, prompt, 4)]
        engine.close()
