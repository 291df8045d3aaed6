"""Plans for serving from the planner, predictions, and layers for stages that are not alike."""

import pytest

from shardwise.cluster.file import find_cluster
from shardwise.errors import ShardwiseError
from shardwise.nets.settings import Settings
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.serving.forecast import choose_plan, deal_layers, forecast
from shardwise.serving.ranked import layers_by_speed
from shardwise.serving.shards import Shard
from shardwise.serving.sources import describe_source
from tests.serving.answers import both


def settings_of(name: str) -> Settings:
    return describe_source(name, random_weights=True, dtype=None)[0]


def test_throughput_wants_replicas_and_latency_wants_ranks_that_compute_a_token_together() -> None:
    settings, cluster = settings_of("llama-3.1-8b"), find_cluster("8xh100")
    most, soonest = (choose_plan(settings, cluster, goal) for goal in ("tokens", "latency"))
    assert most.dp > soonest.dp
    assert soonest.tp > most.tp
    assert choose_plan(settings, find_cluster("1xh100")) == Plan()


def test_a_model_that_one_device_has_no_room_for_is_cut() -> None:
    plan = choose_plan(settings_of("llama-3.1-70b"), find_cluster("4xh100"))
    assert plan.tp * plan.pp >= 2
    with pytest.raises(ShardwiseError, match="cannot be served on"):
        choose_plan(settings_of("llama-3.1-405b"), find_cluster("2xh100"))


def test_predictions_follow_what_is_served() -> None:
    settings, cluster = settings_of("llama-3.1-8b"), find_cluster("8xh100")

    def predicted(plan: str, sequences: int) -> tuple[float, float]:
        found = forecast(
            settings, cluster, Plan.parse(plan), num_blocks=100_000, block_size=16, max_running=sequences, width=2
        )
        assert found.line().startswith(f"predicted for prompts of 512 tokens and answers of 128, {sequences} sequence")
        return found.each_token_seconds, found.tokens_per_second

    one, many = predicted("dp=1", 1), predicted("dp=1", 64)
    assert one[0] < many[0] < 64 * one[0]
    assert many[1] > 10 * one[1]
    assert predicted("dp=8", 64)[1] == pytest.approx(8 * many[1])
    assert predicted("tp=8", 1)[0] < one[0]
    # 8B weights of 2 bytes at 3.35 TB/s are 4.8 ms a token at least.
    assert 0.0048 < one[0] < 0.0096


def test_weights_in_fewer_bits_are_read_sooner_and_prompts_make_them_wide() -> None:
    settings, cluster = settings_of("llama-3.1-8b"), find_cluster("1xh100")

    def predicted(weights: str | None) -> tuple[float, float]:
        found = forecast(
            settings, cluster, Plan(), num_blocks=1000, block_size=16, max_running=1, width=2, weights=weights
        )
        return found.each_token_seconds, found.first_token_seconds - found.each_token_seconds

    wide, fp8, int4 = (predicted(weights) for weights in (None, "fp8", "int4"))
    # Seven of eight billion weights are layers': 7.0 GB fewer at 3.35 TB/s are 2.1 ms, less where tiles take longer.
    assert 0.5 * 0.0021 < wide[0] - fp8[0] < 1.1 * 0.0021
    assert int4[0] <= fp8[0]
    assert wide[1] <= int4[1] <= fp8[1] < 2 * wide[1]


def test_layers_go_where_they_take_least_and_have_room() -> None:
    assert deal_layers(12, [1.0, 1.0], [100, 100], 1) == (6, 6)
    assert deal_layers(12, [2.0, 1.0], [100, 100], 1) == (8, 4)
    assert deal_layers(12, [2.0, 1.0], [5, 100], 1) == (5, 7)
    assert deal_layers(3, [100.0, 1.0, 1.0], [100, 100, 100], 1) == (1, 1, 1)
    with pytest.raises(ShardwiseError, match=r"12 layers of 1.00 GiB do not fit the 10.0 GiB"):
        deal_layers(12, [1.0, 1.0], [5 * 2**30, 5 * 2**30], 2**30)


def test_ranks_measure_themselves(two: Ranks) -> None:
    settings = both("llama")[1].settings
    counts = layers_by_speed(two, settings, Shard(pp=2), both("llama")[1].embed.weight.dtype)
    assert sum(counts) == settings.num_layers
    assert min(counts) >= 1
