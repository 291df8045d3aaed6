"""What PEFT, timm, torchvision and TRL put into models and losses: adapters, pruned heads, preferences, pictures."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,no-untyped-call,override,no-untyped-def,arg-type,assignment,union-attr"

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.calling import picture, pictures
from tests.habits.harness import (
    Batch,
    Block,
    Net,
    Parallelize,
    Result,
    batch,
    cross_entropy,
    program,
    sgd,
    small_net,
    start,
    trained,
)

SEQUENCE = {"cp": "tokens|part of a sequence|other numbers|attention"}


class DoRA(nn.Module):
    """A frozen layer, an update of rank 2, and a length for each row of their sum."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, 2, bias=False)
        self.b = nn.Linear(2, layer.out_features, bias=False)
        self.magnitude = nn.Parameter(layer.weight.norm(dim=1).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base_layer.weight + self.b.weight @ self.a.weight
        scale = self.magnitude / weight.norm(dim=1).detach()
        return (
            (scale - 1) * functional.linear(x, self.base_layer.weight) + scale * self.b(self.a(x)) + self.base_layer(x)
        )


@program()
def dora(parallelize: Parallelize) -> Result:
    """PEFT's weight-decomposed adapters."""
    model = small_net()
    for layer in model.layers:
        layer.up = DoRA(layer.up)
    return trained(start(parallelize, model.double()))


class IA3(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) * self.scale


@program()
def ia3(parallelize: Parallelize) -> Result:
    """A learned factor for each channel of frozen layers."""
    model = small_net()
    for layer in model.layers:
        layer.up = IA3(layer.up)
    return trained(start(parallelize, model.double()))


class VeRA(nn.Module):
    """Random matrices that all layers share, and vectors of each."""

    def __init__(self, layer: nn.Linear, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        self.register_buffer("a", a)
        self.register_buffer("b", b)
        self.d, self.c = nn.Parameter(torch.full((3,), 0.1)), nn.Parameter(torch.linspace(0, 1, layer.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.c * functional.linear(self.d * functional.linear(x, self.a), self.b)


@program()
def vera(parallelize: Parallelize) -> Result:
    """PEFT's adapters over frozen random matrices, which are buffers of several modules."""
    model = small_net()
    a, b = torch.randn(3, 8, dtype=torch.float64), torch.randn(16, 3, dtype=torch.float64)
    for layer in model.layers:
        layer.up = VeRA(layer.up, a, b)
    return trained(start(parallelize, model.double()))


def a_bottleneck() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8))


class Inner(nn.Module):
    """The two layers of a block, as a sublayer with a name."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class WithInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


@program()
def adapters_that_hooks_put_in(parallelize: Parallelize) -> Result:
    """Bottlenecks after the sublayers of a frozen model, as Houlsby et al. have them: hooks call them."""
    model = Net(block=WithInner).double().requires_grad_(False)
    model.adapters = nn.ModuleList([a_bottleneck() for _ in model.layers]).double()
    for layer, adapter in zip(model.layers, model.adapters, strict=True):
        layer.inner.register_forward_hook(lambda _, __, output, adapter=adapter: output + adapter(output))
    for each in model.modules():
        if isinstance(each, nn.LayerNorm):
            each.requires_grad_(True)

    def factory(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([each for each in parameters if each.requires_grad], lr=0.1)

    return trained(start(parallelize, model, factory))


class Saved(nn.Module):
    """A layer as it was, frozen, and its copy that learns."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(layer)})
        self.original_module = layer.requires_grad_(False)
        self.active = "default"

    def forward(self, *args: Any) -> Any:
        return self.modules_to_save[self.active](*args)


@program()
def a_head_beside_its_frozen_self(parallelize: Parallelize) -> Result:
    """PEFT's `modules_to_save`: the original is there, and nobody calls it."""
    model = small_net()
    model.layers.requires_grad_(False)
    model.head = Saved(model.head)
    return trained(start(parallelize, model.double()))


class Prefixed(Block):
    """Attention with learned keys and values before those of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.num_heads = 2
        self.keys, self.values = nn.Parameter(torch.randn(2, 3, 4)), nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (
            torch.cat([own.expand(x.shape[0], -1, -1, -1), each], 2) for own, each in ((self.keys, k), (self.values, v))
        )
        seen = functional.scaled_dot_product_attention(q, k, v)
        return super().forward(x + seen.transpose(1, 2).flatten(2))


@program(SEQUENCE)
def learned_keys_and_values(parallelize: Parallelize) -> Result:
    """Prefix tuning."""
    return trained(start(parallelize, small_net(block=Prefixed)))


def preferences(step: int) -> Batch:
    chosen, rejected = batch(step)["x"], batch(step + 50)["x"]
    generator = torch.Generator().manual_seed(step + 100)
    reference = torch.randn(4, 2, generator=generator, dtype=torch.float64)
    return {"chosen": chosen, "rejected": rejected, "reference": reference, "labels": batch(step)["labels"]}


class Policy(Net):
    """Both answers in one forward, one under the other."""

    def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        ids = torch.cat([chosen, rejected])
        scores = super().forward(ids)[:, :-1].log_softmax(-1)
        return scores.gather(-1, ids[:, 1:, None]).sum((1, 2)).view(2, -1).t()


@program(but="cp")
def preferred_answers(parallelize: Parallelize) -> Result:
    """DPO: pairs of answers, and a reference's numbers in the batch."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        gain = output - given["reference"]
        return -functional.logsigmoid(0.5 * (gain[:, 0] - gain[:, 1])).mean()

    engine = parallelize(Policy().double(), loss=loss, optimizer=sgd, example=preferences(0))
    found = {f"loss {step}": engine.train_step(preferences(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


class LastToken(Net):
    """The score of each row's last token that is no padding, as HF's classifiers have it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        last = (torch.arange(x.shape[1]) * (x != 0)).argmax(1)
        return self.head(self.norm(hidden))[torch.arange(len(x)), last]


@program(but="cp")
def the_last_token_of_each_row(parallelize: Parallelize) -> Result:
    """`logits[torch.arange(batch), last]`."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(output, given["labels"][:, 0])

    return trained(parallelize(LastToken().double(), loss=loss, optimizer=sgd, example=batch(0)))


@program(but="cp", whole=True)
def labels_smoothed_by_the_trainer(parallelize: Parallelize) -> Result:
    """HF's `LabelSmoother`: two means over labels that are not ignored."""

    def given(step: int) -> Batch:
        made = batch(step)
        labels = made["labels"].clone()
        labels[0, 1:] = -100
        return {**made, "labels": labels}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        log = -functional.log_softmax(output, -1)
        labels = given["labels"][..., None]
        padding = labels.eq(-100)
        nll = log.gather(-1, labels.clamp(min=0)).masked_fill(padding, 0.0)
        smoothed = log.sum(-1, keepdim=True).masked_fill(padding, 0.0)
        active = padding.numel() - padding.long().sum()
        return 0.9 * nll.sum() / active + 0.1 * smoothed.sum() / (active * log.shape[-1])

    engine = parallelize(small_net(), loss=loss, optimizer=sgd, example=given(0))
    found = {f"loss {step}": engine.train_step(given(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


class BasicBlock(nn.Module):
    """torchvision's, with its short cut."""

    def __init__(self, given: int, made: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(given, made, 3, padding=1), nn.Conv2d(made, made, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(2, made) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)
        self.shorter = None if given == made else nn.Conv2d(given, made, 1)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.shorter is None else self.shorter(x)
        made = self.norms[1](self.second(self.relu(self.norms[0](self.first(x)))))
        made += identity
        return self.relu(made)


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(self.reduce(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


@program(but="cp")
def a_residual_network(parallelize: Parallelize) -> Result:
    """Convolutions, `ReLU(inplace=True)`, `+=`, depthwise groups, squeeze and excite, flatten."""
    model = nn.Sequential(
        BasicBlock(3, 4), BasicBlock(4, 4), nn.Conv2d(4, 8, 3, groups=4, stride=2), SqueezeExcite(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    return pictures(parallelize, Named().double())


class Segments(nn.Module):
    """Scores for each pixel, and those of an early layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = BasicBlock(3, 4), BasicBlock(4, 4)
        self.head, self.aux = nn.Conv2d(4, 5, 1), nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = self.first(x)
        small = functional.interpolate(self.head(self.second(early[..., ::2, ::2])), x.shape[-2:], mode="bilinear")
        return {"out": small, "aux": self.aux(early)}


@program(but="cp", whole=True)
def segmentation_with_an_early_head(parallelize: Parallelize) -> Result:
    """torchvision's: `ignore_index=255`, and 0.5 of the auxiliary loss."""

    def given(step: int) -> Batch:
        labels = torch.randint(5, (4, 6, 6), generator=torch.Generator().manual_seed(step))
        labels[0, :, step:] = 255
        return {"x": picture(step)["x"], "labels": labels}

    def loss(output: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> Tensor:
        out, aux = (functional.cross_entropy(output[key], given["labels"], ignore_index=255) for key in ("out", "aux"))
        return out + 0.5 * aux

    engine = parallelize(Segments().double(), loss=loss, optimizer=sgd, example=given(0))
    found = {f"loss {step}": engine.train_step(given(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


class Graph(nn.Module):
    """Messages along edges: a node sees its neighbours, which are other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(x)
            x = torch.tanh(x.index_add(0, edges[1], x[edges[0]]))
        return self.head(x)


@program(dict.fromkeys(("dp", "microbatches"), "see each other|half of them|row"), but="cp")
def a_graph_in_a_batch(parallelize: Parallelize) -> Result:
    """Nodes are rows, and edges name them."""

    def given(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
        edges = torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 2, 0]])
        return {"x": x, "edges": edges, "labels": torch.randint(5, (4,), generator=generator)}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return functional.cross_entropy(output, given["labels"])

    engine = parallelize(Graph().double(), loss=loss, optimizer=sgd, example=given(0))
    found = {f"loss {step}": engine.train_step(given(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


class Denoiser(nn.Module):
    """A picture with noise of a time, and the noise is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 8))
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
        scale, shift = self.time(torch.cat([angles.sin(), angles.cos()], -1))[..., None, None].chunk(2, 1)
        return self.second(torch.tanh(self.first(x) * (1 + scale) + shift))


@program(but="cp")
def noise_that_is_asked_for(parallelize: Parallelize) -> Result:
    """Diffusion: times and noise in the batch, a weight for each row by its time."""

    def given(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        clean, noise = (torch.randn(4, 3, 6, 6, generator=generator, dtype=torch.float64) for _ in range(2))
        t = torch.rand(4, generator=generator, dtype=torch.float64)
        mixed = t.sqrt()[:, None, None, None] * clean + (1 - t).sqrt()[:, None, None, None] * noise
        return {"x": mixed, "t": t, "noise": noise}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        rows = functional.mse_loss(output, given["noise"], reduction="none").mean((1, 2, 3))
        return (rows * given["t"].clamp(max=0.5)).mean()

    engine = parallelize(Denoiser().double(), loss=loss, optimizer=sgd, example=given(0))
    found = {f"loss {step}": engine.train_step(given(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


class Autoencoder(nn.Module):
    """A mean and a deviation for each row, and noise that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(4, 6)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encode(x).chunk(2, -1)
        return self.decode(mean + noise * (0.5 * log).exp()), mean, log


@program(but="cp", whole=True)
def a_variational_autoencoder(parallelize: Parallelize) -> Result:
    """As torch's example has it: sums of all numbers, not divided."""

    def given(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        x, noise = (torch.rand(4, n, generator=generator, dtype=torch.float64) for n in (6, 4))
        return {"x": x, "noise": noise}

    def loss(output: tuple[Tensor, Tensor, Tensor], given: Mapping[str, Tensor]) -> Tensor:
        made, mean, log = output
        likely = functional.binary_cross_entropy_with_logits(made, given["x"], reduction="sum")
        return likely - 0.5 * (1 + log - mean.square() - log.exp()).sum()

    engine = parallelize(
        Autoencoder().double(), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.01), example=given(0)
    )
    found = {f"loss {step}": engine.train_step(given(step)) for step in range(3)}
    return {**found, **engine.state_dict()}


class Spectral(Block):
    """FNet: tokens and channels mixed by Fourier transforms."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.fft.fft2(x).real)


@program(SEQUENCE)
def channels_mixed_by_fourier(parallelize: Parallelize) -> Result:
    """`torch.fft.fft2` in blocks: complex numbers in between."""
    return trained(start(parallelize, small_net(block=Spectral)))


class Padded(Net):
    """Sequences made as long as a multiple of 4, and cut again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, (0, -x.shape[1] % 4)))[:, : x.shape[1]]


@program()
def lengths_that_are_rounded_up(parallelize: Parallelize) -> Result:
    """`F.pad` in the forward."""
    return trained(start(parallelize, Padded().double()))


class OwnCriterion(Net):
    """A criterion inside of the module, with weights of classes as its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 12), ignore_index=0)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = super().forward(x)
        return {"loss": self.criterion(scores.flatten(0, 1), labels.flatten()), "scores": scores}


@program(but="cp", whole=True)
def a_criterion_inside_of_the_module(parallelize: Parallelize) -> Result:
    """As HF-like classes have it: `self.criterion` with weights and an ignored class."""

    def loss(output: Mapping[str, Tensor], _: Mapping[str, Tensor]) -> Tensor:
        return output["loss"]

    return trained(parallelize(OwnCriterion().double(), loss=loss, optimizer=sgd, example=batch(0)))


@program(but="cp")
def two_losses_of_two_heads(parallelize: Parallelize) -> Result:
    """A likelihood of words and a squared distance of a number for each row, weighed."""

    class Two(Net):
        def __init__(self) -> None:
            super().__init__()
            self.value = nn.Linear(8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.embed(x)
            for layer in self.layers:
                hidden = layer(hidden)
            hidden = self.norm(hidden)
            return self.head(hidden), self.value(hidden.mean(1)).squeeze(-1)

    def loss(output: tuple[Tensor, Tensor], given: Mapping[str, Tensor]) -> Tensor:
        wanted = given["x"].double().mean(1)
        return cross_entropy(output[0], given) + 0.1 * functional.smooth_l1_loss(output[1], wanted)

    return trained(parallelize(Two().double(), loss=loss, optimizer=sgd, example=batch(0)))


@program(but="cp", whole=True)
def a_clipped_policy(parallelize: Parallelize) -> Result:
    """PPO: ratios, clipped, with advantages and old numbers in the batch, and a mean over a mask."""

    def given(step: int) -> Batch:
        generator = torch.Generator().manual_seed(step + 30)
        old = -torch.rand(4, 3, generator=generator, dtype=torch.float64) - 2
        advantage = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        mask = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]], dtype=torch.float64)
        return {**batch(step), "old": old, "advantage": advantage, "mask": mask}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        new = output.log_softmax(-1).gather(-1, given["labels"][..., None]).squeeze(-1)
        ratio = (new - given["old"]).exp()
        advantage = given["advantage"]
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        return -(gain * given["mask"]).sum() / given["mask"].sum()

    engine = parallelize(small_net(), loss=loss, optimizer=sgd, example=given(0))
    found = {f"loss {step}": engine.train_step(given(step)) for step in range(3)}
    return {**found, **engine.state_dict()}
