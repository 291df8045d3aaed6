"""What ranks run in the tests of data parallelism: a small net trained under a plan, by hand, and on one device."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from shardwise.execution.pipeline import complete, forward_only, schedule_of
from shardwise.execution.process import ProcessExecutor
from shardwise.planner.plan import Plan
from shardwise.ranks.backend_exchange import BackendExchange, HostExchange, make_exchange
from shardwise.ranks.links import make_groups
from shardwise.ranks.mesh import make_mesh, make_replicas
from shardwise.ranks.transport import ProcessTransport
from shardwise.stages.batch import cut_batch
from shardwise.stages.split import split
from shardwise.states.buckets.make import HeldStages, ParameterOwners, ZeroConfig
from shardwise.states.buckets.ties import make_ties
from shardwise.states.data_parallel import DataParallel
from shardwise.states.make_optimizers import make_optimizers
from shardwise.states.muon import Muon
from shardwise.states.optimizers.updates import Held
from shardwise.states.parameter_group import MakeOptimizer, Share, is_hidden_matrix

IGNORED = -100
#: How GPUs sum: by a backend of theirs, or over the host.
EXCHANGES = {"backend": BackendExchange, "host": HostExchange}


class Block(nn.Module):
    """Odd sizes, a bias, a norm; and, if asked for, a weight that is never used and one that is never trained."""

    def __init__(self, width: int, *, wider: int, extras: bool) -> None:
        super().__init__()
        self.up = nn.Linear(width, width + wider)
        self.down = nn.Linear(width + wider, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.unused = nn.Linear(3, 3) if extras else None
        self.frozen = nn.Parameter(torch.full((width,), 0.5), requires_grad=False) if extras else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(torch.tanh(self.up(self.norm(x))))
        return x + (hidden if self.frozen is None else hidden * self.frozen)  # type: ignore[no-any-return]


class Net(nn.Module):
    """Embedding, blocks and a head; tied or not."""

    def __init__(
        self,
        *,
        width: int = 13,
        wider: int = 7,
        vocabulary: int = 29,
        num_blocks: int = 4,
        tied: bool = False,
        extras: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, wider=wider, extras=extras) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def make_net(**settings: Any) -> Net:
    torch.manual_seed(7)
    return Net(**settings)


def loss(logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
    """The sum over labels, and their number: replicas have different ones."""
    total = cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(), reduction="sum",
                            ignore_index=IGNORED)  # fmt: skip
    return total, (batch["labels"] != IGNORED).sum()


def make_batch(step: int, *, rows: int = 8, length: int = 5, vocabulary: int = 29) -> dict[str, Tensor]:
    """A batch in which rows have fewer and fewer labels."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    labels = torch.randint(vocabulary, (rows, length), generator=generator)
    for row in range(rows):
        labels[row, : row * length // (rows + 1)] = IGNORED
    return {"ids": ids, "labels": labels}


OPTIMIZERS: dict[str, MakeOptimizer | list[Share]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "muon": [
        Share(make=partial(Muon, lr=0.02, weight_decay=0.1), takes=is_hidden_matrix),
        Share(make=partial(torch.optim.AdamW, lr=1e-2)),
    ],
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to train. The batch is cut over dp in equal rows."""

    plan: str
    optimizer: str = "adamw"
    net: dict[str, Any] = field(default_factory=dict)
    clip: float | None = None
    num_steps: int = 3
    precision: torch.dtype | None = None
    layerwise: bool = True
    shard_size: int | None = None
    bucket_bytes: int = 1500
    exchange: str | None = None
    rows: int = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it on one rank: the parameters and the last gradients of its stages, whole."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor | None]
    evaluated: float
    held: Held
    sent: dict[str, int]
    num_parameters: int


def train(case: Case) -> Outcome:
    """Train one rank of a plan."""
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    plan = Plan.parse(case.plan)
    mesh, module = make_mesh(plan), make_net(**case.net)
    if case.precision is not None:
        module = module.to(case.precision)
    place = mesh.coordinates["pp"]
    schedule = schedule_of(plan)
    count = len(schedule.placement.pipes[0])
    mine = schedule.placement.stages[place]
    batches = [_share(make_batch(step, rows=case.rows), mesh.coordinates["dp"], plan.dp) for step in range(9)]
    example = cut_batch(batches[0], plan.microbatches)[0]
    stages = split(module.train(), count, example, only={stage % count for stage in mine})
    splits_backward = any(part.kind == "W" for order in schedule.orders for each in order for part in each.parts)
    sharing = ZeroConfig(
        zero=plan.zero, masters=case.precision is not None, bucket_bytes=case.bucket_bytes,
        layerwise=case.layerwise and not splits_backward,
    )  # fmt: skip
    gathers = plan.zero == 3 and not sharing.layerwise
    complete_schedule = complete(schedule, stages, reduce_gradients=True, max_gathered=2 if gathers else None)
    replicas = make_replicas(mesh.ranks("gradients"), shard_size=case.shard_size)
    for each in module.parameters() if case.precision is not None else ():
        each.data = each.data.to(case.precision)
    held_stages = HeldStages(
        stages={stage: held for stage in mine if (held := stages.stages[stage % count]) is not None},
        schedule=complete_schedule, ranks=[place], module=module,
    )  # fmt: skip
    ties = make_ties(complete_schedule.placement, stages, mesh.pipelines, mesh.rank)
    plain = make_exchange(held_stages.device, None, on_nccl=False)
    made = make_optimizers(OPTIMIZERS[case.optimizer], dict(module.named_parameters()))
    data = DataParallel(
        held_stages, ParameterOwners(replicas_of=lambda _: replicas, ties=ties), sharing=sharing,
        optimizers=made,
        exchange=plain if case.exchange is None else EXCHANGES[case.exchange](),
    )  # fmt: skip
    transport = ProcessTransport(make_groups(mesh.pipelines))
    trainer, evaluator = (
        ProcessExecutor(place, each, stages, loss, transport=transport, on_reduce=data.reduce, beside=data)
        for each in (complete_schedule, forward_only(complete_schedule))
    )
    losses, norms = [], []
    for batch in batches[: case.num_steps]:
        for group in (replicas.shard, replicas.copies):
            group.traffic.clear()
        data.begin_step()
        tally = trainer.run(cut_batch(batch, plan.microbatches), signature="train")
        numbers = torch.tensor([tally.total, tally.count], dtype=torch.float64)
        dist.all_reduce(numbers)
        data.finish()
        square = data.square()
        dist.all_reduce(square)
        tokens = float(numbers[1])
        norms.append(float(square) ** 0.5 / tokens)
        losses.append(float(numbers[0]) / tokens)
        factor = 1.0 if case.clip is None else min(1.0, case.clip / (norms[-1] + 1e-6))
        data.step(factor / tokens)
    sent = {kind: replicas.shard.traffic.bytes[kind] + replicas.copies.traffic.bytes[kind]
            for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")}  # fmt: skip
    held_bytes = data.held()
    names = [slot.name for bucket in data.buckets for slot in bucket.layout.slots]
    gradients = {name: data.whole_gradient(name) for name in names}
    with torch.no_grad():
        tally = evaluator.run(cut_batch(batches[-1], plan.microbatches), signature="evaluate")
    numbers = torch.tensor([tally.total, tally.count], dtype=torch.float64)
    dist.all_reduce(numbers)
    weights = {name: data.wholes.weight(name) for name in names}
    data.close()
    transport.close()
    return Outcome(
        losses=losses, norms=norms, weights=weights, gradients=gradients, evaluated=float(numbers[0] / numbers[1]),
        held=held_bytes, sent=sent,
        num_parameters=sum(slot.shape.numel() for b in data.buckets if b.gradients for slot in b.layout.slots),
    )  # fmt: skip


def _share(batch: dict[str, Tensor], number: int, count: int) -> dict[str, Tensor]:
    return {name: each.chunk(count)[number] for name, each in batch.items()}


def alone(case: Case) -> Outcome:
    """The same on one device, with plain torch."""
    module = make_net(**case.net)
    optimizers = _plain_optimizers(module, OPTIMIZERS[case.optimizer])
    losses, norms = [], []
    trained = {name: each for name, each in module.named_parameters() if each.requires_grad}
    for step in range(case.num_steps):
        module.zero_grad()
        batch = make_batch(step, rows=case.rows)
        total, tokens = loss(module(batch["ids"]), batch)
        (total / tokens).backward()  # type: ignore[no-untyped-call]
        losses.append(float(total.detach() / tokens))
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), case.clip or float("inf"))))
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        batch = make_batch(8, rows=case.rows)
        total, tokens = loss(module(batch["ids"]), batch)
    return Outcome(
        losses=losses, norms=norms, weights={name: each.detach() for name, each in module.named_parameters()},
        gradients={name: each.grad for name, each in trained.items()}, evaluated=float(total / tokens),
        held=Held(parameters=0, gradients=0, optimizer=0), sent={}, num_parameters=0,
    )  # fmt: skip


def _plain_optimizers(module: nn.Module, optimizer: MakeOptimizer | list[Share]) -> list[Optimizer]:
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    if callable(optimizer):
        return [optimizer(named.values())]
    left, made = dict(named), []
    for share in optimizer:
        taken = [name for name, each in left.items() if share.takes(name, each)]
        made.append(share.make([left.pop(name) for name in taken]))
    return made
