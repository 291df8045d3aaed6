"""Everyday scripts for plans on four ranks: schedulers, clipping, adapters, averages of weights, images, mixtures."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,no-untyped-call,attr-defined,operator,index,union-attr,arg-type"

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from tests.habits.harness import Batch, Block, Parallelize, Result, batch, program, sgd, small_net, start, trained
from tests.habits.hugging import fitted, llama


def by_name(model: nn.Module) -> Any:
    """Decay for matrices, as nanoGPT and the Trainer have it."""

    def make(_: Iterable[nn.Parameter]) -> Optimizer:
        named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [each for name, each in named if "norm" not in name and each.ndim > 1], "weight_decay": 0.1},
            {"params": [each for name, each in named if "norm" in name or each.ndim < 2], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=1e-2, betas=(0.9, 0.95))

    return make


@program(whole=True)
def a_cosine_clipping_and_the_best_state(parallelize: Parallelize) -> Result:
    """Groups by name, a schedule for each optimizer, clipping, and what was best on held out rows is loaded."""
    model = small_net(tied=True)
    engine = start(parallelize, model, by_name(model), clip=0.5)
    schedules = [CosineAnnealingLR(each, T_max=6) for each in engine.optimizers]
    found, best = {}, (float("inf"), engine.state_dict())
    for step in range(5):
        found[f"loss {step}"] = engine.train_step(batch(step))
        found[f"norm {step}"] = engine.gradient_norm
        for each in schedules:
            each.step()
        held_out = engine.evaluate(batch(90))
        best = min(best, (held_out, engine.state_dict()), key=lambda each: each[0])
    engine.load_state_dict(best[1])
    return {**found, "best": best[0], "again": engine.evaluate(batch(91)), "after": engine.train_step(batch(92))}


@program(only="dp")
def a_warm_up_of_a_language_model(parallelize: Parallelize) -> Result:
    """Llama of transformers, whose groups have decay or none."""
    model = llama()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return fitted(parallelize, model)


class Adapted(nn.Module):
    """A frozen layer and what is trained beside it."""

    def __init__(self, inner: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.lora_a = nn.Linear(inner.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2.0 * self.lora_b(self.lora_a(x))


@program(whole=True)
def adapters_of_frozen_blocks(parallelize: Parallelize) -> Result:
    """The base is frozen, the optimizer has what requires a gradient, and the rate warms up."""
    model = small_net().requires_grad_(False)
    for block in model.layers:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    model.double()

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return AdamW([each for each in parameters if each.requires_grad], lr=1e-2)

    engine = start(parallelize, model, make)
    warming = [LambdaLR(each, lambda step: min(1.0, (step + 1) / 3)) for each in engine.optimizers]

    def warm_up(_: int) -> None:
        for each in warming:
            each.step()

    return trained(engine, steps=4, between=warm_up)


@program(whole=True)
def an_average_of_weights_between_steps(parallelize: Parallelize) -> Result:
    """Of the state, which is whole on every rank, and is evaluated with."""
    engine = start(parallelize, small_net())
    average = engine.state_dict()

    def follow(_: int) -> None:
        for name, each in engine.state_dict().items():
            average[name].lerp_(each, 0.3)

    found = trained(engine, between=follow)
    engine.load_state_dict(average)
    return {**found, "averaged": engine.evaluate(batch(5)), **{f"average {k}": v for k, v in average.items()}}


class Patches(nn.Module):
    """A vision transformer: patches by a convolution, a class token, positions, blocks, a mean and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, 8, 4, stride=4)
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8) / 5)
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 8) / 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.patch_embed(x).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.cls_token.expand(len(x), -1, -1), hidden], 1) + self.pos_embed
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)[:, 0])


def images(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn((4, 3, 8, 8), generator=generator, dtype=torch.float64)
    return {"x": pixels, "labels": torch.randint(6, (4,), generator=generator)}


@program(but="cp")
def images_with_rates_by_depth(parallelize: Parallelize) -> Result:
    """Layer decay as timm and MAE have it, smoothed labels, and accuracy beside the loss."""
    model = Patches().double()

    def make(_: Iterable[nn.Parameter]) -> Optimizer:
        groups: list[dict[str, Any]] = []
        for name, each in model.named_parameters():
            depth = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 3 if name.startswith("head") else 0
            groups.append({"params": [each], "lr": 1e-2 * 0.7 ** (3 - depth), "weight_decay": 0.05 * (each.ndim > 1)})
        return AdamW(groups)

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(output, given["labels"], label_smoothing=0.1)

    def metrics(output: Tensor, given: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"right": ((output.argmax(-1) == given["labels"]).sum(), len(output))}

    engine = parallelize(model, loss=loss, optimizer=make, example=images(0))
    found = {}
    for step in range(3):
        found[f"loss {step}"] = engine.train_step(images(step), metrics=metrics)
        found[f"right {step}"] = engine.metrics["right"]
    return {**found, "scores": engine.predict(images(7)), **engine.state_dict()}


class Sparse(Block):
    """Experts in a list, of which every token takes two, beside a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            made = made.index_add(0, row, expert(flat[row]) * weights[row, place, None])
        return super().forward(x) + made.view_as(x)


@program(whole=True)
def experts_in_a_list_in_every_block(parallelize: Parallelize) -> Result:
    """With groups by name and clipping."""
    model = small_net(block=Sparse)
    return trained(start(parallelize, model, by_name(model), clip=1.0), steps=4)


class EarlyExits(nn.Module):
    """Every block's words, by one head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.layers, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden, found = self.embed(x), []
        for layer in self.layers:
            hidden = layer(hidden)
            found.append(self.head(self.norm(hidden)))
        return found


@program(whole=True)
def early_exits_share_a_head(parallelize: Parallelize) -> Result:
    """A stage that is not the last has a rank's words, and the loss reads them on another."""

    def loss(outputs: list[Tensor], given: Mapping[str, Any]) -> Tensor:
        labels = given["labels"].flatten()
        losses = [functional.cross_entropy(each.flatten(0, 1), labels) for each in outputs]
        return torch.stack([0.5**depth * each for depth, each in enumerate(losses)]).sum()

    return trained(parallelize(EarlyExits().double(), loss=loss, optimizer=sgd, example=batch(0)))
