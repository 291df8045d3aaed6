"""Networks without a list of blocks to cut by: a ResNet-50 and a U-Net, as anyone would write them."""

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, and a way around."""

    def __init__(self, wide_in: int, narrow: int, stride: int) -> None:
        super().__init__()
        wide = 4 * narrow
        self.conv1 = nn.Conv2d(wide_in, narrow, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(narrow)
        self.conv3 = nn.Conv2d(narrow, wide, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.around: nn.Module | None = None
        if stride != 1 or wide_in != wide:
            self.around = nn.Sequential(nn.Conv2d(wide_in, wide, 1, stride=stride, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.around is None else self.around(x)
        return self.relu(out)  # type: ignore[no-any-return]


class ResNet50(nn.Module):
    """He et al. 2015, table 1, with `width` channels instead of 64."""

    def __init__(self, width: int = 64, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._layer(width, width, 3, 1)
        self.layer2 = self._layer(4 * width, 2 * width, 4, 2)
        self.layer3 = self._layer(8 * width, 4 * width, 6, 2)
        self.layer4 = self._layer(16 * width, 8 * width, 3, 2)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(32 * width, num_classes)

    @staticmethod
    def _layer(wide_in: int, narrow: int, num_blocks: int, stride: int) -> nn.Sequential:
        first = Bottleneck(wide_in, narrow, stride)
        return nn.Sequential(first, *(Bottleneck(4 * narrow, narrow, 1) for _ in range(num_blocks - 1)))

    def forward(self, image: Tensor) -> Tensor:
        x = self.pool(self.relu(self.bn1(self.conv1(image))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.average(x), 1))  # type: ignore[no-any-return]


class Twice(nn.Module):
    """Two convolutions."""

    def __init__(self, wide_in: int, wide: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(wide_in, wide, 3, padding=1), nn.GroupNorm(2, wide), nn.ReLU(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1), nn.GroupNorm(2, wide), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)  # type: ignore[no-any-return]


class UNet(nn.Module):
    """Ronneberger et al. 2015: down, up, and skips from each level to its mirror. Told the time, as for diffusion."""

    def __init__(self, width: int = 8, num_levels: int = 3) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(num_levels)]
        self.time = nn.Linear(1, widths[-1])
        self.downs = nn.ModuleList(Twice(below, above) for below, above in zip([3, *widths], widths, strict=False))
        self.middle = Twice(widths[-1], widths[-1])
        self.ups = nn.ModuleList(
            nn.ModuleList([nn.ConvTranspose2d(above, below, 2, stride=2), Twice(2 * below, below)])
            for above, below in zip([widths[-1], *widths[:0:-1]], widths[::-1], strict=True)
        )
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, image: Tensor, moment: Tensor) -> dict[str, Tensor]:
        x, skips = image, []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        x = self.middle(x + self.time(moment[:, None])[:, :, None, None])
        for up in self.ups:
            larger, twice = up.children()
            x = twice(torch.cat([larger(x), skips.pop()], dim=1))
        return {"noise": self.out(x)}
