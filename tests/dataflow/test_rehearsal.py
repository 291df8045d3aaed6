"""Random programs on random budgets: no stale read, no lost write, no budget exceeded, no deadlock."""

import pytest

from shardwise.testing.rehearsal import Rehearsal
from tests.dataflow.machines import Shuffle


@pytest.mark.parametrize("seed", range(8))
def test_a_random_program_is_right_in_whatever_order_its_streams_run(seed: int) -> None:
    rehearsal = Rehearsal(seed, make_stream=Shuffle(seed).make())
    rehearsal.run(150)
    rehearsal.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_random_program_is_right_on_threads(seed: int) -> None:
    rehearsal = Rehearsal(100 + seed)
    rehearsal.run(150)
    rehearsal.close()
