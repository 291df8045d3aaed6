"""Images of random numbers, and a convolutional network trained on them by `train`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.cli import main
from shardwise.errors import ShardwiseError
from shardwise.nets.resnet import ResNet, class_loss
from shardwise.planner.plan import Plan
from shardwise.training.data.images import ImageRows, RandomImages, find_size
from shardwise.training.recipe import Recipe, get_recipe
from shardwise.training.subject import subject_of


def small() -> Any:
    return ResNet((1, 1, 1, 1), width=8, classes=1000), class_loss


SMALL = {"model.source": "tests.training.test_images:small", "data.source": "images:32", "data.sequence": 1}


def test_an_image_and_its_class_follow_from_its_number_alone() -> None:
    rows = ImageRows(size=16, first_row=5, num_rows=100)
    batch, other = rows.batch(np.array([3, 4, 7])), rows.batch(np.array([7]))
    assert batch["images"].shape == (3, 3, 16, 16)
    assert batch["images"].dtype == torch.uint8
    assert torch.equal(batch["images"][2], other["images"][0])
    assert batch["labels"][2] == other["labels"][0]
    assert not torch.equal(batch["images"][0], batch["images"][1])
    training, held_out = RandomImages(size=16).parts(held_out=0.01, batch=8)
    assert training.num_rows == held_out.first_row
    assert training.num_rows + held_out.num_rows == RandomImages(size=16).num_tokens


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"data.source": "images:big", "data.sequence": 1}, "not an image size"),
        ({"data.source": "images:4", "data.sequence": 1}, "not an image size"),
        ({"data.source": "images:32", "data.sequence": 1}, "a transformer that reads tokens"),
        ({**SMALL, "data.sequence": 128}, "data.sequence=128 tokens a row"),
        ({**SMALL, "model.source": "torch.nn:Identity"}, "takes input, and batches of images have images"),
    ],
)
def test_what_cannot_be_given_images_is_refused_with_a_sentence(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ShardwiseError, match=problem):
        subject_of(Recipe().changed(changes), 1000)


def test_a_resnet_50_has_its_parameters_and_its_flops() -> None:
    recipe = get_recipe("resnet50")
    assert find_size(recipe.data.source) == 224
    subject = subject_of(recipe, 1000)
    module = subject.make(tp=1, device=torch.device("cpu"))
    assert sum(each.numel() for each in module.parameters()) == 25_557_032
    assert module.get_parameter("layer4.0.conv2.weight").is_contiguous(memory_format=torch.channels_last)
    # 4.09 billion multiplications and additions an image, three times for both passes.
    assert subject.flops_per_token(module) == pytest.approx(3 * 2 * 4.09e9, rel=0.01)


def test_images_are_trained_on_by_train_whole_and_over_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    words += [
        "--plan",
        "dp=1",
        "--set",
        "batch=8",
        "--set",
        "steps=3",
        "--set",
        "optimizer.name=sgd",
        "--set",
        "evaluation.batches=1",
    ]
    assert main(["train", "--folder", str(tmp_path / "run"), *words, "--json"]) == 0
    assert '"step": 3' in capsys.readouterr().out
    # The same layers, cut in two.
    module, loss = small()
    batch = ImageRows(size=32, first_row=0, num_rows=8).batch(np.arange(8))
    engine = sw.parallelize(
        module, Plan.parse("pp=2,microbatches=2"), loss=loss, example=batch,
        optimizer=lambda given: torch.optim.SGD(given, lr=0.05),
    )  # fmt: skip
    losses = [engine.train_step(batch) for _ in range(3)]
    assert losses[-1] < losses[0]
