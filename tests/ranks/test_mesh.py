"""The grid of ranks: who stands where, and who works with whom."""

import pytest

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.mesh import make_mesh
from shardwise.ranks.rank_error import RankError
from shardwise.ranks.spawn import Ranks
from tests.engine import mesh_programs


def test_tensor_parallel_ranks_stand_together_and_pipeline_ranks_furthest_apart(eight: Ranks) -> None:
    places = eight.run(mesh_programs.places, "dp=2,tp=2,pp=2", timeout_seconds=60)
    assert [place["tp"] for place in places] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]
    assert places[0]["dp"] == (0, 2)
    assert places[5]["dp"] == (5, 7)
    assert places[3]["pp"] == (3, 7)
    assert places[6]["model"] == (2, 3, 6, 7)
    assert all(place["world"] == tuple(range(8)) for place in places)


def test_every_rank_knows_all_pipelines_in_the_order_of_the_world(eight: Ranks) -> None:
    for pipelines in eight.run(mesh_programs.pipelines, "dp=2,tp=2,pp=2", timeout_seconds=60):
        assert pipelines == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_context_parallel_ranks_stand_between_and_their_gradients_are_summed_with_the_replicas(eight: Ranks) -> None:
    places = eight.run(mesh_programs.places, "dp=2,cp=2,tp=2", timeout_seconds=60)
    assert places[0]["cp"] == (0, 2)
    assert places[0]["gradients"] == (0, 2, 4, 6)
    assert places[7]["gradients"] == (1, 3, 5, 7)


def test_experts_are_carved_from_the_ranks_that_hold_the_same_dense_weights(eight: Ranks) -> None:
    text = mesh_programs.with_ep("dp=2,cp=2,tp=2", 2)
    places = eight.run(mesh_programs.places, text, timeout_seconds=60)
    assert places[0]["ep"] == (0, 2)
    assert places[0]["expert_gradients"] == (0, 4)
    assert places[7]["ep"] == (5, 7)


def test_groups_of_the_same_ranks_are_one_group_and_sums_go_through_each(eight: Ranks) -> None:
    for is_one, sums in eight.run(mesh_programs.sums, "tp=4,pp=2", timeout_seconds=60):
        assert is_one
        assert sums in ({"tp": 6.0, "world": 28.0}, {"tp": 22.0, "world": 28.0})


def test_ranks_with_another_plan_are_named_before_any_group_is_made(eight: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        eight.run(mesh_programs.disagree, 5, timeout_seconds=60)
    assert caught.value.rank == 5
    assert caught.value.problem.startswith("rank 5 failed: rank 0 has the plan tp=8, but rank 5 has dp=8")
    assert caught.value.remedy == "the plan tp=8 on every rank"


def test_another_number_of_ranks_than_the_plans_is_refused() -> None:
    with pytest.raises(ShardwiseError, match="plan tp=2 needs 2 ranks but there is 1"):
        make_mesh(Plan(tp=2))


def test_one_rank_alone_needs_no_process_group() -> None:
    mesh = make_mesh(Plan())
    assert mesh.group("tp").size == 1
    assert mesh.ranks("world") == (0,)
    assert mesh.pipelines == ((0,),)
    with pytest.raises(ShardwiseError, match="unknown group 'tpp'; known: tp, cp, dp"):
        mesh.group("tpp")
