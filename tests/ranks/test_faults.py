"""What the other ranks say when one raises, dies or stalls. The faults are real: SIGKILL and SIGSTOP."""

import pickle
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from shardwise.errors import ShardwiseError
from shardwise.ranks.rank_error import RankError, describe_failure
from shardwise.ranks.spawn import Ranks, spawn
from shardwise.ranks.stall import RankLocation, find_stall
from tests.engine import programs
from tests.ranks.processes import nobody_runs

LIMIT_SECONDS = 2.0
#: Longer than any of these tests waits. Ranks that had not been told would wait for so long, and say something else.
NEVER_SECONDS = 60.0


#: They have ranks of their own, forked where the shared ones are.
pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3) as started:
        yield started


def told_by(rank: int, folder: Path) -> tuple[str, str]:
    """What kind of error a rank raised, and its text."""
    kind, text = (folder / f"told{rank}").read_text().split("\n", 1)
    return kind, text


def test_a_rank_that_only_takes_longer_than_a_beat_is_no_fault(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(programs.relay, "slow", NEVER_SECONDS, tmp_path) == [None] * 3


def test_when_a_rank_raises_the_others_raise_its_error_at_once(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(programs.relay, "raise", NEVER_SECONDS, tmp_path)
    assert caught.value.problem.startswith("rank 2 failed at 2F1 (stage 2, microbatch 1): ValueError: boom\n")
    assert "in _happen" in caught.value.problem
    assert told_by(2, tmp_path)[0] == "ValueError"
    for rank in (0, 1):
        kind, text = told_by(rank, tmp_path)
        assert kind == "RankError"
        assert text.startswith("rank 2 failed at 2F1 (stage 2, microbatch 1): ValueError: boom\n")
        assert "in _happen" in text
    assert nobody_runs(tmp_path)


def test_when_a_rank_is_killed_the_others_say_so(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 2 was killed by SIGKILL \(signal 9\)"):
        ranks.run(programs.relay, "kill", NEVER_SECONDS, tmp_path)
    for rank in (0, 1):
        kind, text = told_by(rank, tmp_path)
        assert kind == "RankError"
        assert text.startswith("rank 2 was killed by SIGKILL (signal 9)")
    assert nobody_runs(tmp_path)


def test_when_a_rank_is_killed_and_nobody_saw_it_the_others_say_who_is_gone_and_where_each_stands(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As under another launcher: the process that started the ranks tells nobody.
    monkeypatch.setattr(ranks, "_tell_the_others", lambda error: None)  # noqa: ARG005
    with pytest.raises(RankError, match=r"rank 2 was killed by SIGKILL"):
        ranks.run(programs.relay, "kill", NEVER_SECONDS, tmp_path)
    for rank in (0, 1):
        _, text = told_by(rank, tmp_path)
        assert text.startswith("rank 2 is gone: its connection to rank 1 broke at 1RECV_B1<2\n")
        assert "\n  rank 0 waits for rank 1 at 0RECV_B1<1 (" in text
    assert nobody_runs(tmp_path)


def test_when_a_rank_stops_answering_the_others_say_who_and_where_each_stands(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        ranks.run(programs.relay, "stop", LIMIT_SECONDS, tmp_path)
    assert caught.value.rank == 2
    for rank in (0, 1):
        kind, text = told_by(rank, tmp_path)
        assert kind == "RankError"
        silent = re.match(r"rank 2 has not answered for (\d+) s", text)
        assert silent is not None, text
        assert int(silent[1]) >= LIMIT_SECONDS
        # It had no time to say where it stood when it was stopped, only where it had been at its last beat.
        assert "; it was last at 2" in text or "; it was last at the start" in text
        assert "\n  rank 0 waits for rank 1 at 0RECV_B1<1 (" in text
        assert "\n  rank 1 waits for rank 2 at 1RECV_B1<2 (" in text
        assert "\n  try: limit_seconds=6, if rank 2 is only slow" in text
    assert nobody_runs(tmp_path)


def test_when_a_rank_stays_at_an_instruction_all_of_them_say_which(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 2 has been at 2F1 for \d+ s"):
        ranks.run(programs.relay, "sleep", LIMIT_SECONDS, tmp_path)
    assert told_by(0, tmp_path) == told_by(1, tmp_path)
    assert nobody_runs(tmp_path)


def test_a_collective_ends_when_a_rank_does_not_come_to_it(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 2 has been at 2F1 for \d+ s"):
        ranks.run(programs.sum_without, 2, 1.0, tmp_path)
    for rank in (0, 1):
        _, text = told_by(rank, tmp_path)
        assert f"rank {rank} waits for ranks {1 - rank}, 2 at the loss (" in text
    assert nobody_runs(tmp_path)


def test_a_rank_that_raises_in_code_of_its_own_is_named_by_those_that_wait_for_it(ranks: Ranks, tmp_path: Path) -> None:
    """No watch has seen it, and a broken connection does not say whose it is: the process that started them does."""
    with pytest.raises(RankError, match="rank 1 failed: ValueError: boom"):
        ranks.run(partial(programs.sum_without, raises=True), 1, NEVER_SECONDS, tmp_path)
    assert [told_by(rank, tmp_path)[1].splitlines()[0] for rank in (0, 2)] == ["rank 1 failed: ValueError: boom"] * 2
    assert nobody_runs(tmp_path)


def test_ranks_that_call_other_methods_say_which(ranks: Ranks, tmp_path: Path) -> None:
    """Else what one gathers for its evaluation is unpacked by the others as what they gather for their step."""
    with pytest.raises(ShardwiseError) as caught:
        ranks.run(programs.evaluate_on_one, tmp_path)
    assert "rank 0 calls evaluate, rank 1 calls train_step, rank 2 calls train_step" in str(caught.value)
    assert "engine.evaluate(...) on every rank, outside of `if rank == 0:`" in str(caught.value)
    assert nobody_runs(tmp_path)


@pytest.mark.parametrize("step", [0, 2])
def test_a_rank_that_does_not_come_to_a_step_is_named(step: int, ranks: Ranks, tmp_path: Path) -> None:
    """Before the first steps, ranks gather what they hold, to compare them with those of one process: that wait has an
    end too. It is longer for the first of all, before which a rank may have a loader to start."""
    with pytest.raises(RankError, match=r"rank 1 has been at .* for \d+ s"):
        ranks.run(programs.train_without, 1, step, 1.0, tmp_path)
    for rank in (0, 2):
        text = told_by(rank, tmp_path)[1]
        assert text.startswith("rank 1 has been at ")
        assert (int(text.partition(" for ")[2].split()[0]) >= 10) == (step == 0)
    assert nobody_runs(tmp_path)


def test_a_failure_that_was_caught_does_not_reach_the_next_watch(ranks: Ranks) -> None:
    first, second = zip(*ranks.run(programs.fail_and_begin_again), strict=True)
    assert all(text.startswith("rank 1 failed at the start: ValueError: caught") for text in first)
    assert set(second) == {"fine"}


def test_ranks_that_wait_for_each_other_say_so() -> None:
    for text in spawn(programs.wait_for_each_other, 2, (1.0,), timeout_seconds=300):
        assert text.startswith("ranks 0, 1 have waited for each other for ")
        assert "rank 1 waits for rank 0 at 1RECV_F0<0 (" in text


# What is said, from where everyone stands.

BUSY = RankLocation(rank=2, at="2F4", at_seconds=3)
PLACES = [
    RankLocation(rank=0, at="0RECV_B3<1", at_seconds=25, waits_for=(1,)),
    RankLocation(rank=1, at="1RECV_B3<2", at_seconds=25, waits_for=(2,)),
    BUSY,
]


def test_a_long_wait_for_a_rank_that_moves_on_is_no_stall() -> None:
    assert find_stall(PLACES, 0, 20) is None


def test_the_end_of_the_chain_is_named_not_the_one_that_is_waited_for() -> None:
    stuck = [*PLACES[:2], replace(BUSY, at_seconds=21)]
    error = find_stall(stuck, 0, 20)
    assert error is not None
    assert error.rank == 2
    assert error.problem == (
        "rank 2 has been at 2F4 for 21 s\n"
        "  rank 0 waits for rank 1 at 0RECV_B3<1 (25 s)\n"
        "  rank 1 waits for rank 2 at 1RECV_B3<2 (25 s)\n"
        "  rank 2 was last at 2F4 (21 s)"
    )
    assert error.remedy == "limit_seconds=60, if rank 2 is only slow"


def test_a_rank_that_is_silent_is_named_even_if_it_was_waiting() -> None:
    silent = [PLACES[0], replace(PLACES[1], silent_seconds=20), BUSY]
    error = find_stall(silent, 0, 20)
    assert error is not None
    assert error.problem.startswith("rank 1 has not answered for 20 s; it was last at 1RECV_B3<2\n")


def test_a_circle_is_a_stall_only_when_all_of_it_has_waited_for_long() -> None:
    circle = [PLACES[0], replace(PLACES[1], waits_for=(0,), at_seconds=19), BUSY]
    assert find_stall(circle, 0, 20) is None
    error = find_stall([circle[0], replace(circle[1], at_seconds=22), BUSY], 0, 20)
    assert error is not None
    assert error.problem.startswith("ranks 0, 1 have waited for each other for 22 s\n")


def test_ranks_that_have_all_come_to_a_collective_that_does_not_end_say_what_they_wait_for() -> None:
    others = {0: (1, 2), 1: (0, 2), 2: (0, 1)}
    places = [RankLocation(rank=rank, at="the loss", at_seconds=61, waits_for=others[rank]) for rank in range(3)]
    error = find_stall(places, 1, 20)
    assert error is not None
    assert error.rank is None
    assert error.problem.startswith(
        "ranks 0, 1, 2 have all been at the loss for 61 s, each waiting for what the others"
    )
    assert "\n  rank 2 waits for ranks 0, 1 at the loss (61 s)" in error.problem
    assert find_stall([*places[:2], replace(places[2], at_seconds=59)], 1, 20) is None


def test_of_a_circle_the_one_that_is_silent_is_named() -> None:
    """It was stopped while it waited, and others look at it only when they have waited for a while themselves."""
    circle = [PLACES[0], replace(PLACES[1], waits_for=(0,), at_seconds=20, silent_seconds=18), BUSY]
    error = find_stall(circle, 0, 20)
    assert error is not None
    assert error.rank == 1
    assert error.problem.startswith("rank 1 has not answered for 18 s; it was last at 1RECV_B3<2\n")


def test_of_a_collective_the_one_that_has_not_come_is_named() -> None:
    places = [
        RankLocation(rank=0, at="the loss", at_seconds=30, waits_for=(1, 2)),
        RankLocation(rank=1, at="the loss", at_seconds=25, waits_for=(0, 2)),
        BUSY,
    ]
    assert find_stall(places, 0, 20) is None
    error = find_stall([*places[:2], replace(BUSY, at_seconds=20)], 0, 20)
    assert error is not None
    assert error.problem.startswith(
        "rank 2 has been at 2F4 for 20 s\n  rank 0 waits for ranks 1, 2 at the loss (30 s)\n"
    )
    assert find_stall([replace(place, at="the loss", waits_for=(0, 1, 2)) for place in places], 0, 20) is None


def test_a_rank_that_has_left_a_collective_and_not_come_to_the_next_is_named() -> None:
    places = [
        RankLocation(rank=0, at="the loss", at_seconds=30, waits_for=(1, 2)),
        RankLocation(rank=1, at="the loss", at_seconds=25, waits_for=(0, 2)),
        RankLocation(rank=2, at="the loss", at_seconds=20),
    ]
    error = find_stall(places, 0, 20)
    assert error is not None
    assert error.rank == 2
    assert error.problem.startswith("rank 2 has been at the loss for 20 s\n")
    assert find_stall([*places[:2], replace(places[2], at_seconds=19)], 0, 20) is None


def test_an_error_of_ours_keeps_its_remedy_on_the_way_to_other_ranks() -> None:
    error = describe_failure(1, ShardwiseError("too large", remedy="smaller"))
    again = pickle.loads(pickle.dumps(error))
    assert (again.rank, again.remedy) == (1, "smaller")
    assert again.problem.startswith("rank 1 failed: too large\n")
