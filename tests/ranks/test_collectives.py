"""Collectives: results and gradients as of one rank that has everything, and the bytes that a ring sends."""

import pytest
import torch

from shardwise.ranks import collectives
from shardwise.ranks.collectives import Group
from shardwise.ranks.spawn import Ranks
from tests.crowd import Crowds
from tests.engine import mesh_programs

WHOLE = 4 * 6 * 8  # Bytes of one rank's tensor, for each rank there is.


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, crowds: Crowds) -> Ranks:
    return crowds.of(request.param)


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        ("copy", {"all_reduce": 2}),
        ("sum", {"all_reduce": 2}),
        ("scatter", {"all_gather": 1}),
        # What the last rank lacks travels as zeros.
        ("scatter unevenly", {"all_gather": 1}),
        ("gather unevenly", {"all_gather": 1, "reduce_scatter": 1}),
    ],
)
def test_a_collective_has_the_gradient_of_one_rank_and_sends_what_a_ring_sends(
    ranks: Ranks, kind: str, sent: dict[str, int]
) -> None:
    for error, sent_bytes in ranks.run(mesh_programs.differentiated, kind, timeout_seconds=60):
        assert error < 1e-12
        assert sent_bytes == {name: times * (ranks.devices - 1) * WHOLE for name, times in sent.items()}


@pytest.mark.parametrize("kind", ["gather", "gather alike"])
def test_a_gather_sums_gradients_only_where_ranks_use_it_differently(ranks: Ranks, kind: str) -> None:
    for error, sent_bytes in ranks.run(mesh_programs.differentiated, kind, timeout_seconds=60):
        assert error < 1e-12
        others = (ranks.devices - 1) * ranks.devices * WHOLE
        assert sent_bytes == {"all_gather": others} | ({"reduce_scatter": others} if kind == "gather" else {})


def test_rows_are_exchanged_unevenly_and_their_gradients_go_back(ranks: Ranks) -> None:
    for error, sent_bytes in ranks.run(mesh_programs.differentiated, "exchange", timeout_seconds=60):
        assert error < 1e-12
        rows = 4 * ranks.devices - 3  # All but the three that a rank keeps.
        assert sent_bytes == {"all_to_all": 2 * rows * 6 * 8}


def test_one_rank_alone_sends_nothing() -> None:
    alone, tensor = Group(), torch.randn(4, 2)
    for same in (
        collectives.copy(tensor, alone),
        collectives.sum_over(tensor, alone),
        collectives.gather(tensor, alone, 0, used_alike=True),
        collectives.scatter(tensor, alone, 1),
        collectives.exchange(tensor, alone, [4], [4]),
    ):
        assert same is tensor
    assert not alone.traffic.calls
