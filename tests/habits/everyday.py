"""What people write every day, on the way to something else."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from tests.habits.harness import (
    Batch,
    Block,
    Net,
    Parallelize,
    Result,
    batch,
    program,
    sgd,
    small_net,
    start,
    trained,
)

#: Optimizers have pieces, or parameters that are not there between steps.
PIECES = {
    **{f"zero={number}": "this optimizer has pieces of parameters" for number in (1, 2, 3)},
    "tp": "it has a part of it|this optimizer has", "offload.parameters": "in memory of the host",
}  # fmt: skip


def states(engine: Any) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in engine.state_dict().items() if isinstance(each, Tensor)}


def run(engine: Any, make: Any, steps: int = 3) -> dict[str, Any]:
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(steps)}
    return found | states(engine)


@program(PIECES)
def decay_by_hand_in_param_groups(parallelize: Parallelize) -> Result:
    """Decoupled decay over `optimizer.param_groups`, after each step."""
    engine = start(parallelize, small_net())

    def between(_: int) -> None:
        for optimizer in engine.optimizers:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    each.data.mul_(0.9)

    return trained(engine, between=between)


@program(PIECES, but="pp")
def norms_by_param_groups(parallelize: Parallelize) -> Result:
    """The norm of all weights, read from the optimizer."""
    engine = start(parallelize, small_net())

    def between(step: int) -> dict[str, Any]:
        every = [each for o in engine.optimizers for group in o.param_groups for each in group["params"]]
        return {f"norm {step}": sum(float(each.detach().pow(2).sum()) for each in every) ** 0.5}

    return trained(engine, between=between)


@program({"all": "has taken this step already"})
def a_second_step_by_hand(parallelize: Parallelize) -> Result:
    """`optimizer.step()` after `train_step`, out of habit."""
    engine = start(parallelize, small_net())

    def between(_: int) -> None:
        for each in engine.optimizers:
            each.step()

    return trained(engine, between=between)


def classes(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output, given["labels"])


class Shares(Net):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(8, 4, bias=False)
        self.big = nn.Linear(8, 8, bias=False)

    def tie(self) -> "Shares":
        self.small.weight.data = self.big.weight.data[:4]
        return self

    def forward(self, x: Tensor) -> Any:
        hidden = self.embed(x)
        hidden = hidden + self.big(hidden) + torch.cat([self.small(hidden)] * 2, -1)
        return self.head(self.layers[1](self.layers[0](hidden)))


@program({"all": "small.weight and big.weight are two tensors that share memory"})
def weights_that_share_memory(parallelize: Parallelize) -> Result:
    """`small.weight.data = big.weight.data[:4]`: two parameters in one memory."""
    return trained(start(parallelize, Shares().double().tie()))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 8)
        self.block = Block()
        self.head = nn.Linear(8, 5)

    def forward(self, text: Tensor, offsets: Tensor) -> Any:
        return self.head(self.block(self.bag(text, offsets)))


def texts(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = [3, 2, 4, 1]
    text = torch.randint(12, (sum(lengths),), generator=generator)
    labels = torch.randint(5, (4,), generator=generator)
    return {"text": text, "offsets": torch.tensor([0, 3, 5, 9]), "labels": labels}


@program({"dp": "fail on 2 of them", "pp": "fail on 2 of them"}, but="cp")
def bags_of_words_by_offsets(parallelize: Parallelize) -> Result:
    """torch's tutorial of text classification: all words in one row, and where each text begins."""
    engine = parallelize(Bags().double(), loss=classes, optimizer=sgd, example=texts(0))
    return run(engine, texts)


class Registers(Net):
    def forward(self, x: Tensor) -> Any:
        if not hasattr(self, "places"):
            self.register_buffer("places", torch.arange(8.0, dtype=torch.float64), persistent=False)
        hidden = self.embed(x) + self.places
        return self.head(self.layers[1](self.layers[0](hidden)))


@program({"pp": "writes to the buffer places, and no unit has it"})
def a_buffer_registered_by_the_first_forward(parallelize: Parallelize) -> Result:
    """`register_buffer` when it is first needed."""
    return trained(start(parallelize, Registers().double()))


class SAM(Optimizer):
    """Sharpness-aware minimisation, as it is copied around."""

    def __init__(self, params: Any, rho: float = 0.05, lr: float = 0.1) -> None:
        super().__init__(params, {"rho": rho, "lr": lr})

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Sharpness Aware Minimization requires closure"
        return closure()


@program({"all": "closure"})
def sharpness_aware(parallelize: Parallelize) -> Result:
    """SAM needs a closure."""
    return trained(start(parallelize, small_net(), SAM))


class Derived(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.embed(x)
        grads = torch.func.grad(lambda each: self.layers[0](each).pow(2).sum())(hidden)
        return self.head(self.norm(self.layers[1](hidden + grads)))


@program({"zero=3": "inside of torch.func", "recompute": "inside of torch.func|rank 0 failed"})
def a_gradient_by_torch_func(parallelize: Parallelize) -> Result:
    """`torch.func.grad` inside of the forward."""
    return trained(start(parallelize, Derived().double()))


@program({"all": "is wrapped in DataParallel"})
def wrapped_by_data_parallel(parallelize: Parallelize) -> Result:
    """`nn.DataParallel(model)`, left over from a script for GPUs."""
    return trained(start(parallelize, nn.DataParallel(small_net())))


class Trunk(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = nn.Linear(12, 12).double()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.trunk(x))


@program({"all": "another engine|cannot be read or written"})
def two_engines_of_one_trunk(parallelize: Parallelize) -> Result:
    """Two heads on one trunk, an engine each, stepped in turn."""
    trunk = small_net()
    one, other = (start(parallelize, Trunk(trunk)) for _ in range(2))
    found: dict[str, Any] = {}
    for step in range(3):
        found[f"one {step}"] = one.train_step(batch(step))
        found[f"other {step}"] = other.train_step(batch(step + 10))
    return found | {f"one.{name}": each for name, each in states(one).items()}


class Normed(nn.Module):
    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=momentum)
        self.two, self.second = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=momentum, affine=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        hidden = functional.relu(self.norm(self.one(x)))
        return self.head(functional.relu(self.second(self.two(hidden))))


def vectors(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return {"x": x, "labels": torch.randint(5, (8,), generator=generator)}


@program(but="cp", apart=True)
def batch_norms_that_count(parallelize: Parallelize) -> Result:
    """`momentum=None`: a mean over all batches so far."""
    engine = parallelize(Normed(None).double(), loss=classes, optimizer=sgd, example=vectors(0))
    return run(engine, vectors) | {"held out": engine.evaluate(vectors(9))}


@program(but="cp", apart=True)
def statistics_of_batch_norms_averaged(parallelize: Parallelize) -> Result:
    """timm's EMA moves buffers too, which are evaluated with and put back."""
    engine = parallelize(Normed(0.1).double(), loss=classes, optimizer=sgd, example=vectors(0))
    average: dict[str, Tensor] = {}
    for step in range(3):
        engine.train_step(vectors(step))
        for name, each in states(engine).items():
            old = average.get(name, each.clone())
            average[name] = old.lerp(each, 0.5) if each.is_floating_point() else each.clone()
    kept = states(engine)
    engine.load_state_dict(average)
    found = {"averaged": engine.evaluate(vectors(9))}
    engine.load_state_dict(kept)
    return found | run(engine, vectors, 2)


@program({"dp": "sparse_coo tensor, which has no rows", "pp": "no rows to be cut", "tp": "meta device"}, but="cp")
def rows_in_a_sparse_tensor(parallelize: Parallelize) -> Result:
    """Features as `torch.sparse_coo_tensor`."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(6, 8) * 0.3)
            self.rest = nn.Sequential(Block(), nn.Linear(8, 5))

        def forward(self, x: Tensor) -> Any:
            return self.rest(torch.sparse.mm(x, self.first))

    def make(seed: int) -> Batch:
        found = vectors(seed)
        return found | {"x": (found["x"] * (found["x"] > 0)).to_sparse()}

    engine = parallelize(Sparse().double(), loss=classes, optimizer=sgd, example=make(0))
    return run(engine, make)


class Chosen(nn.Module):
    """Experts by hand, each called with the tokens that chose it; the module's own blocks are units."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Any:
        hidden = self.embed(x)
        best, which = self.router(hidden).softmax(-1).max(-1)
        made = torch.zeros_like(hidden)
        for number, each in enumerate(self.experts):
            chosen = which == number
            made[chosen] = each(hidden[chosen]) * best[chosen][:, None]
        return self.head(hidden + made)


@program()
def experts_called_with_the_tokens_that_chose_them(parallelize: Parallelize) -> Result:
    """How many tokens go from stage to stage is another number in every batch."""
    return trained(start(parallelize, Chosen().double()), steps=5)
