"""KV blocks: their states as the table has them, and a hundred thousand random operations."""

import random
from collections import Counter

import pytest

from shardwise.serving import blocks
from shardwise.serving.blocks import BlockPool, State, first_name, next_name


def test_the_table_of_states_is_what_blocks_go_through() -> None:
    pool, name = BlockPool(1, 4), first_name("model", "")
    assert pool.state(0) is State.FREE
    block = pool.allocate()
    assert pool.state(block) is State.FILLING
    pool.fill(block, name)
    assert pool.state(block) is State.FULL
    pool.take(block)
    pool.release([block])
    assert pool.state(block) is State.FULL
    pool.release([block])
    assert pool.state(block) is State.CACHED
    assert pool.find([name]) == [block]
    assert pool.allocate() == block
    assert pool.state(block) is State.FILLING
    assert pool.find([name]) == []
    pool.release([block])
    assert pool.state(block) is State.FREE
    rows = [line.split("|")[1].strip() for line in (blocks.__doc__ or "").splitlines() if line.startswith("| ")]
    assert rows == ["state", *(state.value for state in State)]


def test_a_wrong_step_is_refused() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(AssertionError, match="nobody's"):
        pool.release([0])
    with pytest.raises(AssertionError, match="not being filled"):
        pool.fill(0, b"name")
    with pytest.raises(AssertionError, match="no name"):
        pool.take(pool.allocate())


def test_the_oldest_beginning_goes_first_and_of_a_sequence_its_end() -> None:
    gone: list[bytes] = []
    pool = BlockPool(4, 4, lambda _, name: gone.append(name))
    taken = [pool.allocate() for _ in range(4)]
    for number, block in enumerate(taken):
        pool.fill(block, bytes([number]))
    pool.release(taken[:2])
    pool.release(taken[2:])
    for _ in range(4):
        pool.allocate()
    assert gone == [b"\1", b"\0", b"\3", b"\2"]


def test_names_tell_beginnings_salts_and_models_apart() -> None:
    roots = {first_name(model, salt) for model in ("a", "b") for salt in ("", "s")}
    assert len(roots) == 4
    root = first_name("a", "")
    assert next_name(root, [1, 2]) == next_name(root, (1, 2))
    assert next_name(next_name(root, [1, 2]), [3, 4]) != next_name(next_name(root, [3, 2]), [3, 4])


@pytest.mark.parametrize("num_operations", [4_000, pytest.param(100_000, marks=pytest.mark.whole)])
def test_random_operations_lose_no_block_and_read_none_that_is_stale(num_operations: int) -> None:
    """Each block's content is noted when it is written. Whoever has a block finds in it what was written for them."""
    dice, pool = random.Random(0), BlockPool(24, 2)
    content: dict[int, object] = {}
    held: list[list[tuple[int, object]]] = []
    for _ in range(num_operations):
        if held and (dice.random() < 0.45 or pool.num_available < 6):
            pool.release([block for block, _ in held.pop(dice.randrange(len(held)))])
        else:
            chain, name = [], first_name("m", "")
            for _ in range(dice.randint(1, 5)):
                name = next_name(name, [dice.randint(0, 2)])
                chain.append(name)
            found = pool.find(chain)
            for block in found:
                pool.take(block)
            mine: list[tuple[int, object]] = [(block, name) for block, name in zip(found, chain, strict=False)]
            for name in chain[len(found) :]:
                block = pool.allocate()
                content[block] = name
                pool.fill(block, name)
                mine.append((block, name))
            if dice.random() < 0.3:  # One that is never full.
                block = pool.allocate()
                content[block] = unnamed = object()
                mine.append((block, unnamed))
            held.append(mine)
        users = Counter(block for mine in held for block, _ in mine)
        assert all(content[block] == written for mine in held for block, written in mine)
        assert pool.num_used == len(users)
        assert all((pool.state(block) in (State.FILLING, State.FULL)) == (block in users) for block in range(24))
    for mine in held:
        pool.release([block for block, _ in mine])
    assert pool.num_available == 24
    pool.forget()
    assert {pool.state(block) for block in range(24)} == {State.FREE}
