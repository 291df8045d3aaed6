"""Models over ranks and replicas answer as one device does."""

import re
from pathlib import Path
from threading import Event

import pytest
from torch import Tensor

from shardwise.cluster.cluster import Cluster
from shardwise.cluster.pairs import Pairs
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.gpus import Found, Gpu
from shardwise.ranks.spawn import Ranks
from shardwise.serving.kv_cache import Inputs
from shardwise.serving.limits import Limits
from shardwise.serving.ranked import deal
from shardwise.serving.replicas import Replicas
from shardwise.serving.request import Token
from shardwise.serving.runner import prepare
from shardwise.serving.seating import gpus_of, seats_of
from shardwise.serving.sequence import Piece, Sequence
from shardwise.serving.sharded import load_sharded
from shardwise.serving.shards import Shard
from tests.nets.families import save_theirs
from tests.serving.answers import answer, ask, both, engine_over, expected, prompts

LIMITS = Limits(kv_bytes=2**20, block_size=4, token_budget=24, max_running=24)


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("llama", "tp=2"),
        ("gpt2", "pp=2"),
        ("qwen3-moe", "dp=2,ep=2"),
        ("llama", "pp=2,layers=3+1"),
        pytest.param("llama", "pp=2", marks=pytest.mark.whole),
        pytest.param("llama, biases", "tp=2", marks=pytest.mark.whole),
        pytest.param("qwen2, windows", "tp=2", marks=pytest.mark.whole),
        pytest.param("qwen3", "pp=2", marks=pytest.mark.whole),
        pytest.param("mistral", "tp=2", marks=pytest.mark.whole),
        pytest.param("mixtral", "tp=2", marks=pytest.mark.whole),
        pytest.param("mixtral", "dp=2,ep=2", marks=pytest.mark.whole),
        pytest.param("deepseek-v2", "tp=2", marks=pytest.mark.whole),
        pytest.param("deepseek-v3", "pp=2", marks=pytest.mark.whole),
        pytest.param("deepseek-v3", "dp=2,ep=2", marks=pytest.mark.whole),
        pytest.param("gpt2", "tp=2", marks=pytest.mark.whole),
    ],
)
def test_ranks_give_the_tokens_of_one_device(family: str, plan: str, two: Ranks, tmp_path: Path) -> None:
    theirs = save_theirs(family, tmp_path)
    engine = load_sharded(str(tmp_path), plan, LIMITS, ranks=two)
    given = prompts(4)
    found = answer(engine, [ask(prompt, f"r{number}", num_tokens=6) for number, prompt in enumerate(given)])
    assert found == [expected(theirs, prompt, 6) for prompt in given]
    engine.close()


def test_replicas_answer_as_one_and_get_what_they_have_cached() -> None:
    theirs, ours = both("llama")
    given = prompts(6, shortest=10)
    engine = Replicas([engine_over(ours), engine_over(ours)])
    wanted = [expected(theirs, prompt) for prompt in given]
    # One model's modules are shared here, so the two step one after the other.
    for turn in range(2):
        for number, prompt in enumerate(given):
            assert answer(engine, [ask(prompt, f"{turn}-{number}")]) == [wanted[number]]
    hits = sum((len(prompt) - 1) // 4 * 4 for prompt in given)
    assert engine.load().prefix_cache_hits == hits
    assert engine.load().num_used_blocks == 0
    engine.close()


def test_a_replica_in_a_long_step_holds_up_no_other() -> None:
    model = both("llama")[1]
    slow, quick = engine_over(model), engine_over(model)
    may_go, plain = Event(), slow.runner.run

    def run(inputs: Inputs) -> Tensor:
        assert may_go.wait(60)
        return plain(inputs)

    slow.runner.run = run  # type: ignore[method-assign]
    engine = Replicas([slow, quick])
    for name in ("slow", "quick"):
        engine.add(ask(prompts(1)[0], name, num_tokens=5))
    told: list[Token] = []
    while not any(token.finish for token in told):
        told += engine.step()
    assert {token.request for token in told} == {"quick"}
    may_go.set()
    while engine.has_work():
        told += engine.step()
    assert [token.request for token in told] == ["quick"] * 5 + ["slow"] * 5
    engine.close()


def test_a_step_is_dealt_into_batches_of_whole_sequences() -> None:
    pieces = []
    for number, count in enumerate((5, 1, 1, 9, 2)):
        sequence = Sequence(
            request=ask(range(count)), arrival=number, seed=0, root=b"", tokens=list(range(count)), blocks=[number] * 3
        )
        pieces.append(Piece(sequence=sequence, start=0, count=count))
    inputs = prepare(pieces, 4, both("llama")[1].embed.weight.device)
    for count in (1, 2, 3, 7):
        batches = deal(inputs, count)
        assert len(batches) <= count
        assert [length for batch in batches for length in batch.lengths] == inputs.lengths
        assert [token for batch in batches for token in batch.tokens.tolist()] == inputs.tokens.tolist()
        assert sum(len(batch.wanted) for batch in batches) == 5
        assert all(batch.starts[0] == 0 and batch.starts[-1] == len(batch.tokens) for batch in batches)


def test_ranks_sit_where_what_they_send_takes_least() -> None:
    """Devices 0 and 2 are near each other, and 1 and 3."""
    near, far = 100e9, 5e9
    rates = tuple(tuple(near if (a - b) % 2 == 0 else far for b in range(4)) for a in range(4))
    pairs = Pairs(hosts=("h",) * 4, devices=tuple("0123"), bytes_per_second=rates, latency_seconds=((1e-6,) * 4,) * 4)
    cluster = Cluster(pools=Cluster.parse("1x4xh100").pools, pairs=pairs)
    settings = both("llama")[1].settings
    seats = seats_of(settings, Shard(tp=2), 2, cluster)
    assert sorted(map(sorted, (seats.devices[:2], seats.devices[2:]))) == [[0, 2], [1, 3]]
    assert seats.seconds < seats.plain_seconds
    # Of two stages of two, sums go over the near ways and hidden states over the far ones.
    staged = seats_of(settings, Shard(tp=2, pp=2), 1, cluster)
    assert sorted(map(sorted, (staged.devices[:2], staged.devices[2:]))) == [[0, 2], [1, 3]]
    with pytest.raises(ShardwiseError, match="the cluster has 4 devices, and the plan 2 ranks"):
        seats_of(settings, Shard(tp=2), 1, cluster)


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ("tp=4", "tp=4 does not divide 2 KV heads"),
        ("dp=2,ep=2", "ep=2, and the model has no experts"),
        ("pp=8", "pp=8 is more than 4 layers"),
        ("pp=2,layers=3+3", "layers=3+3 is 6 layers, and the model has 4, and each stage needs at least one"),
        ("cp=2", "the plan cp=2 has cp=2, and serving does not split sequences"),
    ],
)
def test_what_cannot_be_cut_so_is_refused_before_ranks_start(plan: str, problem: str, tmp_path: Path) -> None:
    save_theirs("llama", tmp_path)
    with pytest.raises(ShardwiseError) as caught:
        load_sharded(str(tmp_path), plan, LIMITS)
    assert caught.value.problem == problem


@pytest.mark.parametrize(
    ("plan", "unused"),
    [
        ("pp=2,layers=3+1,zero=1,precision=bf16", "zero=1"),
        # Two stages on a rank: with these counts, half of the layers would be on no rank.
        ("pp=2,schedule=interleaved,microbatches=2,layers=4x1", "schedule=interleaved,microbatches=2,layers=4x1"),
    ],
)  # fmt: skip
def test_a_plan_of_a_training_serves_and_what_is_not_used_is_said(
    plan: str, unused: str, two: Ranks, tmp_path: Path
) -> None:
    save_theirs("llama", tmp_path / "model")
    Plan.parse(plan).save(tmp_path / "plan.toml")
    with pytest.warns(UserWarning, match=re.escape(f"serving does not use {unused} of the plan {plan}")):
        engine = load_sharded(str(tmp_path / "model"), str(tmp_path / "plan.toml"), LIMITS, ranks=two)
    assert engine.summary.plan == ("pp=2,layers=3+1" if "3+1" in plan else "pp=2")
    assert engine.summary.precision == ("bfloat16" if "bf16" in plan else "float32")
    engine.close()


def test_replicas_take_gpus_of_their_own_and_too_few_are_told_before_ranks_start() -> None:
    gpu = Gpu(name="G", memory_bytes=2**30, capability=(9, 0))
    four = Found(gpus=(gpu,) * 4, num_in_machine=4)
    assert gpus_of(((0, 1), (2, 3)), four, "tp=2,dp=2") == (
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    )
    some = Found(gpus=(gpu,) * 2, num_in_machine=8, visible="5,7")
    assert gpus_of(((1,), (0,)), some, "dp=2") == ({"CUDA_VISIBLE_DEVICES": "7"}, {"CUDA_VISIBLE_DEVICES": "5"})
    assert gpus_of(((0,), (1,)), Found(), "dp=2") == ({}, {})
    with pytest.raises(ShardwiseError, match="the plan tp=2,dp=2 takes 4 GPUs, and 2 are here") as caught:
        gpus_of(((0, 1), (2, 3)), some, "tp=2,dp=2")
    assert caught.value.remedy == "a plan of fewer ranks; or CUDA_VISIBLE_DEVICES= to serve on CPUs"
