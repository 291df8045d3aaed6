"""Tensors on the wrong device are found before the first step. The meta device is the other one."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shardwise.engine.device_check import Misplaced, check_devices, find_misplaced
from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        self.register_buffer("causal", torch.ones(4, 4))
        self.bias = torch.zeros(4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(Attention() for _ in range(2))
        self.head = nn.Linear(4, 9)


def a_batch(**changed: Tensor) -> dict[str, Any]:
    return {
        "ids": torch.zeros(2, 3),
        "mask": torch.ones(2, 3),
        "labels": torch.zeros(2, 3),
        "name": "no tensor",
        **changed,
    }


def stepped(module: nn.Module) -> AdamW:
    """An optimizer that has its state."""
    optimizer = AdamW(module.parameters())
    for each in module.parameters():
        each.grad = torch.zeros_like(each)
    optimizer.step()
    return optimizer


def one(found: list[Misplaced]) -> Misplaced:
    assert len(found) == 1, found
    return found[0]


def test_a_module_whose_tensors_are_together_is_well() -> None:
    module = Net()
    assert find_misplaced(module, batch=a_batch(), optimizers=[stepped(module)]) == []
    check_devices(module, batch=a_batch())


def test_a_parameter_left_behind() -> None:
    module = Net()
    module.scale = nn.Parameter(module.scale.to("meta"))
    found = one(find_misplaced(module))
    assert (found.what, found.name, found.where, found.should) == ("parameter", "scale", "meta", "cpu")
    assert found.line is not None
    assert re.fullmatch(r"test_device_check.py:\d+: self.scale = nn.Parameter\(torch.ones\(4\)\)", found.line)
    assert found.edit == 'module.to("cpu")'


def test_a_layer_left_behind_is_told_by_the_line_that_makes_it() -> None:
    module = Net()
    module.head.to("meta")
    weight, bias = find_misplaced(module)
    assert (weight.name, bias.name) == ("head.weight", "head.bias")
    assert weight.line is not None
    assert weight.line.endswith("self.head = nn.Linear(4, 9)")
    assert weight.edit == 'module.head.to("cpu")'


def test_a_buffer_left_behind() -> None:
    module = Net()
    layer = module.layers[1]
    assert isinstance(layer, Attention)
    layer.causal = layer.causal.to("meta")
    found = one(find_misplaced(module))
    assert (found.what, found.name) == ("buffer", "layers.1.causal")
    assert found.line is not None
    assert 'self.register_buffer("causal", torch.ones(4, 4))' in found.line


def test_a_plain_attribute_does_not_move_with_its_module() -> None:
    module = Net().to("meta")
    found = find_misplaced(module)
    assert [each.name for each in found] == ["layers.0.bias", "layers.1.bias"]
    assert found[0].what == "attribute"
    assert found[0].line is not None
    assert found[0].line.endswith("self.bias = torch.zeros(4)")
    assert found[0].edit.startswith('self.register_buffer("bias", self.bias)')


@pytest.mark.parametrize(("key", "what"), [("ids", "input"), ("mask", "mask"), ("labels", "target")])
def test_an_entry_of_the_batch_on_another_device(key: str, what: str) -> None:
    found = one(find_misplaced(Net(), batch=a_batch(**{key: torch.zeros(2, 3, device="meta")})))
    assert (found.what, found.name, found.where) == (what, f'batch["{key}"]', "meta")
    assert found.edit == f'batch["{key}"] = batch["{key}"].to("cpu")'
    assert found.line is not None
    assert found.line.startswith("test_device_check.py:")


def test_the_state_of_an_optimizer_away_from_its_parameter() -> None:
    module = Net()
    optimizer = stepped(module)
    state = optimizer.state[module.scale]
    state["exp_avg"] = state["exp_avg"].to("meta")
    found = one(find_misplaced(module, optimizers=[optimizer]))
    assert (found.what, found.name, found.should) == ("optimizer state", "exp_avg of scale", "cpu")


def test_an_optimizer_of_parameters_that_were_replaced() -> None:
    module = Net()
    old = nn.Parameter(torch.ones(4, device="meta"))
    found = one(find_misplaced(module, optimizers=[AdamW([old])]))
    assert found.name == "of shape (4,) in AdamW"
    assert "module.to" in found.edit


def test_all_of_them_are_told_at_once_with_the_first_edit_as_the_remedy() -> None:
    module = Net()
    module.head.to("meta")
    with pytest.raises(ShardwiseError) as caught:
        check_devices(module, batch=a_batch(mask=torch.ones(2, 3, device="meta")))
    text = str(caught.value)
    assert text.startswith("3 tensors on the wrong device:\n  parameter head.weight is on meta, not on cpu\n")
    assert 'mask batch["mask"] is on meta' in text
    assert caught.value.remedy == 'module.head.to("cpu")'


def test_a_device_may_be_named() -> None:
    found = find_misplaced(nn.Linear(2, 2), device="meta")
    assert [each.where for each in found] == ["cpu", "cpu"]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("key", ["x", "labels"])
def test_an_engine_is_not_made_of_tensors_on_two_devices(key: str) -> None:
    example = {"x": torch.zeros(2, 3), "labels": torch.zeros(2, 3), "note": torch.zeros(2, 3, device="meta")}
    with pytest.raises(ShardwiseError, match=f'{"input" if key == "x" else "target"} batch\\["{key}"\\] is on meta'):
        parallelize(
            Head(),
            "dp=1",
            loss=lambda output, batch: (output - batch["labels"]).square().mean(),
            optimizer=AdamW,
            example={**example, key: example[key].to("meta")},
        )
