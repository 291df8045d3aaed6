"""The cases of the parity matrix: a model, a schedule, and how many ranks, chunks and microbatches.

A case is a plain value, so that it can be sent to other processes: what runs it makes module, batches, loss and
optimizer from it, the same everywhere.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import SGD, AdamW, Optimizer

from shardwise.planner.plan import Plan
from shardwise.schedule.catalogue import CATALOGUE
from shardwise.stages.stage import Batch, Loss
from tests.stages.families import FAMILIES, make_batch, make_family
from tests.stages.nets import Bottleneck, ResNet50, UNet
from tests.stages.pieces import Net

MODELS = (*FAMILIES, "resnet-50", "u-net")
SCHEDULES = tuple(CATALOGUE)
#: The engines: one runs every rank itself, of the other each rank is a process.
RUNNERS = ONE_PROCESS, PROCESSES = "one process", "processes"
NUM_STAGES = (2, 3, 4)
OPTIMIZERS = ("adamw", "sgd")
#: Labels that count for nothing.
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run: as many steps as there are `lengths`, each the length of that step's sequences."""

    model: str
    schedule: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int | None = None
    optimizer: str = "adamw"
    lengths: tuple[int, ...] = (6, 6, 6)

    @property
    def plan(self) -> Plan:
        return Plan(
            pp=self.num_ranks, schedule=self.schedule, microbatches=self.num_microbatches, chunks=self.num_chunks
        )

    @property
    def num_stages(self) -> int:
        count = self.plan.num_stages
        assert count is not None, "only `auto` leaves its stages open"
        return count

    @property
    def is_stale(self) -> bool:
        """Whether gradients are those of the weights one step ago."""
        return self.schedule == "pipedream-2bw"

    def __str__(self) -> str:
        return f"{self.model}-{self.schedule}-{self.num_stages}-on-{self.num_ranks}"


def layouts(schedule: str) -> Iterator[tuple[int, int | None, int]]:
    """Every way in which a schedule has 2 to 4 stages: ranks, chunks and microbatches."""
    entry = CATALOGUE[schedule]
    for num_stages in NUM_STAGES:
        for num_ranks in range(1, num_stages * entry.num_weight_copies + 1):
            chunks, rest = divmod(num_stages * entry.num_weight_copies, num_ranks)
            if rest or (entry.mirrored and num_ranks % 2):
                continue
            if entry.any_chunks_from is None:
                fits = chunks == entry.chunks
            else:
                # One chunk is 1F1B again.
                fits = chunks >= max(2, entry.any_chunks_from) and not (entry.even_chunks and chunks % 2)
            if fits:
                given = chunks if entry.any_chunks_from is not None else None
                least = 3 if num_ranks < 3 and not entry.mirrored else 4
                yield num_ranks, given, max(least, entry.least_microbatches * num_ranks)


def layouts_for(runner: str, schedule: str) -> list[tuple[int, int | None, int]]:
    """Those of a schedule that a runner takes: to be processes, there must be several ranks."""
    return [each for each in layouts(schedule) if each[0] > 1 or runner == ONE_PROCESS]


def cases_of(model: str, schedule: str, runner: str, *, all_layouts: bool) -> list[Case]:
    """The cases of one cell of the matrix: all layouts, or one that communicates, another for each model and runner."""
    if not all_layouts:
        turn = MODELS.index(model) + SCHEDULES.index(schedule) + RUNNERS.index(runner)
        return [case_of(model, schedule, turn)]
    return [_case(model, schedule, *layout) for layout in layouts_for(runner, schedule)]


def case_of(model: str, schedule: str, turn: int) -> Case:
    """A case in one of the layouts that communicate: in turn each of them."""
    several = layouts_for(PROCESSES, schedule)
    return _case(model, schedule, *several[turn % len(several)])


def _case(model: str, schedule: str, num_ranks: int, num_chunks: int | None, num_microbatches: int) -> Case:
    return Case(
        model=model,
        schedule=schedule,
        num_ranks=num_ranks,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        optimizer=_optimizer_of(model),
    )


def _optimizer_of(model: str) -> str:
    """One or the other. A ResNet's own rounding is too much for AdamW, which divides it by the gradient's size.

    After three steps of 3 microbatches the plain module in fp32 is 4e-4 from itself in fp64, and with SGD 8e-7.
    """
    return "sgd" if model == "resnet-50" else OPTIMIZERS[MODELS.index(model) % 2]


def make_module(model: str) -> nn.Module:
    """The model, in training mode, with the same weights every time."""
    torch.manual_seed(0)
    if model == "resnet-50":
        return _tame(ResNet50(width=4, num_classes=7).train())
    if model == "u-net":
        return UNet(width=4).train()
    if model == "tied-and-skipping":
        return Net(num_blocks=4)
    return make_family(model)


def _tame(net: ResNet50) -> ResNet50:
    """Let every block begin as little more than its way around (Goyal et al. 2017, section 5.1).

    As it is made, a ResNet with two images to normalise over is chaos: a change of 1e-7 in the plain module's weights
    is one of 0.7 in its weights two steps later.
    """
    for block in net.modules():
        if isinstance(block, Bottleneck):
            nn.init.constant_(block.bn3.weight, 0.05)
    return net


def make_batches(case: Case) -> list[dict[str, Tensor]]:
    """A batch for each step, two sequences or images a microbatch. Some labels are to be ignored."""
    return [
        _make_batch(case.model, 2 * case.num_microbatches, length, seed=step)
        for step, length in enumerate(case.lengths)
    ]


def _make_batch(model: str, size: int, length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if model == "u-net":
        noise, image = torch.randn(2, size, 3, 16, 16, generator=generator)
        return {"image": image, "moment": torch.rand(size, generator=generator), "targets": noise}
    if model in ("resnet-50", "vit"):
        targets = torch.randint(0, 5, (size,), generator=generator)
        if model == "resnet-50":
            return {"image": torch.randn(size, 3, 64, 64, generator=generator), "targets": targets}
        return {**make_batch(model, size, seed=seed), "targets": targets}
    if model == "tied-and-skipping":
        ids = torch.randint(0, 11, (size, length + 1), generator=generator)
        return {"ids": ids[:, :-1], "targets": ids[:, 1:]}
    batch = make_batch(model, size, length, seed=seed)
    targets = batch.get("decoder_input_ids", batch["input_ids"]).clone()
    targets[0, :2] = IGNORED
    return {**batch, "targets": targets}


def loss_of(model: str) -> Loss:
    """A mean for images; a sum and its count for tokens, of which microbatches have different numbers."""
    if model == "u-net":
        return _noise_loss
    return _image_loss if model in ("resnet-50", "vit") else _token_loss


def _noise_loss(output: Any, batch: Batch) -> Tensor:
    return mse_loss(output["noise"], batch["targets"])


def _image_loss(output: Any, batch: Batch) -> Tensor:
    return cross_entropy(_logits(output), batch["targets"])


def _token_loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch["targets"].flatten()
    total = cross_entropy(_logits(output).flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def _logits(output: Any) -> Tensor:
    found = output if isinstance(output, Tensor) else output.logits
    assert isinstance(found, Tensor)
    return found


def make_optimizer(name: str) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """AdamW, or SGD with momentum.

    Some gradients are zero but for rounding (a key's bias shifts all scores alike). AdamW would divide that noise by
    its own size; with this epsilon it stays noise.
    """
    if name == "sgd":
        return lambda parameters: SGD(parameters, lr=1e-3, momentum=0.9)
    return lambda parameters: AdamW(parameters, lr=1e-3, eps=1e-4)
