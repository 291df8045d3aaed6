"""What a script may set between steps is told, wherever it is kept."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwise.stages.split.script_values import find_holders


@dataclass(slots=True)
class Settings:
    weight: float = 0.0


SETTINGS, ARRAY, WEIGHTS = Settings(), np.zeros(2), (1.0, 0.0)


def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    weight: float = SETTINGS.weight + float(ARRAY[1]) + WEIGHTS[1] + vars(loss).get("weight", 0.0)
    return output.mean() * weight + 0.0 * given["x"].sum()


def exchange_tuple() -> None:
    globals()["WEIGHTS"] = (1.0, 0.5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda: setattr(SETTINGS, "weight", 0.5), ("weight", 0.5)),
        (lambda: ARRAY.put(1, 0.5), ("1", 0.5)),
        (exchange_tuple, ("WEIGHTS", (1.0, 0.5))),
        (lambda: setattr(loss, "weight", 0.5), ("weight", 0.5)),
    ],
    ids=["slots", "array", "tuple", "function"],
)
def test_what_was_set_is_told_and_can_be_put_back(change: Callable[[], None], told: tuple[str, Any]) -> None:
    holders = find_holders(nn.Linear(2, 2), loss)
    before = [each.values.read() for each in holders]
    change()
    key, value = told
    found = [(each, was.get(key)) for each, was in zip(holders, before, strict=True) if each.values.read() != was]
    assert [each.values.read()[key] for each, _ in found] == [value]
    ((holder, was),) = found
    holder.values.put(key, was) if was is not None else holder.values.drop(key)
    assert [each.values.read() for each in holders] == before
    assert float(loss(torch.ones(2), {"x": torch.ones(1)})) == 0.0
