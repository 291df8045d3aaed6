"""Rows, plans and questions with odd values: an answer that makes sense, or a sentence, and never a traceback."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.catalogue import DEVICES
from shardwise.cluster.cluster import Cluster, Pool
from shardwise.cost.layouts import RECOMPUTE
from shardwise.cost.step import Estimate, price
from shardwise.errors import ShardwiseError
from shardwise.planner.account import account
from shardwise.planner.plan import Plan
from shardwise.planner.planning import plan as find_plan
from shardwise.planner.question import make_question
from shardwise.planner.runs import NEEDED, Run, SkippedError, layouts_of, pool_of
from shardwise.planner.stated import balance_of, model_of, software_of
from shardwise.planner.validate import predict, summarise
from shardwise.schedule.catalogue import CATALOGUE

T = TypeVar("T")
SMALL = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 16])
WORDS = ["", " ", "0", "-1", "1.5", "nan", "inf", "1e300", "many", "None", "2 ", "\u00b2", "True", "zero9", "8x0Gb"]

WIDE = sorted(name for name, device in DEVICES.items() if "fp32" in device.flops_per_second)
OTHERS = ("cp", "ep", "chunks", "schedule", "recompute", "data_parallel", "vocab", "kv_heads", "internode", "peak_gib")


@st.composite
def rows(draw: st.DrawFn) -> Run:
    """A row whose numbers agree with each other, however odd they are."""
    dp, tp, pp, cp, microbatch = (draw(SMALL) for _ in range(5))
    heads, width = draw(st.sampled_from([1, 3, 8, 25, 96])), draw(st.sampled_from([8, 64, 100, 108, 128]))
    fewer = draw(st.sampled_from([heads, 1]))
    cells: dict[str, Any] = {
        "id": "odd-1", "source": draw(st.sampled_from(["a test", "Aleph-Alpha/x", "bigscience", "Megatron-Bridge"])),
        "model": "mine", "layers": draw(st.sampled_from([1, 2, 7, 40, 97])), "hidden": heads * width, "heads": heads,
        "kv_heads": draw(st.sampled_from(["", fewer])), "ffn_hidden": draw(st.sampled_from(["", heads * width * 3])),
        "vocab": draw(st.sampled_from(["", 32, 50257, 250000])), "sequence": draw(st.sampled_from([1, 7, 2048, 9999])),
        "gpu": draw(st.sampled_from(WIDE)), "num_gpus": dp * tp * pp * cp,
        "gpus_per_node": draw(st.sampled_from([1, 3, 4, 8, 16])),
        "internode": draw(st.sampled_from(["", "unknown", "4x100Gb RoCE", "25Gbps", "none"])),
        "dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": draw(st.sampled_from(["", 1, dp])),
        "chunks": draw(st.sampled_from(["", 1, 3, "one layer each"])), "microbatch": microbatch,
        "global_batch": dp * microbatch * draw(st.sampled_from([1, 2, 13, 256])),
        "sequence_parallel": draw(st.sampled_from(["", "True", "False"])),
        "data_parallel": draw(st.sampled_from(["", "ddp", "zero0", "zero1 within 2", "zero2", "zero3 mp=PURE"])),
        "recompute": draw(st.sampled_from(["", *RECOMPUTE])), "outcome": draw(st.sampled_from(["ok", "oom"])),
        "schedule": draw(st.sampled_from(["", "1F1B", "1F1B-I", "ZB-1p", "ZB-V", "gpipe"])),
        "precision": draw(st.sampled_from(["fp32", "fp16", "bf16", "fp8", "fp8-mx", "nvfp4"])),
        "step_seconds": draw(st.sampled_from(["", "0.5", "1e-6", "1000"])), "peak_gib": "12", "quality": "A",
    }  # fmt: skip
    return Run(cells={column: str(cell) for column, cell in cells.items()})


@given(run=rows())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_a_row_whose_numbers_agree_is_predicted(run: Run) -> None:
    found = predict(run)
    assert 0 < found.low <= found.seconds <= found.high < float("inf")
    assert found.peak_bytes > 0
    assert all(part >= 0 for part in found.parts.values()), found.parts
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


@given(run=rows(), cells=st.dictionaries(st.sampled_from((*NEEDED, *OTHERS)), st.sampled_from(WORDS), max_size=3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_row_with_a_cell_that_is_no_such_thing_is_predicted_or_skipped_with_a_sentence(
    run: Run, cells: dict[str, str]
) -> None:
    summary = summarise([Run(cells={**run.cells, **cells})])
    json.dumps(summary, allow_nan=False)
    skipped: Any = summary["skipped"]
    assert all(each["why"] and "\n" not in each["why"] for each in skipped)


def on(pool: Pool, run: Run) -> Estimate:
    return price(
        model_of(run), Cluster(pools=(pool,)), layouts_of(run, balance=balance_of(run)),
        sequence=run.count("sequence"), software=software_of(run),
    )  # fmt: skip


@given(run=rows())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_faster_wires_make_no_step_longer_and_more_memory_never_unfits(run: Run) -> None:
    """But for 2 %: with less latency other stages may decide how much of the replicas' exchange is seen."""
    pool = pool_of(run)
    node, link, fabric = pool.node, pool.node.link, pool.node.fabric
    plain = on(pool, run)
    wider = replace(fabric, bytes_per_second=3 * fabric.bytes_per_second)
    nearer = replace(fabric, latency_seconds=fabric.latency_seconds / 3)
    quicker = replace(link, bytes_per_second=3 * link.bytes_per_second, latency_seconds=link.latency_seconds / 3)
    for other in (replace(node, fabric=wider), replace(node, fabric=nearer), replace(node, link=quicker)):
        assert on(replace(pool, node=other), run).seconds[0] <= plain.seconds[0] * 1.02
    larger = replace(pool, device=replace(pool.device, memory_bytes=2 * pool.device.memory_bytes))
    assert on(larger, run).fits[0] >= plain.fits[0]


def answer_or_sentence(ask: Callable[[], T]) -> T | None:
    """What is answered; None where it is refused with one sentence and a remedy."""
    found: list[T] = []
    try:
        found.append(ask())
    except ShardwiseError as error:
        refused = error
    if found:
        return found[0]
    assert refused.problem
    assert "\n" not in refused.problem
    assert refused.remedy
    return None


@given(
    axes=st.tuples(SMALL, SMALL, SMALL),
    more=st.sampled_from(["", ",zero=1", ",zero=3", ",sp=true", ",recompute=full", ",offload.optimizer=0.5"]),
    schedule=st.sampled_from([*CATALOGUE]),
    microbatches=SMALL,
    batch=st.sampled_from([1, 7, 48, 240]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_fit_accounts_for_a_plan_or_says_what_is_wrong_with_it(
    axes: tuple[int, int, int], more: str, schedule: str, microbatches: int, batch: int
) -> None:
    dp, tp, pp = axes
    text = f"dp={dp},tp={tp},pp={pp},schedule={schedule},microbatches={microbatches},precision=bf16{more}"
    question = make_question("gpt2", cluster=f"1x{dp * tp * pp}xa100", batch=batch, sequence=1024)
    found = answer_or_sentence(lambda: account(question, Plan.parse(text)))
    if found is None:
        return
    assert 0 < found.low <= found.seconds <= found.high < float("inf")
    assert all(rank.total > 0 for rank in found.ranks)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


@pytest.mark.parametrize("cluster", ["1xrtx4090", "3xa100", "7xl4", "2x3xh100", "2xcpu"])
@pytest.mark.parametrize("batch", [1, 7, 30])
def test_a_plan_is_found_for_odd_numbers_of_devices_and_samples(cluster: str, batch: int) -> None:
    found = answer_or_sentence(lambda: find_plan("gpt2", cluster=cluster, batch=batch, sequence=513))
    if found is None:
        return
    assert found.num_ranks == Cluster.parse(cluster).num_devices
    assert batch % (found.dp * found.microbatches) == 0


def test_a_precision_that_a_device_lacks_and_every_wider_one_is_refused() -> None:
    with pytest.raises(ShardwiseError, match="tpu-v4 computes in bf16, and neither in fp32 nor in anything wider"):
        DEVICES["tpu-v4"].peak("fp32")


def test_a_row_that_nobody_measured_is_still_told_what_its_cell_is() -> None:
    with pytest.raises(SkippedError, match="step_seconds is 'soon', which is no number"):
        predict(Run(cells={"step_seconds": "soon"}))
