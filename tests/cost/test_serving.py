"""What a token takes in serving, against our own engine as it was measured on one H200."""

import json
from pathlib import Path

import numpy as np
import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cost.serving import Served, _most_that_come, serve
from shardwise.model.catalogue import get_model
from shardwise.planner.question import usual_software

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "serving.json"
# Sequences at once, tokens of a prompt and of an answer. 256 requests that end one after the other: 133,966 tokens in
# 1,025 steps are 131 at once.
CASES = {"one again": (1, 128, 256), "32 again": (32, 128, 256), "256 again": (131, 558, 523)}


def predict(model: str, case: str) -> Served:
    sequences, prompt, output = CASES[case]
    pool, one = Cluster.parse("1xh200").pools[0], np.array([1])
    return serve(
        get_model(model), pool, tp=one, pp=one, ep=one, sequences=np.array([sequences]), prompt=prompt, output=output,
        software=usual_software(pool.device),
    )  # fmt: skip


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-8b"])
@pytest.mark.parametrize("case", CASES)
def test_a_token_takes_as_long_as_measured(model: str, case: str) -> None:
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))["results"][model][case]["step_milliseconds"] / 1e3
    assert float(predict(model, case).each_token[0]) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("groups", [2, 8])
@pytest.mark.parametrize("mean", [0.1, 0.5, 4.0])
def test_the_group_with_most_prompts_to_read_holds_up_a_pipeline(mean: float, groups: int) -> None:
    drawn = np.random.default_rng(0).poisson(mean, (100_000, groups)).max(axis=1).mean()
    found = _most_that_come(np.array([mean, mean]), np.array([groups, 1]))
    assert found == pytest.approx([drawn, mean], rel=0.02)


def test_a_70b_model_is_served_as_people_serve_it() -> None:
    served = {
        (tp, pp): float(at(tp=tp, pp=pp, sequences=sequences).tokens_per_second[0]) * 8 / (tp * pp)
        for tp, pp, sequences in ((4, 1, 256), (8, 1, 1024), (1, 8, 1024))
    }
    assert served[4, 1] > served[8, 1] > served[1, 8]


def at(*, tp: int, pp: int, sequences: int) -> Served:
    """Llama 70B on eight H100."""
    pool = Cluster.parse("8xh100").pools[0]
    tps, pps, eps, counts = (np.array([size]) for size in (tp, pp, 1, sequences))
    return serve(
        get_model("llama3-70b"), pool, tp=tps, pp=pps, ep=eps, sequences=counts, prompt=1024, output=256,
        software=usual_software(pool.device),
    )  # fmt: skip


@pytest.mark.parametrize("model", ["qwen3-0.6b", "qwen3-8b"])
def test_there_is_room_for_as_many_blocks_as_the_engine_has(model: str) -> None:
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))["results"][model]["num_blocks"]
    assert float(predict(model, "one again").num_blocks[0]) == pytest.approx(measured, rel=0.05)
