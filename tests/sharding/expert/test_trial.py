"""Experts of one's own are tried before ranks share them: each kind once."""

import pytest
from torch import nn

from shardwise.sharding.expert import trial
from shardwise.sharding.expert.calls import Calls
from shardwise.sharding.expert.layers import ExpertLayer, find_layers
from tests.habits.mixtures import Experts, Indexed, Mixture


def test_layers_that_are_alike_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has dozens of such layers, and a trial of large ones takes seconds."""
    module = nn.ModuleList([Mixture(), Mixture(Indexed), Mixture(), Mixture(lambda: Experts(6)), Mixture(Indexed)])
    tried: list[str] = []
    inner = trial._try

    def noted(layer: ExpertLayer, calls: Calls) -> trial.Verdict:
        tried.append(layer.name)
        return inner(layer, calls)

    monkeypatch.setattr(trial, "_try", noted)
    found = trial.try_all(find_layers(module), {})
    assert tried == ["0.experts", "1.experts", "3.experts"]
    assert [name for name, each in found.items() if each.problem is not None] == ["1.experts", "4.experts"]
