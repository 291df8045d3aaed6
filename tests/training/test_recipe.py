"""Recipes: from names, files and the command line, and what is said of mistakes in them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import ShardwiseError
from shardwise.training.recipe import RECIPES, DataChoice, ModelChoice, OptimizerChoice, Recipe, get_recipe, read_recipe


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_back_from_its_file(name: str, tmp_path: Path) -> None:
    recipe = get_recipe(name)
    path = tmp_path / "recipe.toml"
    path.write_text(recipe.to_toml())
    assert read_recipe(path) == recipe
    assert get_recipe(str(path)) == recipe


def test_what_a_file_leaves_out_is_as_by_default(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("steps = 7\n[model]\nwidth = 64\nkv_heads = 2\n")
    assert read_recipe(path) == Recipe(name="mine", steps=7, model=ModelChoice(width=64, kv_heads=2))


def test_text_becomes_the_type_of_its_key() -> None:
    changed = Recipe().changed(
        {"steps": "1e3", "optimizer.rate": "1", "data.masks": "false", "model.folder": "none", "name": "mine"}
    )
    assert changed == Recipe(name="mine", steps=1000, optimizer=OptimizerChoice(rate=1.0), data=DataChoice(masks=False))


@pytest.mark.parametrize(
    ("key", "value", "problem", "remedy"),
    [
        ("stepps", "1", "unknown key 'stepps'", "steps"),
        ("rate", "1", "unknown key 'rate'", "optimizer.rate"),
        ("optimizer.rat", "1", "unknown key 'optimizer.rat'", "optimizer.rate"),
        ("steps", "many", "steps in --set wants a whole number, and is 'many'", "steps=4"),
        ("steps", "1.5", "steps in --set wants a whole number, and is '1.5'", "steps=4"),
        ("optimizer.rate", "high", "optimizer.rate in --set wants a number, and is 'high'", "optimizer.rate=0.1"),
        ("data.masks", "1", "data.masks in --set wants true or false, and is '1'", "data.masks=true"),
        ("optimizer.schedule", "cosin", "unknown optimizer.schedule 'cosin'", "optimizer.schedule=cosine"),
        ("steps", "0", "steps=0: it must be at least 1", "steps=1"),
        ("optimizer.clip", "-1", "optimizer.clip=-1.0 is negative", "optimizer.clip=0"),
        ("bucket_bytes", "0", "bucket_bytes=0: it must be at least 1", "bucket_bytes=1"),
        ("model.dropout", "1", "model.dropout=1.0 is a share from 0 to 1", "model.dropout=0.1"),
        ("data.held_out", "1", "data.held_out=1.0 is a share from 0 to 1", "data.held_out=0.1"),
        ("model.heads", "3", "model.width=128 does not give model.heads=3 heads of an even size each", "model.width="),
        ("optimizer.rate", "nan", "optimizer.rate=nan is not a finite number", "optimizer.rate="),
        ("optimizer.clip", "inf", "optimizer.clip=inf is not a finite number", "optimizer.clip="),
        ("model.kv_heads", "3", "model.kv_heads=3 does not divide model.heads=4", "model.kv_heads=1"),
        ("model.kv_heads", "0", "model.kv_heads=0: it must be at least 1", "model.kv_heads=1"),
    ],
)
def test_mistakes_are_sentences_with_a_remedy(key: str, value: str, problem: str, remedy: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        Recipe().changed({key: value})
    assert caught.value.problem.startswith(problem)
    assert caught.value.remedy is not None
    assert caught.value.remedy.startswith(remedy)


def test_wrong_types_and_unknown_keys_of_a_file_are_told_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('steps = "many"\n')
    with pytest.raises(ShardwiseError, match=r"steps in mine\.toml wants a whole number, and is 'many'"):
        read_recipe(path)
    path.write_text("[optimiser]\nrate = 1\n")
    with pytest.raises(ShardwiseError, match=r"unknown key 'optimiser\.rate'.*\(in mine\.toml\)"):
        read_recipe(path)
    path.write_text("steps = \n")
    with pytest.raises(ShardwiseError, match="is not valid TOML"):
        read_recipe(path)
    with pytest.raises(ShardwiseError, match="cannot be read: No such file"):
        get_recipe(str(tmp_path / "absent.toml"))
    with pytest.raises(ShardwiseError, match="unknown recipe 'byts'") as caught:
        get_recipe("byts")
    assert caught.value.remedy == "shardwise train bytes, or the path of a TOML file"


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_rates_rise_to_their_highest_and_fall_to_the_final_part_of_it(schedule: str) -> None:
    choice = Recipe().changed({"optimizer.schedule": schedule, "optimizer.warmup": 10, "optimizer.rate": 1.0}).optimizer
    rates = [choice.learning_rate_at(step, 101) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates) == pytest.approx(1.0)
    assert all(after <= before + 1e-12 for before, after in pairwise(rates[9:]))
    assert rates[100] == pytest.approx(1.0 if schedule == "constant" else 0.1, abs=0.06)
    if schedule == "wsd":
        assert rates[80] == 1.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"optimizer.states": "8bit", "optimizer.name": "sgd"}, "optimizer.name=sgd has others"),
        ({"optimizer.states": "8bit", "model.experts": 4, "balance.place_every": 2}, "balance.place_every=2 takes"),
    ],
)
def test_states_that_an_optimizer_or_moving_experts_cannot_have_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ShardwiseError, match=text):
        Recipe().changed(changes)
