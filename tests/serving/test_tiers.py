"""Blocks beneath the cache: what comes back is what went, to the bit, whatever happens to files and disks."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.serving.assemble import Limits
from shardwise.serving.blocks import BlockPool, first_name, next_name
from shardwise.serving.engine import LLMEngine
from shardwise.serving.file_tier import FileTier
from shardwise.serving.kv_cache import Inputs
from shardwise.serving.tiers import HostTier, Tiers
from tests.serving.answers import answer, ask, both, engine_over, expected, prompts

SIZE = 4 * 4 * 2 * 2 * 8 * 4  # A block of "llama": tokens, layers, keys and values, heads, dim, bytes.


def with_tiers(family: str, folder: Path | None, *, host: int = 6, files: int = 100) -> LLMEngine:
    given: dict[str, Any] = {"kv_folder": folder, "file_bytes": files * (SIZE + 16)} if folder is not None else {}
    return engine_over(both(family)[1], num_blocks=9, host_bytes=host * SIZE, measured=False, **given)


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
    assert tight.tiers is not None
    assert tight.tiers.files is not None
    assert len(tight.tiers.files) > 0


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


def test_a_disk_that_cannot_be_written_to_turns_the_files_off_with_one_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"the file tier in .* is off"):
        engine = with_tiers("llama", blocked)
    given = prompts(6)
    answers = answer(engine, [ask(prompt, f"r{number}") for number, prompt in enumerate(given)])
    assert answers == [expected(both("llama")[0], prompt) for prompt in given]


def test_a_disk_that_is_full_turns_the_files_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FileTier(tmp_path, 10 * 48, 32)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    tier.put(b"a" * 16, torch.ones(32, dtype=torch.uint8))
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        tier.put(b"b" * 16, torch.ones(32, dtype=torch.uint8))
    tier.put(b"c" * 16, torch.ones(32, dtype=torch.uint8))
    assert tier.find(b"a" * 16) is not None
    assert len(tier) == 1


def test_what_is_slower_to_bring_than_to_compute_is_computed() -> None:
    data, pool = torch.zeros(2, 8, dtype=torch.uint8), BlockPool(2, 4)
    tiers = Tiers(data, pool, HostTier(80, 8))
    names = [bytes([number]) for number in range(4)]
    for name in names:
        block = pool.allocate()
        pool.fill(block, name)
        pool.release([block])
    tiers.speeds.seconds.update(host=2.0, compute=1.0)
    assert tiers.reload(names[:1]) == []
    tiers.speeds.seconds.update(host=1.0, compute=2.0)
    assert len(tiers.reload(names[:1])) == 1


@pytest.mark.parametrize("num_operations", [1_500, pytest.param(100_000, marks=pytest.mark.whole)])
def test_random_operations_over_tiers_read_nothing_stale_and_keep_to_their_budgets(
    num_operations: int, tmp_path: Path
) -> None:
    """The bytes of a block are its name. Whoever has a block finds the bytes that its name says."""
    dice, pool = random.Random(1), BlockPool(8, 2)
    data = torch.zeros(8, 16, dtype=torch.uint8)
    num_loaded = 0

    def make() -> Tiers:
        return Tiers(data, pool, HostTier(5 * 16, 16), FileTier(tmp_path, 9 * 32, 16), measured=False)

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
        assert len(tiers.host) <= 5
        assert len(tiers.files or ()) <= 9
        assert pool.num_used == len({block for mine in held for block, _ in mine})
        if dice.random() < 0.01:  # A restart: the host forgets, files do not.
            tiers = make()
    assert num_loaded > num_operations / 10
    assert len(list(tmp_path.iterdir())) <= 9


def test_files_have_both_a_folder_and_a_budget(tmp_path: Path) -> None:
    """With none, all files of an earlier start would go."""
    with pytest.raises(ShardwiseError, match=f"0 B of files, in the folder {tmp_path}"):
        Limits(kv_folder=tmp_path)
    with pytest.raises(ShardwiseError, match="KiB of files, in no folder"):
        Limits(file_bytes=1024)
