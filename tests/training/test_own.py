"""Any module can be trained, under any plan: it is named, and the rest is as with ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.cli import main
from shardwise.ranks.spawn import Ranks
from shardwise.training.device_defaults import with_masks
from shardwise.training.recipe import get_recipe
from shardwise.training.run import train_rank
from tests.training.programs import losses_of, make_job, saved_state

WHERE = "tests.training.own_models"
OWN: dict[str, Any] = {"model__source": f"{WHERE}:reader"}


def test_a_module_of_ones_own_trains_alike_under_other_plans_and_goes_on(
    two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    alone = make_job(tmp_path / "alone", "dp=1", steps=4, **OWN)
    train_rank(alone)
    two.run(train_rank, make_job(tmp_path / "moved", "pp=2,microbatches=2", steps=2, **OWN))
    four.run(train_rank, make_job(tmp_path / "moved", "dp=4,zero=3", steps=4, **OWN))
    assert losses_of(tmp_path / "moved") == pytest.approx(losses_of(alone.folder), rel=1e-5)
    assert losses_of(alone.folder)[-1] < losses_of(alone.folder)[0]
    assert {"embed.weight", "layers.0.0.weight", "head.bias"} <= saved_state(tmp_path / "moved").keys()


def test_a_plan_is_chosen_for_it_and_the_run_ends_without_a_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--set", f"model.source={WHERE}:reader", "--set", "steps=2"]
    assert main(["train", "tiny", "--devices", "1", "--folder", str(tmp_path / "run"), *words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["sample"] is None
    assert (tmp_path / "run" / "report.html").is_file()
    # It has no family that Hugging Face's folders know.
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf")]) == 1
    assert f"is of the module {WHERE}:reader" in capsys.readouterr().err


def test_its_own_loss_is_the_one_that_is_trained(tmp_path: Path) -> None:
    plain = {**OWN, "steps": 1}
    train_rank(make_job(tmp_path / "plain", "dp=1", **plain))
    train_rank(make_job(tmp_path / "double", "dp=1", **{**plain, "model__source": f"{WHERE}:reader_with_a_loss"}))
    assert losses_of(tmp_path / "double")[0] == pytest.approx(2 * losses_of(tmp_path / "plain")[0], rel=1e-5)


def test_a_model_of_transformers_is_trained_as_it_is(two: Ranks, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    changes = {**OWN, "model__source": f"{WHERE}:a_llama", "steps": 2}
    train_rank(make_job(tmp_path / "alone", "dp=1", **changes))
    two.run(train_rank, make_job(tmp_path / "two", "pp=2,microbatches=2", **changes))
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "alone"), rel=1e-5)


@pytest.mark.parametrize("kind", ["a_llama", "a_tied_gpt2", pytest.param("a_mixtral", marks=pytest.mark.whole)])
def test_a_model_of_transformers_is_written_back_as_a_folder_that_it_reads(
    kind: str, two: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = pytest.importorskip("transformers")
    job = make_job(tmp_path / "run", "dp=2,zero=3", model__source=f"{WHERE}:{kind}", steps=1)
    two.run(train_rank, job)
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "hf"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "huggingface"
    again, loading = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    assert not loading["mismatched_keys"]
    state = again.state_dict()
    for name, tensor in saved_state(tmp_path / "run").items():
        if not name.startswith(("optimizer/", "state/")) and name in state:
            assert torch.equal(state[name], tensor), name
    assert sum(name in state for name in saved_state(tmp_path / "run")) >= len(dict(again.named_parameters()))
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "dcp"), "--to", "dcp"]) == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model.source": "reader"}, "model.source=reader is no package.module:factory"),
        ({"model.source": "absent.module:reader"}, "cannot be imported: No module named 'absent'"),
        ({"model.source": f"{WHERE}:readr"}, f"unknown function of {WHERE} 'readr'"),
        ({"model.source": f"{WHERE}:no_module"}, "returns a Tensor, and not a module"),
        ({"model.source": f"{WHERE}:reader", "data.masks": True}, "takes no documents, but input_ids"),
        ({"model.source": f"{WHERE}:reader", "model.folder": "there"}, "are two models"),
    ],
)
def test_what_is_wrong_with_it_is_told_before_anything_is_started(
    changes: dict[str, Any], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={str(value).lower()}")]
    words = [word if "source" not in word else f"model.source={changes['model.source']}" for word in words]
    assert main(["train", "tiny", "--devices", "1", "--folder", str(tmp_path / "run"), *words]) == 1
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_recipe_may_name_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'[model]\nsource = "{WHERE}:reader"\n')
    assert get_recipe(str(path)).model.source == f"{WHERE}:reader"


def test_masks_are_on_where_the_module_takes_documents() -> None:
    for kind, masks in (("reader", False), ("reader_of_documents", True)):
        recipe = get_recipe("tiny").changed({"model.source": f"{WHERE}:{kind}"})
        assert with_masks(recipe).data.masks is masks
    assert with_masks(get_recipe("tiny")).data.masks is True
