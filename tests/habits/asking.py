"""Scripts for DDP that ask which rank they are: seeds and values of each rank, worlds in losses, gathered rows."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,operator,union-attr,assignment"

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests.habits.harness import (
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

#: A plan has several ranks, and they do not do alike.
WORLD = {"all": "asks torch.distributed for ranks|neither their mean|talks to other ranks"}


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@program({"all": "not the same ones on all"})
def a_weight_drawn_by_each_rank(parallelize: Parallelize) -> Result:
    """Mixup's lam from `np.random`, seeded by the rank."""
    drawn, state = np.random.default_rng(rank()), {"lam": 0.5}

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output * state["lam"], given)

    def between(_: int) -> None:
        state["lam"] = float(drawn.beta(1, 1))

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)), between=between)


class Noisy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * torch.rand((), dtype=x.dtype))


@program({"all": "not at the same place of their generators"}, only="tp", but="dp")
def a_seed_of_each_rank(parallelize: Parallelize) -> Result:
    """`torch.manual_seed(seed + rank)`, and a factor that blocks draw."""
    engine = start(parallelize, small_net(block=Noisy))
    torch.manual_seed(7 + rank())
    return trained(engine)


@program({"all": "not at the same place of their generators"}, only="tp", but="dp")
def a_seed_of_each_rank_and_nothing_tried(parallelize: Parallelize) -> Result:
    """The same with `verify=False`: what blocks name tells that they draw."""
    engine = start(parallelize, small_net(block=Noisy), verify=False)
    torch.manual_seed(7 + rank())
    return trained(engine)


@program(only="tp", but="dp")
def a_seed_of_each_rank_and_nothing_drawn(parallelize: Parallelize) -> Result:
    """The same where nothing is drawn: right."""
    engine = start(parallelize, small_net())
    torch.manual_seed(7 + rank())
    return trained(engine)


class Skipped(Block):
    """LayerDrop: what a rank skips another would wait for."""

    def forward(self, x: Tensor) -> Tensor:
        return x if self.training and random.random() < 0.5 else super().forward(x)


@program({"all": "not at the same place of their generators"}, only="tp", but="dp", always=True)
def layers_skipped_by_a_seed_of_each_rank(parallelize: Parallelize) -> Result:
    """`random.seed(seed + rank)` before the engine is made; each rank would skip other blocks."""
    model = small_net(block=Skipped)
    random.seed(rank())
    torch.manual_seed(rank())
    return trained(start(parallelize, model))


@contextmanager
def thread_that_draws() -> Iterator[None]:
    """As a loader does that prepares batches while steps run: each rank's is somewhere else."""
    end = Event()

    def draw() -> None:
        while not end.wait(1e-4):
            random.random()
            np.random.random()

    thread = Thread(target=draw, daemon=True)
    random.seed(rank())
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


@program(only="tp", but="dp", always=True)
def a_thread_that_draws(parallelize: Parallelize) -> Result:
    """From generators that the forward does not draw from."""
    engine = start(parallelize, small_net())
    with thread_that_draws():
        return trained(engine)


class Lucky(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.uniform(0.9, 1.1)


@program({"all": "not at the same place of their generators"}, only="tp", but="dp", always=True)
def a_thread_and_a_forward_that_draw(parallelize: Parallelize) -> Result:
    """From one generator: nobody knows what the forward draws."""
    engine = start(parallelize, small_net(block=Lucky))
    with thread_that_draws():
        return trained(engine)


class Augmented(Block):
    """Draws by an object that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.jitter = Jitter()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.jitter.factor()


class Jitter:
    def factor(self) -> float:
        return random.uniform(0.9, 1.1)


@program({"all": "not at the same place of their generators"}, only="tp", but="dp")
def a_thread_and_an_object_that_draw(parallelize: Parallelize) -> Result:
    """The same where the forward draws by an object in an attribute."""
    engine = start(parallelize, small_net(block=Augmented))
    with thread_that_draws():
        return trained(engine)


@program(WORLD)
def negatives_gathered_by_the_loss(parallelize: Parallelize) -> Result:
    """CLIP: `all_gather` of what all ranks have."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        rows = functional.normalize(output.mean(1), dim=-1)
        every = [torch.zeros_like(rows) for _ in range(world())]
        if world() > 1:
            dist.all_gather(every, rows.detach())
        every[rank()] = rows
        places = torch.arange(len(rows)) + rank() * len(rows)
        return functional.cross_entropy(rows @ torch.cat(every).T, places) + 0.0 * given["labels"].sum()

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program(WORLD)
def a_loss_times_the_world(parallelize: Parallelize) -> Result:
    """`loss * dist.get_world_size()`, as gradients are averaged."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(output, given) * world()

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


class Ranked(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.1 * rank())


@program(WORLD)
def a_forward_that_asks_for_its_rank(parallelize: Parallelize) -> Result:
    """`x * (1 + rank)`: seen by the ranks that are not the first."""
    return trained(start(parallelize, Ranked().double()))


#: Replicas have other rows; under pp not all ranks come to the call.
TOLD = {"dp": "combines numbers of all ranks", "pp": "talks to other ranks"}


@program(TOLD, but="cp", whole=True)
def boxes_counted_over_ranks(parallelize: Parallelize) -> Result:
    """DETR: `all_reduce(num_boxes)`, divided by the world size. All ranks that have the same rows are told the same."""

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        chosen = given["labels"] > 5
        count = chosen.sum().double()
        if world() > 1:
            dist.all_reduce(count)
            count = count / world()
        each = functional.cross_entropy(output.flatten(0, 1), given["labels"].flatten(), reduction="none")
        return (each * chosen.flatten()).sum() / count.clamp(min=1)

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


@program({"pp": "talks to other ranks"}, but="cp")
def a_loss_logged_by_all_ranks(parallelize: Parallelize) -> Result:
    """`dist.all_reduce(loss.detach().clone())` for a log; under pp only the last stage would come to it."""
    log = []

    def loss(output: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        found = cross_entropy(output, given)
        if world() > 1:
            told = found.detach().clone()
            dist.all_reduce(told)
            log.append(float(told) / world())
        if rank() == 0:
            log.append(float(found.detach()))
        return found

    return trained(parallelize(small_net(), loss=loss, optimizer=sgd, example=batch(0)))


class Langevin(torch.optim.Optimizer):
    """SGLD: noise on every step."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.add_(each.grad, alpha=-group["lr"])
                    each.add_(torch.randn_like(each), alpha=0.01)
        return closure


#: What is known of pieces is asked first.
DRAWN = {**dict.fromkeys(("pp", "offload.optimizer", "offload.parameters"), "draws random numbers"),
         **dict.fromkeys(("zero=1", "zero=2", "zero=3", "tp"), "in pieces under this plan")}  # fmt: skip


@program(DRAWN, but="cp")
def noise_of_an_optimizer(parallelize: Parallelize) -> Result:
    """The same on all replicas, as they have the same seed."""
    return trained(start(parallelize, small_net(), Langevin))


@program({**DRAWN, "dp": f"not at the same place of their generators|{'|'.join(set(DRAWN.values()))}"}, but="cp")
def noise_of_an_optimizer_and_a_seed_of_each_rank(parallelize: Parallelize) -> Result:
    """`torch.manual_seed(seed + rank)`: replicas would add other noise to the same weights."""
    engine = start(parallelize, small_net(), Langevin)
    torch.manual_seed(7 + rank())
    return trained(engine)


#: Other stages have no such buffer, and some plans have pieces of weights.
APART = "written between steps, and not the same values|cannot be read or written"


class Watched(Block):
    """A gain in a buffer, and how large the last outputs were."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(()))
        self.size = 1.0

    def forward(self, x: Tensor) -> Tensor:
        made = self.gain * super().forward(x)
        self.size = float(made.detach().abs().mean())
        return made


@program({"dp": APART}, only="dp")
def a_buffer_set_by_what_a_rank_has_seen(parallelize: Parallelize) -> Result:
    """A router's bias, or a gain, moved between steps by numbers that forwards have left."""
    model = small_net(block=Watched)

    def between(_: int) -> None:
        for layer in model.layers:
            layer.gain = layer.gain * 0.9 + 0.1 / layer.size

    return trained(start(parallelize, model), between=between)


@program({"dp": "written between steps, and not the same values"}, only="dp")
def a_buffer_assigned_by_what_a_rank_has_seen(parallelize: Parallelize) -> Result:
    """The same without a look at the old one, which a stage without the layer would refuse."""
    model = small_net(block=Watched)

    def between(_: int) -> None:
        for layer in model.layers:
            layer.gain = torch.tensor(0.9 + 0.1 / layer.size, dtype=torch.float64)

    return trained(start(parallelize, model), between=between)


@program({"dp": APART}, only="dp")
def weights_scaled_by_what_a_rank_has_seen(parallelize: Parallelize) -> Result:
    """All ranks write to the same weights, and each its own values."""
    model = small_net(block=Watched)

    def between(_: int) -> None:
        with torch.no_grad():
            for layer in model.layers:
                layer.norm.weight.mul_(1 + 0.01 * layer.size)

    return trained(start(parallelize, model), between=between)
