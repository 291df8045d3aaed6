"""The stages of a split module are the module: output, loss and every gradient, whatever the family and the shapes."""

import pytest
import torch

from shardwise.stages.split import split
from tests.engine.by_hand import assert_split_is_the_module
from tests.stages.families import FAMILIES, make_batch, make_family
from tests.stages.nets import ResNet50, UNet


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


# Without `--whole` each family has one number of stages, in turn. `tests/conformance` trains them all in 2 to 4.
@pytest.mark.parametrize(
    ("family", "num_stages"),
    [
        pytest.param(family, number, marks=() if number == 2 + at % 3 else pytest.mark.whole)
        for at, family in enumerate(FAMILIES)
        for number in (2, 3, 4)
    ],
)
def test_a_hugging_face_model_splits_unmodified(family: str, num_stages: int) -> None:
    module, example = make_family(family), make_batch(family)
    stages = split(module, num_stages, example)
    assert stages.num_stages == num_stages
    assert_split_is_the_module(module, stages, example)
    # Another sequence length and another number of sequences, afterwards.
    assert_split_is_the_module(module, stages, make_batch(family, num_sequences=3, length=12, seed=2))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_resnet_50_splits(num_stages: int) -> None:
    torch.manual_seed(0)
    module = ResNet50(width=4, num_classes=7).train()
    stages = split(module, num_stages, {"image": torch.randn(2, 3, 32, 32)})
    assert_split_is_the_module(module, stages, {"image": torch.randn(2, 3, 64, 64)})
    assert_split_is_the_module(module, stages, {"image": torch.randn(3, 3, 48, 64)})


@pytest.mark.parametrize("num_stages", [2, 3, 4, 6])
def test_a_u_net_splits_and_its_skips_go_straight_to_their_mirrors(num_stages: int) -> None:
    torch.manual_seed(0)
    module = UNet().train()
    stages = split(module, num_stages, {"image": torch.randn(2, 3, 16, 16), "moment": torch.rand(2)})
    for size, num_images in ((16, 2), (24, 3)):
        batch = {"image": torch.randn(num_images, 3, size, size), "moment": torch.rand(num_images)}
        assert_split_is_the_module(module, stages, batch)
    if num_stages > 2:
        assert any(reader - maker > 1 for maker, reader in stages.edges)
