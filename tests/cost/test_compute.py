"""Seconds of matmuls and blocks: bounds that hold whatever the constants are, and shapes that cost what facts say."""

from typing import Any

import numpy as np
import pytest

from shardwise.cluster.catalogue import get_device
from shardwise.cost.compute import Engine, matmul_seconds
from shardwise.cost.constants import CONSTANTS
from shardwise.cost.software import Software
from shardwise.model.catalogue import get_model
from shardwise.model.flops import flops
from shardwise.model.model import Block
from shardwise.model.operations import Attention, Scan
from shardwise.model.share import Share
from shardwise.planner.question import usual_software

H100 = get_device("h100")


def seconds(m: int, k: int, n: int, **extra: int) -> float:
    return float(matmul_seconds(H100, 800e12, m, k, n, constants=CONSTANTS, **extra))


@pytest.mark.parametrize("shape", [(1, 4096, 4096), (128, 128, 128), (8192, 8192, 8192), (8192, 4096, 14336)])
def test_a_matmul_is_never_faster_than_its_arithmetic_or_its_bytes(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    assert seconds(m, k, n) >= 2 * m * k * n / 800e12
    assert seconds(m, k, n) >= 2 * (m * k + k * n + m * n) / H100.memory_bytes_per_second


def test_a_large_matmul_comes_near_the_rate_and_a_thin_one_near_the_bandwidth() -> None:
    assert seconds(16384, 16384, 16384) == pytest.approx(2 * 16384**3 / 800e12, rel=0.06)
    read = 2 * 8192 * 28672 / (H100.memory_bytes_per_second * CONSTANTS.streaming)
    assert seconds(1, 8192, 28672) == pytest.approx(read, rel=0.01)


def test_one_tile_more_than_fills_the_waves_costs_a_wave() -> None:
    # 132 units and tiles of 256 x 128: 33 x 4 tiles are one wave, 34 x 4 are two (facts 3.3).
    one, two = seconds(256 * 33, 8192, 512), seconds(256 * 33 + 1, 8192, 512)
    assert 1.3 < two / one <= 2.0


def test_groups_of_rows_are_priced_together() -> None:
    # Eight products of an eighth of the rows take about as long as one of all, and less than eight calls.
    assert seconds(1024, 4096, 4096, count=8) == pytest.approx(seconds(8192, 4096, 4096), rel=0.15)


def engine(device: str = "h100", **software: Any) -> Engine:
    return Engine(device=get_device(device), software=Software(**software), constants=CONSTANTS)


def layer() -> Block:
    return next(block for block, _ in get_model("llama3-8b").kinds if block.stack)


def test_a_backward_is_about_twice_a_forward() -> None:
    block = layer()
    passes = engine().block(block, Share(sequence=8192, microbatch=1))
    assert 1.8 < float((passes.input + passes.weight) / passes.forward) < 2.6


def test_tensor_parallel_ranks_share_a_layer_but_not_its_norms() -> None:
    block = layer()
    whole = engine().block(block, Share(sequence=8192, microbatch=1))
    half = engine().block(block, Share(sequence=8192, microbatch=1, tp=2))
    cut = engine().block(block, Share(sequence=8192, microbatch=1, tp=2, sequence_parallel=True))
    assert 0.5 < float(cut.forward / whole.forward) < float(half.forward / whole.forward) < 0.62


def test_kernels_are_ordered_as_they_were_measured() -> None:
    block = layer()
    seconds_of = {
        kernel: float(
            engine("a100", attention=kernel)
            .block(block, Share(sequence=8192, microbatch=1, flash=kernel.startswith("flash")))
            .forward
        )
        for kernel in ("flash2", "flash1", "megatron", "torch")
    }
    assert list(seconds_of.values()) == sorted(seconds_of.values())


def test_eight_bits_are_faster_than_sixteen_but_not_twice() -> None:
    block = layer()
    share = Share(sequence=8192, microbatch=1)
    ratio = float(
        engine(precision="bf16").block(block, share).forward / engine(precision="fp8").block(block, share).forward
    )
    assert 1.1 < ratio < 2.0


def test_many_shares_are_priced_at_once_as_one_by_one() -> None:
    block = layer()
    tp = np.array([1, 2, 4, 8])
    together = engine().block(block, Share(sequence=4096, microbatch=2, tp=tp)).forward
    alone = [float(engine().block(block, Share(sequence=4096, microbatch=2, tp=int(one))).forward) for one in tp]
    assert together == pytest.approx(np.array(alone))


def test_scans_are_hardly_faster_on_blackwell_than_on_hopper() -> None:
    # Their kernels have no instructions of either. By their bytes they would be twice as fast.
    block = next(block for block, _ in get_model("nemotron-3-nano").kinds if block.kind == "mamba")
    scan = next(each for each in block.operations if isinstance(each, Scan))
    share = Share(sequence=4096, microbatch=2)
    hopper, blackwell = (
        Engine(device=get_device(name), software=Software(), constants=CONSTANTS).operation(scan, share).total
        for name in ("h100", "b200")
    )
    assert 1.0 < float(hopper / blackwell) < 1.3


def test_complex_numbers_are_rotated_by_kernels_of_their_own() -> None:
    block = next(block for block, _ in get_model("llama3-8b").kinds if block.stack)
    share = Share(sequence=8192, microbatch=1)
    fused, apart = (
        Engine(device=H100, software=Software(complex_rotation=is_complex), constants=CONSTANTS).block(block, share)
        for is_complex in (False, True)
    )
    assert 1.0 < float(apart.forward / fused.forward) < 1.1


def test_attention_is_as_fast_as_measured_and_slower_with_smaller_heads() -> None:
    # 4 x 32 heads x 4096 x 64, causal, both passes, on an H200: 383 TFLOP/s with cuDNN's kernel, of which a step holds
    # as much as of the best matmul; 235 with torch's, which draws less power.
    share = Share(sequence=4096, microbatch=4, flash=True)
    small, large = (Attention(name="attention", heads=32, kv_heads=32, qk_dim=size, v_dim=size) for size in (64, 128))
    for kernel, measured in (("flash3", CONSTANTS.sustained_hopper * 383e12), ("flash2", 235e12)):
        engine = Engine(device=get_device("h200"), software=Software(attention=kernel), constants=CONSTANTS)
        rate = flops(small, share).total / engine.operation(small, share).total
        assert rate == pytest.approx(measured, rel=0.06)
    fast = Engine(device=get_device("h200"), software=Software(attention="flash3"), constants=CONSTANTS)
    assert fast.operation(large, share).total < 2 * fast.operation(small, share).total


def test_under_context_parallelism_attention_is_priced_by_the_kernel_that_joins_pieces() -> None:
    operation = Attention(name="attention", heads=32, kv_heads=8, qk_dim=128, v_dim=128)
    share = Share(sequence=8192, microbatch=1, cp=np.array([1, 2]), flash=True)
    ours = usual_software(get_device("h100"))
    found, fast, plain = (
        Engine(device=get_device("h100"), software=software, constants=CONSTANTS).operation(operation, share).total
        for software in (ours, Software(attention="flash3"), Software(attention="flash2"))
    )
    assert found[0] == pytest.approx(fast[0])
    assert found[1] == pytest.approx(plain[1])
    assert found[1] > 1.2 * fast[1]
