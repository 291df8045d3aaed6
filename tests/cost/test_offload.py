"""What goes to the host and back, priced pass by pass, beside what was measured on one H200."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cluster.catalogue import NODES
from shardwise.cluster.cluster import Cluster
from shardwise.cost.host import link_rate
from shardwise.cost.memory import NOT_ALLOCATED
from shardwise.planner.account import Account, account
from shardwise.planner.plan import Plan
from shardwise.planner.question import make_question, usual_software

_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# The models of benchmarks/offload.py and benchmarks/gpu_traces.py.
_LLAMA = {"model_type": "llama", "max_position_embeddings": 2048, "head_dim": 128}
_LARGE = _LLAMA | {
    "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
    "intermediate_size": 8192, "vocab_size": 128_256, "tie_word_embeddings": True,
}  # fmt: skip
_MIDDLE = _LLAMA | {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 5504, "vocab_size": 32_000, "tie_word_embeddings": False,
}  # fmt: skip


def _results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((_RESULTS / f"{name}.json").read_text())["results"]
    return found


def _account(model: dict[str, Any], plan: str, batch: int, cluster: str = "1xh200") -> Account:
    wide = usual_software(Cluster.parse(cluster).pools[0].device, is_wide=True)  # As the modules were that ran.
    return account(make_question(model, cluster=cluster, batch=batch, sequence=2048, software=wide), Plan.parse(plan))


@pytest.mark.parametrize("name", ["optimizer", "parameters", "parameters_at_once"])
def test_states_and_weights_on_the_host_take_as_long_as_measured(name: str) -> None:
    measured = _results("offload")[name]
    found = _account(_LARGE, measured["plan"], 8)
    assert found.seconds == pytest.approx(measured["seconds"], rel=0.1)
    assert found.host_bytes == pytest.approx(1e9 * measured["host_gb"], rel=0.01)


# Llama-3B of benchmarks/offload.py in bf16, with master weights: 8 microbatches of 2048 positions on one H200 with
# AdamW(fused=True), 2026-11-18. Seconds of a step, and on the host bytes of a parameter. With anything on the host, the
# engine stages in free memory, so peaks are not compared.
@pytest.mark.parametrize(
    ("more", "seconds", "host_bytes"),
    [(",offload.optimizer=1", 1.134, 8.0), (",offload.parameters=1", 4.144, 16.0)],
)
def test_16_bit_weights_with_masters_on_the_host_take_as_long_as_measured(
    more: str, seconds: float, host_bytes: float
) -> None:
    question = make_question(_LARGE, cluster="1xh200", batch=8, sequence=2048)
    found = account(question, Plan.parse(f"precision=bf16,microbatches=8{more}"))
    assert found.seconds == pytest.approx(seconds, rel=0.1)
    assert found.host_bytes == pytest.approx(host_bytes * 3_212_749_824, rel=0.01)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_step_that_copies_gradients_to_fp32_holds_what_was_measured(batch: int) -> None:
    # The same model: 16 bytes of a parameter, and 4 in the step. With torch's default `foreach` it was 24.02.
    question = make_question(_LARGE, cluster="1xh200", batch=batch, sequence=2048)
    found = account(question, Plan.parse(f"precision=bf16,microbatches={batch}"))
    tensors = sum(part for name, part in found.ranks[0].parts.items() if name not in NOT_ALLOCATED)
    assert tensors == pytest.approx(20.02 * 3_212_749_824, rel=0.01)


def test_activations_on_the_host_take_as_long_as_measured() -> None:
    measured = _results("gpu_traces")["activations offloaded"]
    found = _account(_MIDDLE, "precision=bf16,offload.activations=1", 4)
    assert found.seconds == pytest.approx(measured["step_seconds"], rel=0.1)
    copied = measured["sums_seconds"]["device to host"] * 55.2e9  # peers.md: pinned copies, one way
    assert found.host_bytes == pytest.approx(copied, rel=0.1)


def test_one_direction_hides_behind_one_pass() -> None:
    """More compute in the backward does not pay for copies out of the forward."""
    plain, offloaded = (
        _account(_MIDDLE, f"precision=bf16,microbatches=2{more}", 8) for more in ("", ",offload.activations=1")
    )
    half = offloaded.host_bytes / 55e9
    # Copies are longer than either pass: each of them takes as long as its copies.
    assert offloaded.seconds > plain.parts["optimizer"] + 2 * 2 * half * 0.95


def test_devices_on_one_switch_share_its_way_up() -> None:
    host = NODES["a100-80g"].host
    assert link_rate(host, 1) == host.device_bytes_per_second
    assert link_rate(host, 8) == host.device_bytes_per_second / 2
