"""Low-rank adapters: what trains is counted, the rest has no gradients and no states, and steps are as published."""

import pytest

from shardwise.cluster.cluster import Cluster
from shardwise.cost.layouts import Layouts
from shardwise.cost.software import Software
from shardwise.cost.step import price
from shardwise.errors import ShardwiseError
from shardwise.model.adapters import with_lora
from shardwise.model.catalogue import get_model
from shardwise.model.share import Share
from shardwise.planner.runs import Run
from shardwise.planner.validate import predict

LLAMA = get_model("llama3-8b")


def test_adapters_have_as_many_parameters_as_peft_makes() -> None:
    # PEFT, rank 16 at all linear layers of Llama 3 8B (q, k, v, o, gate, up, down): 41,943,040.
    model = with_lora(LLAMA, 16)
    trained = sum(each.count for _, _, each in model.parameters() if each.trains)
    assert trained == 41_943_040
    assert model.num_parameters == LLAMA.num_parameters + trained


def test_a_backward_without_weight_gradients_is_half_as_long() -> None:
    share = Share(sequence=4096)
    plain, adapted = LLAMA.flops(share), with_lora(LLAMA, 16).flops(share)
    assert adapted.forward == pytest.approx(plain.forward, rel=0.02)
    assert adapted.input == pytest.approx(plain.input, rel=0.02)
    assert adapted.weight < 0.02 * plain.weight


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_only_what_trains_has_gradients_and_states(zero: int) -> None:
    layouts = Layouts.of(dp=8, tp=[1, 1], zero=zero, microbatch=1, recompute=2)
    cluster = Cluster.parse("8xh100")
    plain = price(LLAMA, cluster, layouts, sequence=4096).bytes.parts
    adapted = price(with_lora(LLAMA, 16), cluster, layouts, sequence=4096).bytes.parts
    for part in ("gradients", "optimizer", "masters"):
        assert 0 < adapted[part].max() < 0.01 * plain[part].max()
    whole, shards = 2 * LLAMA.num_parameters, 2 * LLAMA.num_parameters / 8
    assert adapted["weights"].max() == pytest.approx(shards if zero == 3 else whole, rel=0.01)


@pytest.mark.parametrize("zero", [1, 3])
def test_what_does_not_train_is_on_the_host_in_two_bytes_and_comes_for_both_passes(zero: int) -> None:
    adapted, engine = with_lora(LLAMA, 16), Software(saves_casts=True)
    layouts = Layouts.of(dp=8, zero=zero, microbatch=1, recompute=2, offload_parameters=[0.0, 1.0])
    found = price(adapted, Cluster.parse("8xh100"), layouts, sequence=128, software=engine)
    held, trained = found.bytes, 41_943_040
    numbers = LLAMA.num_parameters / (8 if zero == 3 else 1)
    # Nothing is cast of what is there as it is computed with, so none of it stays for the backward.
    assert held.parts["weights"][0].max() == pytest.approx(2 * (numbers + trained), rel=1e-6)
    assert held.on_host["weights"][1].max() == pytest.approx(2 * numbers, rel=1e-6)
    assert held.parts["weights"][1].max() < 0.35 * 2 * LLAMA.num_parameters  # Two layers, both ends, adapters cast.
    both_ways = 2 * 2 * numbers / 64e9
    assert 0.8 * both_ways < found.parts["offload"][1] < 1.5 * both_ways


def test_tensor_parallel_ranks_have_their_part_of_each_adapter() -> None:
    block = next(block for block, _ in with_lora(LLAMA, 16).kinds if block.stack)
    whole, half = (block.num_parameters_on(Share(tp=tp), trained=True) for tp in (1, 2))
    cut = sum(each.count for each in block.parameters if each.trains and each.tp_dim is not None)
    assert half == whole - cut // 2


def test_a_rank_below_one_is_refused_with_what_to_type() -> None:
    with pytest.raises(ShardwiseError, match="rank 0") as caught:
        with_lora(LLAMA, 0)
    assert caught.value.remedy == "--lora 16"


# Rows of Megatron-Bridge and Automodel that train adapters (published/runs.csv: bridge-071, bridge-072, automodel-011).
_PUBLISHED = (
    ("gb200", 8, 4, 4, 1, 2, 20, 80, 8192, 64, 28672, "fp8", "", 1, 2.64003),
    ("gb200", 8, 4, 2, 1, 4, 20, 80, 8192, 64, 28672, "mxfp8", "", 1, 2.74992),
    ("h100-80g", 1, 8, 1, 1, 1, 1, 32, 4096, 32, 14336, "bf16", "zero3", 2, 10.51),
)


@pytest.mark.parametrize("row", _PUBLISHED)
def test_published_steps_with_adapters_are_predicted(row: tuple[object, ...]) -> None:
    names = (
        "gpu", "num_gpus", "gpus_per_node", "dp", "tp", "pp", "chunks", "layers", "hidden", "heads", "ffn_hidden",
        "precision", "data_parallel", "microbatch", "step_seconds",
    )  # fmt: skip
    cells = {name: str(value) for name, value in zip(names, row, strict=True)}
    is_bridge = cells["gpu"] == "gb200"
    source = "NVIDIA-NeMo/Megatron-Bridge [LoRA]" if is_bridge else "NVIDIA-NeMo/Automodel (LoRA)"
    cells |= {"id": "bridge-1" if is_bridge else "automodel-1", "source": source, "model": "Llama3", "arch": "dense"}
    cells |= {"kv_heads": "8", "vocab": "128256", "sequence": "4096", "global_batch": "32", "outcome": "ok"}
    found = predict(Run(cells=cells))
    assert found.time_error == pytest.approx(0.0, abs=0.13)
    assert found.fits
