"""Modules built on the meta device: each process makes its own stages only, and all of them make the same model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.split import materialise, split
from shardwise.stages.split.flow import watch
from shardwise.stages.split.meta import meta_twin
from shardwise.stages.stage import Split
from tests.engine.by_hand import assert_same, assert_split_is_the_module, leaves_of
from tests.stages.families import FAMILIES, make_batch
from tests.stages.nets import ResNet50, UNet
from tests.stages.odd_nets import WeightsInGlue


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build().train()


def everything(module: nn.Module) -> list[str]:
    return [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]


def whole(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    module = on_meta(build)
    materialise(module, everything(module), seed=seed)
    return module


def run_apart(build: Callable[[], nn.Module], num_stages: int, example: Any, batch: Any) -> tuple[Any, list[Split]]:
    """Each stage in a module of its own, as in as many processes."""
    splits = [split(on_meta(build), num_stages, example, only=[stage], seed=3) for stage in range(num_stages)]
    values: dict[str, Tensor] = {}
    output: Any = None
    for number, each in enumerate(splits):
        stage = each.stages[number]
        assert stage is not None
        made, output = stage.run({name: values[name] for name in each.reads[number]}, batch)
        values |= made
    return output, splits


#: One of each kind of weights and buffers that are made apart: ties, fused and sorted ones, experts, towers, images.
KINDS = ("gpt2", "llama", "mixtral", "t5", "vit")


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=() if each in KINDS else pytest.mark.whole) for each in FAMILIES]
)
def test_stages_made_apart_are_the_module_made_whole(family: str) -> None:
    build = FAMILIES[family]
    example, batch = make_batch(family), make_batch(family, num_sequences=3, length=12)
    output, splits = run_apart(build, 3, example, batch)
    plain = whole(build, seed=3)
    assert all(each.units == splits[0].units and each.reads == splits[0].reads for each in splits)
    for number, each in enumerate(splits):
        stage = each.stages[number]
        assert stage is not None
        assert [other for other in each.stages if other is not None] == [stage]
        expected = dict(plain.named_parameters())
        assert all(torch.equal(parameter, expected[name]) for name, parameter in stage.parameters.items())
        buffers = dict(plain.named_buffers())
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in stage.buffers.items())
    given = batch if family == "vit" else {**batch, "use_cache": False}
    if family == "bert":
        given.pop("use_cache")
    assert_same(leaves_of(output), leaves_of(plain(**given)))


@pytest.mark.parametrize("stage", range(3))
def test_a_process_holds_the_weights_of_its_stages_and_no_others(stage: int) -> None:
    module = on_meta(FAMILIES["llama"])
    stages = split(module, 3, make_batch("llama"), only=[stage])
    mine = stages.stages[stage]
    assert mine is not None
    real = {name for name, each in module.named_parameters() if not each.is_meta}
    assert real == set(mine.parameters)
    assert 0 < len(real) < len(list(module.named_parameters()))


def test_a_real_module_gives_up_the_weights_of_other_processes() -> None:
    module = FAMILIES["llama"]()
    stages = split(module, 3, make_batch("llama"), only=[1])
    assert stages.stages[1] is not None
    assert {name for name, each in module.named_parameters() if not each.is_meta} == set(stages.stages[1].parameters)


def test_weights_that_glue_uses_elsewhere_take_up_no_memory_here() -> None:
    ids = torch.randint(11, (2, 5))
    module = WeightsInGlue()
    expected = module(ids)
    twins = [WeightsInGlue() for _ in range(3)]
    for twin in twins:
        twin.load_state_dict(module.state_dict())
    splits = [split(twin, 3, {"ids": ids}, only=[stage]) for stage, twin in enumerate(twins)]
    assert twins[1].places.untyped_storage().nbytes() == 4
    values: dict[str, Tensor] = {}
    output: Any = None
    for number, each in enumerate(splits):
        stage = each.stages[number]
        assert stage is not None
        made, output = stage.run({name: values[name] for name in each.reads[number]}, {"ids": ids})
        values |= made
    assert_same({"output": output}, {"output": expected})


@pytest.mark.parametrize(
    ("build", "batch"),
    [
        (lambda: ResNet50(width=4, num_classes=7), {"image": torch.randn(2, 3, 64, 64)}),
        (UNet, {"image": torch.randn(2, 3, 16, 16), "moment": torch.rand(2)}),
    ],
    ids=["resnet-50", "u-net"],
)
def test_a_module_of_plain_torch_is_materialised_by_its_own_rules(build: Any, batch: Any) -> None:
    module = on_meta(build)
    stages = split(module, 3, batch, seed=3)
    expected = dict(whole(build, seed=3).named_parameters())
    assert all(torch.equal(each, expected[name]) for name, each in module.named_parameters())
    assert_split_is_the_module(module, stages, batch)


def test_another_seed_gives_other_weights_and_nothing_else_does() -> None:
    one, same, other = (dict(whole(FAMILIES["gpt2"], seed).named_parameters()) for seed in (1, 1, 2))
    name = "transformer.h.1.mlp.c_fc.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])
    # Blocks that are alike do not start alike.
    assert not torch.equal(one[name], one["transformer.h.2.mlp.c_fc.weight"])
    assert abs(float(one[name].detach().std()) - 0.02) < 0.002


def test_weights_that_are_there_already_are_left_alone() -> None:
    module = on_meta(FAMILIES["t5"])
    materialise(module, ["shared.weight"], seed=1)
    with torch.no_grad():
        module.get_parameter("shared.weight").fill_(5.0)
    materialise(module, everything(module), seed=1)
    assert bool((module.get_parameter("shared.weight") == 5.0).all())


def test_a_tensor_that_only_its_constructor_can_set_is_named() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.inner = nn.Linear(4, 4), Masked()

    with pytest.raises(ShardwiseError) as caught:
        materialise(module := on_meta(Net), everything(module))
    assert str(caught.value) == (
        "inner.mask has no initial value: Masked sets it where it is built, and it was built on the meta device"
        " (1 tensor is like this)\n"
        "  try: give Masked a reset_parameters() that sets it, or build the module on the CPU"
    )


def test_without_numbers_every_block_reads_and_costs_what_it_does_with_them() -> None:
    """Shapes that are known from a first block are not computed again for the next: what that does counts as well."""
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8)) for _ in range(3)))
    flows = [
        watch(each, dict(each.named_children()), {"input": torch.randn(2, 8)}) for each in (module, meta_twin(module))
    ]
    told, twins = ([(call.unit, call.flops, call.touched) for call in flow.calls] for flow in flows)
    assert told == twins
    assert len({flops for _, flops, _ in told}) == 1
