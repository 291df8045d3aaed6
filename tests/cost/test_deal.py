"""Layers over stages: none is lost, and published programs deal them out as their sources say."""

import numpy as np
import pytest

from shardwise.cost.deal import Deal, deal, mix
from shardwise.cost.layouts import BALANCE, Layouts
from shardwise.cost.pipeline import SCHEDULES


def dealt(num_layers: int, pp: int, balance: str) -> Deal:
    """With an embedding that weighs nothing and a head that weighs two layers."""
    return deal(num_layers, Layouts.of(pp=pp, balance=BALANCE.index(balance)), 0.0, 2.0)


@pytest.mark.parametrize("balance", BALANCE)
@pytest.mark.parametrize(("num_layers", "pp"), [(40, 1), (40, 2), (40, 4), (78, 12), (60, 16), (31, 3)])
def test_every_layer_is_on_some_stage(num_layers: int, pp: int, balance: str) -> None:
    first, middle, last, extra = (float(each[0]) for each in dealt(num_layers, pp, balance))
    total = first if pp == 1 else first + (pp - 2) * middle + last
    assert total == pytest.approx(num_layers)
    assert extra >= 0
    assert min(first, middle, last) >= 0


@pytest.mark.parametrize(
    ("num_layers", "pp", "stages"),
    [(40, 2, [21, 19]), (40, 4, [10, 11, 11, 8]), (60, 4, [15, 16, 16, 13]), (80, 8, [10, 11, 11, 10, 10, 10, 10, 8])],
)
def test_slots_count_embedding_norm_and_head_and_give_the_rest_to_the_first(
    num_layers: int, pp: int, stages: list[int]
) -> None:
    first, middle, last, extra = (float(each[0]) for each in dealt(num_layers, pp, "slots"))
    assert (first, last) == (stages[0], stages[-1])
    if pp > 2:
        assert middle + extra == max(stages[1:-1])
        assert middle == pytest.approx(np.mean(stages[1:-1]))


def test_front_fills_stages_from_the_first_and_the_last_has_what_is_left() -> None:
    first, middle, last, extra = (float(each[0]) for each in dealt(78, 12, "front"))
    assert (first, middle, last, extra) == (7, 7, 1, 0)


def test_by_weight_a_heavy_head_leaves_fewer_layers_beside_it() -> None:
    found = dealt(40, 4, "weight")
    assert float(found.last[0]) == pytest.approx(float(found.first[0]) - 2)


@pytest.mark.parametrize(("num_layers", "pp", "chunks"), [(32, 7, 4), (32, 2, 16), (36, 8, 4), (16, 8, 1)])
def test_every_chunk_has_a_layer_however_much_the_head_weighs(num_layers: int, pp: int, chunks: int) -> None:
    layouts = Layouts.of(pp=pp, chunks=chunks, schedule=SCHEDULES.index("interleaved"), balance=BALANCE.index("ranks"))
    first, middle, last, _ = (float(each[0]) for each in deal(num_layers, layouts, 0.0, 2.6))
    assert last == pytest.approx(max((num_layers + 2.6) / pp - 2.6, chunks))
    assert first + (pp - 2) * middle + last == pytest.approx(num_layers)


def test_balances_are_dealt_together_as_one_by_one() -> None:
    together = deal(40, Layouts.of(pp=4, balance=list(range(len(BALANCE)))), 0.0, 2.0)
    for index, balance in enumerate(BALANCE):
        assert [float(each[index]) for each in together] == [float(each[0]) for each in dealt(40, 4, balance)]


@pytest.mark.parametrize(("pp", "balance"), [(1, "even"), (2, "even"), (4, "ends"), (5, "weight")])
def test_layers_of_another_kind_at_the_beginning_are_on_the_first_rank(pp: int, balance: str) -> None:
    of = dealt(27, pp, balance)
    first, middle, last, layer = mix((0, 0, 0, *[1] * 24), 2, of)
    assert first[0] == pytest.approx([3, of.first[0] - 3])
    if pp > 1:
        assert last[0] == pytest.approx([0, of.last[0]])
    if pp > 2:
        assert middle[0] == pytest.approx([0, of.middle[0]])
        assert layer[0] == pytest.approx([0, 1])
