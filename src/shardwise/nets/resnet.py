"""ResNet-50 (He et al. 2015; with the stride in the 3 x 3, as is usual since), with torchvision's names.

    images ── conv1 bn1 relu maxpool ── layer1 x3 ── layer2 x4 ── layer3 x6 ── layer4 x3 ── avgpool ── fc

    shardwise train resnet50

Images are uint8, [rows, 3, height, width]. They are converted on the device, to channels last, like the weights.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

#: The ratio of a bottleneck's output channels to those in its middle.
EXPANSION = 4
#: ImageNet's mean and deviation per colour, from 0 to 1.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Bottleneck(nn.Module):
    """1 x 1 to few channels, 3 x 3, 1 x 1 to many, with a residual."""

    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        made = width * EXPANSION
        self.conv1, self.bn1 = nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, made, 1, bias=False), nn.BatchNorm2d(made)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or given != made:
            self.downsample = nn.Sequential(nn.Conv2d(given, made, 1, stride=stride, bias=False), nn.BatchNorm2d(made))

    def forward(self, hidden: Tensor) -> Tensor:
        beside = hidden if self.downsample is None else self.downsample(hidden)
        inner = self.relu(self.bn1(self.conv1(hidden)))
        inner = self.relu(self.bn2(self.conv2(inner)))
        made: Tensor = self.relu(self.bn3(self.conv3(inner)) + beside)
        return made


class ResNet(nn.Module):
    """Four layers of `depths` blocks each, the first `width` channels wide, and `classes` scores."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, depths: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor(DEVIATION).view(1, 3, 1, 1), persistent=False)
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(width), nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        given = width
        layers = []
        for number, depth in enumerate(depths):
            inner, blocks = width * 2**number, list[nn.Module]()
            for block in range(depth):
                blocks.append(Bottleneck(given, inner, 2 if number and not block else 1))
                given = inner * EXPANSION
            layers.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = layers
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(given, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for each in self.modules():
            if isinstance(each, nn.Conv2d):
                nn.init.kaiming_normal_(each.weight, mode="fan_out", nonlinearity="relu")
                each.weight.data = each.weight.data.contiguous(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores, [rows, classes]."""
        numbers = (images.to(self.mean.dtype) / 255 - self.mean) / self.deviation
        hidden = self.conv1(numbers.contiguous(memory_format=torch.channels_last))
        hidden = self.maxpool(self.relu(self.bn1(hidden)))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        scores: Tensor = self.fc(self.avgpool(hidden).flatten(1))
        return scores


def class_loss(output: Tensor, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    """Return the cross entropy with `batch["labels"]`, a class for each image."""
    labels: Tensor = batch["labels"]
    return cross_entropy(output.float(), labels, reduction="sum"), labels.shape[0]


def resnet50() -> tuple[ResNet, Any]:
    """Return the model and its loss, for `model.source=shardwise.nets.resnet:resnet50`."""
    return ResNet(), class_loss
