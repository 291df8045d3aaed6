"""A convolutional network: the ResNet-50 of Hugging Face, unmodified, in stages of even cost, two on each rank."""

import torch
import transformers
from torch.nn.functional import cross_entropy

import shardwise as sw

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
config = transformers.ResNetConfig(
    embedding_size=8, hidden_sizes=[32, 64, 128, 256], depths=[3, 4, 6, 3], num_labels=10
)
batch = {
    "pixel_values": torch.randn(16, 3, 64, 64, device=device),
    "label": torch.randint(0, 10, (16,), device=device),
}
engine = sw.parallelize(
    transformers.ResNetForImageClassification(config).to(device),
    "pp=2,schedule=zb-v,microbatches=4",
    loss=lambda output, batch: cross_entropy(output.logits, batch["label"]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.005, momentum=0.9),
    example=batch,
)
for units in engine.split.units:
    print(f"a stage of {len(units)} units: {units[0]} to {units[-1]}")
for step in range(5):
    print(f"step {step}  loss {engine.train_step(batch):.4f}")
