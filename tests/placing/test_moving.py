"""Several devices, layer by layer. The second is the meta device: it has shapes and no numbers, but is elsewhere."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.placing.microbatch_pass import add_gradients, copies_for
from shardwise.placing.moving import CrossDeviceMode, InputMover, moved
from tests.stages.nets import UNet
from tests.stages.small import small_matrices

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor, scale: dict[str, Tensor]) -> Tensor:
        return self.second(self.first(x) * scale["by"])  # type: ignore[no-any-return]


def test_arguments_go_where_they_are_needed_and_the_output_where_the_inputs_were() -> None:
    module = Two().to("meta")
    mover = InputMover(module, {"first": META, "second": META})
    seen: list[torch.device] = []
    module.first.register_forward_hook(lambda _, args, __: seen.append(args[0].device))
    module.second.register_forward_hook(lambda _, __, output: seen.append(output.device))
    # From the CPU to the other device there is a way, back there is none: numbers that were never there.
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        module(torch.ones(4, 2), scale={"by": torch.ones(4, 3)})
    assert seen == [META, META]
    mover.remove()
    with pytest.raises((RuntimeError, NotImplementedError)):
        module(torch.ones(4, 2), scale={"by": torch.ones(4, 3)})
    assert len(seen) == 2


def test_a_skip_meets_what_was_computed_elsewhere() -> None:
    module = UNet()
    late = ("middle", "time", "ups", "out")
    for name in late:
        module.get_submodule(name).to("meta")
    names = [name for name, each in module.named_modules() if next(each.parameters(recurse=False), None) is not None]
    InputMover(module, {name: META if name.startswith(late) else CPU for name in names})
    seen: list[torch.device] = []
    module.out.register_forward_hook(lambda _, __, output: seen.append(output.device))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        module(torch.ones(2, 3, 16, 16), torch.ones(2))
    assert seen == [META]


def test_hooks_of_the_simple_case_keep_out_of_the_threads_of_a_pipeline() -> None:
    module = UNet()
    plain = copy.deepcopy(module)
    image, moment = torch.randn(4, 3, 16, 16), torch.rand(4)
    # Stages but the last leave the module's forward early, past the hook that would end what was begun.
    placed = sw.place(module, ["cpu:0", "cpu:1"], microbatches=2)
    placed(image, moment)
    InputMover(module, dict.fromkeys(["out", "middle", "time"], CPU))
    expected = plain(image, moment)["noise"]
    for call in (placed, module):
        assert torch.allclose(call(image, moment)["noise"], expected, atol=1e-6)
    assert not CrossDeviceMode.is_open()


def test_the_mode_ends_with_the_call_that_opened_it() -> None:
    module = Two()
    InputMover(module, {"first": CPU, "second": CPU})
    module(torch.ones(4, 2), scale={"by": torch.ones(4, 3)})
    assert not CrossDeviceMode.is_open()
    with pytest.raises(KeyError):
        module(torch.ones(4, 2), scale={})
    assert not CrossDeviceMode.is_open()


def test_nested_arguments_are_moved_and_those_that_are_there_are_left() -> None:
    here = {"a": [torch.ones(2), "word"], "b": (torch.ones(1),)}
    assert moved(here, CPU) is here
    there = moved(here, META)
    assert there["a"][0].device == META
    assert there["a"][1] == "word"


def test_a_lent_weight_stands_for_its_owner_and_its_gradient_comes_back() -> None:
    weight, x = nn.Parameter(torch.randn(3, 2)), torch.randn(4, 2)
    copies = copies_for([weight], CPU)
    with CrossDeviceMode(CPU, copies):
        nn.functional.linear(x, weight).sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is None
    add_gradients(copies)
    add_gradients(copies)
    expected = torch.autograd.grad(nn.functional.linear(x, weight).sum(), weight)[0]
    assert torch.equal(weight.grad, expected)  # type: ignore[arg-type]
