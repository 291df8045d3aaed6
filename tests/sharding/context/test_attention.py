"""Ring and all-to-all attention on real ranks, against attention on one device."""

from dataclasses import replace

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import Group
from shardwise.ranks.spawn import Ranks
from shardwise.sharding.context.all_to_all import share_heads
from shardwise.sharding.context.mask import Mask
from shardwise.sharding.context.parallel import ContextParallel
from tests.crowd import Crowds
from tests.sharding.context.attention import Case, joined, run_case

CAUSAL = Mask(causal=True)
CASES = {
    "causal": Case(mask=CAUSAL),
    "full": Case(mask=Mask(causal=False)),
    "full, with tokens added": Case(mask=Mask(causal=False), num_real=43),
    "gqa": Case(mask=CAUSAL, num_heads=6, num_key_heads=2),
    "mqa": Case(mask=CAUSAL, num_key_heads=1),
    "heads that do not divide": Case(mask=CAUSAL, num_heads=15, num_key_heads=3),
    "a narrow window": Case(mask=replace(CAUSAL, window=3)),
    "a wide window": Case(mask=replace(CAUSAL, window=17)),
    "a window both ways": Case(mask=Mask(causal=False, window=9)),
    "documents": Case(mask=replace(CAUSAL, documents=True)),
    "documents in a window": Case(mask=replace(CAUSAL, documents=True, window=5), num_key_heads=2),
    "padding": Case(mask=replace(CAUSAL, padding=True)),
    "padding, full": Case(mask=Mask(causal=False, padding=True)),
    "capped logits": Case(mask=CAUSAL, cap=2.0, num_key_heads=2),
    "values of another size": Case(mask=CAUSAL, query_dim=12, value_dim=8),
    "pieces of one token": Case(mask=CAUSAL, length=24),
    "float64": Case(mask=CAUSAL, dtype=torch.float64),
}


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest, crowds: Crowds) -> Ranks:
    return crowds.of(request.param)


@pytest.mark.parametrize("form", ["ring", "all-to-all"])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_one_device(ranks: Ranks, form: str, name: str) -> None:
    case = CASES[name]
    for found, wanted in zip(joined(ranks.run(run_case, form, case)), case.plain(), strict=True):
        if case.num_real is not None and found.shape[1] == case.num_heads:
            found, wanted = found[:, :, : case.num_real], wanted[:, :, : case.num_real]
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("form", ["ring", "all-to-all"])
def test_a_rerun_gives_the_same_bits(ranks: Ranks, form: str) -> None:
    case = CASES["gqa"]
    for first, second in zip(
        joined(ranks.run(run_case, form, case)), joined(ranks.run(run_case, form, case)), strict=True
    ):
        assert torch.equal(first, second)


def test_a_ring_sends_keys_and_values_to_all_others_twice_and_their_gradients_once(ranks: Ranks) -> None:
    size, case = ranks.devices, CASES["gqa"]
    here = 2 * case.num_key_heads * (case.length // size) * (case.query_dim + case.value_dim) * 4
    for _, traffic in ranks.run(run_case, "ring", case):
        assert traffic.calls == {"send": 3 * (size - 1)}
        assert traffic.bytes == {"send": 3 * (size - 1) * here}


def test_a_window_is_sent_only_as_far_as_it_reaches(ranks: Ranks) -> None:
    num_hops = min(2, ranks.devices - 1)  # From the rank before and the rank after.
    for _, traffic in ranks.run(run_case, "ring", CASES["a narrow window"]):
        assert traffic.calls == {"send": 3 * num_hops}


def test_an_exchange_sends_what_the_formula_says(ranks: Ranks) -> None:
    """facts.md 2.5: 4Nh/P a layer and direction, for tokens N, width h and P ranks; of this 1/P stays where it is."""
    size, case = ranks.devices, Case(mask=CAUSAL, num_heads=12, num_key_heads=12)
    width = case.num_heads * case.query_dim
    volume = 4 * (2 * case.length) * width // size * 4
    for _, traffic in ranks.run(run_case, "all-to-all", case):
        assert traffic.calls == {"all_to_all": 4}, "queries, keys and values together, and back; and so backward"
        assert traffic.bytes == {"all_to_all": 2 * volume * (size - 1) // size}


def test_an_exchange_sends_shared_keys_only_where_they_are_needed(ranks: Ranks) -> None:
    size, case = ranks.devices, Case(mask=CAUSAL, num_heads=12, num_key_heads=1)
    row = 2 * (case.length // size) * case.query_dim * 4
    heads = 12 - 12 // size + 2 * (size - 1)  # Queries of other ranks, and the one head of keys and values to each.
    back = (size - 1) * 12 // size
    for _, traffic in ranks.run(run_case, "all-to-all", case):
        assert traffic.bytes == {"all_to_all": 2 * (heads + back) * row}


def test_heads_are_shared_out_evenly_and_too_few_are_refused() -> None:
    assert [len(run) for run in share_heads(7, 3)] == [3, 2, 2]
    with pytest.raises(ShardwiseError, match="2 heads cannot be distributed over cp=4 ranks") as error:
        share_heads(2, 4)
    assert error.value.remedy == "cp=2, or the ring, which does not cut heads"


@pytest.mark.parametrize("cap", [None, 2.0])
def test_under_autocast_only_inputs_and_output_are_short(cap: float | None) -> None:
    context = ContextParallel(Group(), positions=None)
    query, key, value, _ = Case(mask=CAUSAL).inputs()
    with context.running(context.cut({"input_ids": torch.zeros(2, 48)})):
        wanted = context.attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), CAUSAL, None, cap)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = context.attend(query, key, value, CAUSAL, None, cap)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, wanted)
