"""`shardwise plan` and `shardwise fit`: what is printed, what is saved, and what is said of mistakes."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.planner.plan import Plan

PLAN = ["plan", "llama3-8b", "--cluster", "8xh100", "--batch", "32", "--sequence", "4096"]
FIT = ["fit", "llama3-8b", "--cluster", "8xh100", "--sequence", "4096", "--plan"]


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main([*words]) == status
    captured = capsys.readouterr()
    return captured.out if status == 0 or captured.out else captured.err


def data(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> dict[str, Any]:
    assert main([*words, "--json"]) == status
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_plan_says_the_step_its_interval_the_memory_the_reasons_and_the_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "plan.toml"
    text = said(capsys, *PLAN, "--save", str(saved))
    assert text.startswith("llama3-8b on 8xh100-80g: 8 devices, batch 32 x 4096\n")
    for word in (" to ", "tokens/s", "where a step goes", "memory of a rank", "why", "of other kinds", "candidates"):
        assert word in text
    plan = Plan.load(saved)
    assert str(plan) in text
    assert plan.num_ranks == 8
    assert all(why in text for why in plan.reasons.values())


def test_plan_for_machines_has_everything_that_a_person_sees(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, *PLAN)
    low, high = found["interval"]
    assert low < found["seconds"] < high
    assert Plan.parse(str(found["plan"])).num_ranks == 8
    assert found["fits"] is True
    assert found["others"]
    counts = found["candidates"]
    assert isinstance(counts, dict)
    assert {"considered", "priced", "fitting", "slower", "refused", "memory"} == set(counts)


def test_fit_accounts_for_every_stage_and_says_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, *FIT, "pp=4,dp=2,microbatches=8,precision=bf16,layers=9+9+8+6")
    ranks = found["ranks"]
    assert isinstance(ranks, list)
    assert [rank["num_ranks"] for rank in ranks] == [2, 2, 2, 2]
    for rank in ranks:
        assert rank["total_bytes"] == pytest.approx(sum(rank["bytes"].values()), abs=20)
        assert rank["headroom_bytes"] == pytest.approx(rank["capacity_bytes"] - rank["total_bytes"], abs=2)
    assert found["runs"] is True


def test_what_does_not_fit_comes_with_the_cheapest_changes_and_each_of_them_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = data(capsys, *FIT, "dp=8,precision=bf16", status=1)
    changes = found["changes"]
    assert isinstance(changes, list)
    assert len(changes) == 3
    assert [change["slower"] for change in changes] == sorted(change["slower"] for change in changes)
    assert len({change["plan"] for change in changes}) == 3
    for change in changes:
        assert data(capsys, *FIT, change["plan"], "--batch", "8")["fits"] is True
    text = said(capsys, *FIT, "dp=8,precision=bf16", status=1)
    assert "It does not fit: stage 0 needs" in text
    assert "The cheapest changes that make it fit:" in text


def test_a_plan_that_engines_do_not_run_is_accounted_for_and_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    plan = "dp=2,tp=4,zero=1,precision=bf16,recompute=full,offload.activations=0.5"
    assert data(capsys, *FIT, plan)["runs"] is False
    assert "The nearest that they do: dp=2,tp=4,zero=1,recompute=full,precision=bf16" in said(capsys, *FIT, plan)


def test_serving_says_tokens_first_token_each_token_and_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama3-8b", "--cluster", "8xh100", "--sequence", "1024", "--task", "serve"]
    most = data(capsys, *words)
    soonest = data(capsys, *words, "--goal", "latency")
    assert most["tokens_per_second"] > soonest["tokens_per_second"]
    assert soonest["each_token_seconds"] < most["each_token_seconds"]
    assert most["kv_blocks_used"] <= most["kv_blocks"]
    limited = data(capsys, *words, "--each-token", "8ms")
    assert limited["each_token_seconds"] <= 0.008
    text = said(capsys, *words)
    assert "KV blocks of 16 tokens" in text
    assert "other splits" in text


def test_a_configuration_and_a_factory_are_models_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
        "num_hidden_layers": 4, "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "mine.py").write_text(
        "import torch\n\n\ndef make():\n"
        "    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(2)]\n"
        "    return torch.nn.Sequential(*blocks), torch.zeros(4, 8)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    rest = ["--cluster", "2xcpu", "--batch", "8"]
    assert data(capsys, "plan", str(tmp_path / "config.json"), *rest, "--sequence", "128")["fits"] is True
    assert data(capsys, "plan", "mine:make", *rest)["fits"] is True


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["plan", "llama3-9b", "--cluster", "8xh100", "--batch", "8"], "unknown model 'llama3-9b'; "),
        (["plan", "llama3-8b", "--cluster", "8xh101", "--batch", "8"], "unknown device 'h101'"),
        (["plan", "llama3-8b", "--cluster", "8xh100"],
         "the batch size, in samples per step, is not given\n  try: --batch 256"),
        (["plan", "llama3-8b", "--cluster", "8xh100", "--batch", "8"],
         "the sequence length for llama3-8b is not given"),
        ([*PLAN, "--task", "serv"], "unknown task 'serv'; known: train, serve\n  try: --task serve"),
        ([*PLAN, "--goal", "fewest"], "--goal fewest needs a limit on the step time\n  try: --target 5s"),
        ([*PLAN, "--goal", "cheapest"], "the price of a device-hour is not given\n  try: --prices h100=2.50"),
        ([*PLAN, "--goal", "cheapest", "--prices", "a100=1"], "an hour of h100-80g has no price"),
        ([*PLAN, "--fix", "tq=8"], "unknown plan key 'tq'; known: dp, tp, "),
        ([*PLAN, "--fix", "tp=3"], "tp=3 does not divide the 8 devices of 8xh100-80g\n  try: --fix tp=2"),
        ([*FIT, "dp=4"], "the plan is for dp=4 x tp=1 x pp=1 x cp=1 = 4 ranks, but 8xh100-80g has 8 devices\n"
                         "  try: dp=8"),
        ([*FIT, "dp=8,microbatches=3", "--batch", "64"],
         "a batch of 64 cannot be divided over dp=8 x microbatches=3 = 24\n  try: --batch 48, or microbatches=2"),
        ([*FIT, "pp=8,chunks=5,schedule=interleaved,microbatches=8"],
         "pp=8 with 5 chunks on a rank makes 40 stages, but llama3-8b has 32 layers\n  try: pp=6"),
        ([*FIT, "pp=8,layers=8x3,microbatches=8"], "layers adds up to 24, but llama3-8b has 32"),
        ([*FIT, "pp=8,microbatches=8,schedule=pipedream-2bw"], "schedule=pipedream-2bw trains with weights that are"),
        (["plan", "nothing.here:make", "--cluster", "2xcpu", "--batch", "2"],
         "the factory 'nothing.here:make' cannot be called: No module named 'nothing'"),
    ],
)  # fmt: skip
def test_mistakes_get_a_sentence_and_something_to_type(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    assert capsys.readouterr().err.startswith(f"error: {problem}")


def test_a_configuration_of_an_unknown_family_says_how_to_give_the_module(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "lama"}', encoding="utf-8")
    assert main(["plan", str(path), "--cluster", "8xh100", "--batch", "8", "--sequence", "128"]) == 1
    text = capsys.readouterr().err
    assert "is of the family 'lama'" in text
    assert "llama" in text


def test_a_model_that_fits_nowhere_says_how_many_of_which_devices_it_would_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", "llama3-405b", "--cluster", "4xh100", "--batch", "16", "--sequence", "2048"]
    assert main(words) == 1
    text = capsys.readouterr().err
    assert "llama3.1-405b with a batch of 16 x 2048 does not fit on 4xh100-80g: " in text
    assert "needs 1.9 TiB on a rank that has 79.2 GiB, most of it for optimizer states, or 5." in text
    assert "TiB on a host that has 1.7 TiB for it; hosts are assumed to have 2.0 TiB" in text
    _, _, remedy = text.partition("try: --cluster ")
    *clusters, adapters = remedy.strip().split(", or ")
    for cluster in clusters:
        assert main([words[0], words[1], "--cluster", cluster, *words[4:], "--json"]) == 0
    assert main([*words, *adapters.split(), "--json"]) == 0
