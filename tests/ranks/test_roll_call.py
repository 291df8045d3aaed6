"""Ranks that were started together find each other in a store that has seen other attempts, some of them unfinished."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from shardwise.errors import ShardwiseError
from shardwise.ranks import roll_call
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.roll_call import agree_on_attempt
from shardwise.torch_private import Store, TCPStore


@pytest.fixture
def store() -> Store:
    made: Store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return made


def attempt(store: Store, order: list[int]) -> set[str]:
    """Ranks that come in some order, each over a connection of its own."""
    with ThreadPoolExecutor(len(order)) as pool:
        calls = [pool.submit(agree_on_attempt, store.clone(), rank, len(order), 20.0) for rank in order]  # type: ignore[attr-defined]
        return {each.result() for each in calls}


def test_every_attempt_has_a_word_of_its_own_whoever_comes_first(store: Store) -> None:
    words = [attempt(store, order) for order in ([0, 1, 2], [2, 1, 0], [1, 0], [0], [1, 2, 0, 3])]
    assert all(len(each) == 1 for each in words)
    assert len(set.union(*words)) == 5


def test_who_is_missing_is_named_and_an_attempt_that_failed_so_holds_up_none(store: Store) -> None:
    with pytest.raises(ShardwiseError, match="not all ranks have arrived after 0 s: ranks 1, 2 have not come"):
        agree_on_attempt(store, 0, 3, 0.05)
    with pytest.raises(ShardwiseError, match="not all ranks have arrived after 0 s: rank 0 has not called rank 1"):
        agree_on_attempt(store, 1, 3, 0.05)
    assert len(attempt(store, [2, 0, 1])) == 1


def test_a_rank_that_is_stopped_before_it_comes_is_named_and_one_that_is_slow_is_waited_for(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roll_call, "is_stopped", lambda rank: rank == 2)
    with pytest.raises(RankError, match="rank 2 has not answered for 0 s: its process is stopped") as told:
        agree_on_attempt(store, 0, 3, 20.0, stopped=0.1)
    assert told.value.rank == 2
    with pytest.raises(ShardwiseError, match="rank 0 has not called rank 1"):
        agree_on_attempt(store, 1, 3, 0.5, stopped=0.1)
