"""A forward that writes parameters leaves them as they were, whether they are copied before it or when it writes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwise.stages.split import write_guard
from shardwise.stages.split.switch import undisturbed

WAYS: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda layer: layer.weight.mul_(2),
    "through data": lambda layer: layer.weight.data.mul_(2),
    "other memory": lambda layer: setattr(layer.weight, "data", torch.zeros(2, 2)),
    "nothing": lambda _: None,
}


class Writing(nn.Module):
    """Writes the weight of its layer, and then uses it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(2, 2), way

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            WAYS[self.way](self.layer)
        return self.layer(rows)  # type: ignore[no-any-return]


@pytest.mark.parametrize("few_bytes", [write_guard._FEW_BYTES, 0], ids=["copied before", "copied when written"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_writes_is_put_back(way: str, few_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_guard, "_FEW_BYTES", few_bytes)
    module = Writing(way)
    before, memory = module.layer.weight.detach().clone(), module.layer.weight.data_ptr()
    with undisturbed(module, {}):
        module(torch.ones(3, 2))
        assert torch.equal(module.layer.weight, before) == (way == "nothing")
    assert torch.equal(module.layer.weight, before)
    assert module.layer.weight.data_ptr() == memory


@pytest.mark.parametrize(
    ("way", "told"), [("in place", "in place"), ("through data", "data"), ("other memory", "memory")]
)
def test_who_asks_is_told_what_was_written_and_how(way: str, told: str) -> None:
    module = Writing(way)
    with undisturbed(module, {}, tells_writes=True) as switch:
        module(torch.ones(3, 2))
        assert switch.noted is not None
        assert {name: each.how for name, each in switch.noted.guard.written.items()} == {"layer.weight": told}
