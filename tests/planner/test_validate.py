"""Published runs: read, understood, predicted and compared."""

from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from shardwise.errors import ShardwiseError
from shardwise.planner import tables
from shardwise.planner.runs import Run, SkippedError, layouts_of, pool_of, read_runs
from shardwise.planner.stated import balance_of, model_of, software_of
from shardwise.planner.validate import predict, summarise

KORTHIKANTI = Path(str(resources.files(tables) / "korthikanti-2022.csv"))
ROW = {
    "id": "mine-1",
    "source": "a test",
    "model": "GPT-1.3B",
    "layers": "24",
    "hidden": "2048",
    "heads": "16",
    "sequence": "2048",
    "gpu": "a100-80g",
    "num_gpus": "16",
    "gpus_per_node": "8",
    "dp": "8",
    "tp": "2",
    "pp": "1",
    "cp": "1",
    "microbatch": "2",
    "global_batch": "64",
    "precision": "bf16",
    "outcome": "ok",
    "step_seconds": "1.0",
}


def run(**cells: str) -> Run:
    return Run(cells={**ROW, **cells})


def test_a_run_becomes_a_pool_a_layout_and_a_model() -> None:
    one = run()
    layouts = layouts_of(one, balance=balance_of(one))
    assert str(pool_of(one)) == "2x8xa100-80g"
    assert (layouts.num_microbatches[0], layouts.batch[0], layouts.num_ranks[0]) == (4, 64, 16)
    assert model_of(one).num_layers == 24


@pytest.mark.parametrize(
    ("text", "gigabits_a_device"),
    [
        ("8x200Gb HDR IB (Selene)", 200),
        ("4x OmniPath 100Gb per node", 50),
        ("1600Gbps RoCE node-node", 200),
        ("4x100Gb RoCE per node", 50),
        ("IB (DGX reference)", 200),
        ("unknown (IB)", 100),
    ],
)
def test_the_network_is_the_one_that_the_row_names(text: str, gigabits_a_device: float) -> None:
    assert pool_of(run(internode=text)).node.fabric.bytes_per_second == pytest.approx(gigabits_a_device * 1e9 / 8)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ({"microbatch": ""}, "microbatch is not published"),
        ({"dp": "4"}, "dp x tp x pp x cp is 8, not 16"),
        ({"microbatch": "3"}, "no whole number of microbatches"),
        ({"hidden": ""}, "the sizes of GPT-1.3B are not published"),
        ({"gpu": "a1000"}, "unknown device 'a1000'"),
    ],
)
def test_a_row_that_says_too_little_is_skipped_with_the_reason(cells: dict[str, str], why: str) -> None:
    with pytest.raises(SkippedError, match=why):
        predict(run(**cells))


def test_the_software_is_what_the_row_states() -> None:
    aleph = run(source="Aleph-Alpha/x", detail="MFU=0.6;attn_kernel=flash_attention2 + RMS kernel")
    assert (software_of(aleph).attention, software_of(aleph).fused_norms) == ("flash2", True)
    plain = run(source="Aleph-Alpha/x", detail="attn_kernel=torch")
    assert (software_of(plain).attention, software_of(plain).fused_norms) == ("torch", False)
    pure = run(source="mosaicml/llm-foundry", data_parallel="zero3 FSDP1-FULL_SHARD/mp=PURE")
    assert software_of(pure).reduce_bytes == 2
    assert software_of(run(source="x", precision="fp8-mx")).precision == "mxfp8"


@pytest.mark.parametrize(
    ("source", "layers", "pp", "balance"),
    [
        ("Aleph-Alpha/x", "40", "4", "slots"),
        ("bigscience", "72", "12", "even"),
        ("bigscience", "70", "12", "ends"),
        ("bigscience", "78", "12", "front"),
        ("a test", "79", "12", "weight"),
    ],
)
def test_layers_are_dealt_out_as_the_program_of_the_row_does(source: str, layers: str, pp: str, balance: str) -> None:
    assert balance_of(run(source=source, layers=layers, pp=pp)) == balance


def test_a_gated_mlp_that_the_notes_state_makes_it_a_llama() -> None:
    plain, gated = model_of(run()), model_of(run(notes="dims from the configuration (mlp_ratio 8/3)"))
    assert (plain.family, gated.family) == ("gpt2", "llama")


def test_a_mixture_is_taken_from_the_catalogue_by_its_name() -> None:
    model = model_of(run(model="Qwen3_30B_a3B", arch="moe", layers="48", hidden="2048", heads="32"))
    assert model.num_parameters == pytest.approx(30.5e9, rel=0.01)


def test_the_summary_has_what_machines_are_promised() -> None:
    found = summarise(read_runs(KORTHIKANTI))
    assert found["rows"] == found["timed"] == 8
    for key in ("time", "memory"):
        assert {"mape", "median", "p90", "max", "bias"} <= set(found[key])  # type: ignore[call-overload]
    assert set(found["oom"]) == {"published_oom", "false_fits", "published_ok", "false_ooms"}  # type: ignore[call-overload]
    assert {"sweeps", "spearman", "regret"} <= set(found["ranking"])  # type: ignore[call-overload]
    assert found["skipped"] == []
    assert list(found["by_source"]) == ["korth"]  # type: ignore[call-overload]


def test_korthikantis_steps_are_predicted() -> None:
    for each in read_runs(KORTHIKANTI):
        predicted = predict(each)
        assert predicted.time_error is not None
        assert abs(predicted.time_error) < 0.2, each.name
        assert predicted.fits, each.name


def test_errors_are_of_the_predicted_against_the_measured() -> None:
    slow, fast = predict(run(step_seconds="1000")), predict(run(step_seconds="0.001"))
    assert slow.time_error == pytest.approx(slow.seconds / 1000 - 1)
    assert fast.time_error is not None
    assert fast.time_error > 1
    assert predict(run(step_seconds="")).time_error is None


def test_out_of_memory_is_counted_both_ways() -> None:
    small, huge = run(outcome="oom", step_seconds=""), run(microbatch="8", sequence="65536", recompute="none")
    found = summarise([small, huge])["oom"]
    assert found == {"published_oom": 1, "false_fits": 1, "published_ok": 1, "false_ooms": 1}


def test_a_sweep_ranks_layouts_and_repeats_are_one_layout() -> None:
    layouts = [("8", "2", "1"), ("4", "4", "1"), ("4", "2", "2"), ("4", "2", "2")]
    runs = [
        run(id=f"mine-{index}", dp=dp, tp=tp, pp=pp, step_seconds=str(index + 1.0))
        for index, (dp, tp, pp) in enumerate(layouts)
    ]
    ranking = summarise(runs)["ranking"]
    assert ranking["sweeps"] == 1  # type: ignore[index]
    assert summarise(runs[2:])["ranking"]["sweeps"] == 0  # type: ignore[index]


def test_a_table_without_a_column_is_told_which_to_rename(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(KORTHIKANTI.read_text().replace("num_gpus", "gpus"))
    with pytest.raises(ShardwiseError) as caught:
        read_runs(path)
    assert "no column num_gpus" in caught.value.problem
    assert caught.value.remedy == "rename gpus to num_gpus"


def test_a_prediction_keeps_its_run() -> None:
    one = predict(run())
    assert replace(one, seconds=2.0).time_error == pytest.approx(1.0)
    assert one.low < one.seconds < one.high
