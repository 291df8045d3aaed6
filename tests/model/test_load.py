"""A model from whatever a user has."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.model.catalogue import CATALOGUE, get_model
from shardwise.model.load import load_model


def test_a_name_a_path_values_and_a_model_give_the_same(tmp_path: Path) -> None:
    values = CATALOGUE["llama3.2-1b"]
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    model = get_model("llama3.2-1b")
    assert load_model(model) is model
    assert load_model("meta-llama/Llama-3.2-1B") is model
    for source in (str(tmp_path), str(tmp_path / "config.json"), tmp_path, values):
        assert load_model(source).num_parameters == model.num_parameters


def test_a_module_needs_an_example() -> None:
    assert load_model(nn.Linear(4, 4), batch=torch.zeros(2, 4)).num_parameters == 20
    with pytest.raises(ShardwiseError) as caught:
        load_model(nn.Linear(4, 4))
    assert str(caught.value) == (
        "what a Linear computes is seen by running it once, and no example batch was given\n"
        '  try: batch={"input_ids": torch.zeros(1, 4096, dtype=torch.long)}'
    )


def test_a_text_that_is_nothing_of_the_kind_is_an_unknown_model() -> None:
    with pytest.raises(ShardwiseError, match="unknown model 'my/model'"):
        load_model("my/model")
    with pytest.raises(ShardwiseError, match=r"missing.json cannot be read"):
        load_model("missing.json")
