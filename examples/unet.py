"""Skip connections over stages: a small U-Net learns to find the noise in an image."""

import torch
from torch import nn
from torch.nn.functional import interpolate, max_pool2d, mse_loss, relu

import shardwise as sw


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.downs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in ((3, 8), (8, 16), (16, 32)))
        self.ups = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in ((64, 16), (32, 8), (16, 3)))

    def forward(self, image):
        x, skips = image, []
        for down in self.downs:
            skips.append(relu(down(x)))
            x = max_pool2d(skips[-1], 2)
        for up in self.ups:
            x = up(torch.cat([interpolate(relu(x), scale_factor=2), skips.pop()], dim=1))
        return x


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
noise, weight = torch.randn(16, 3, 16, 16, device=device), torch.rand(16, 1, 1, 1, device=device)
batch = {"image": (1 - weight) * 0.5 + weight * noise, "noise": noise}
engine = sw.parallelize(
    UNet().to(device),
    "pp=3,schedule=1f1b,microbatches=4,recompute=full",
    loss=lambda output, batch: mse_loss(output, batch["noise"]),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    example=batch,
)
print("skips, from stage to stage:", [edge for edge in engine.split.edges if edge[1] - edge[0] > 1])
for step in range(5):
    print(f"step {step}  loss {engine.train_step(batch):.4f}")
