"""Data parallel training of a small LLaMA on 2 CPU ranks: ours beside torch's DDP, our ZeRO-3 beside torch's FSDP2.

One thread a rank, fp32, AdamW, the same batches. All four train in the same processes and take turns, a few steps each;
kept are the tokens a second of the median turn, and the median over the rounds of ours over the peer's in that round.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from llama import BATCH, LENGTH, VOCABULARY, Llama
from record import record
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from shardwise.execution.pipeline import complete, schedule_of
from shardwise.execution.process import ProcessExecutor
from shardwise.planner.plan import Plan
from shardwise.ranks.cpu_exchange import CpuExchange
from shardwise.ranks.links import make_groups
from shardwise.ranks.mesh import Replicas, make_mesh, make_replicas
from shardwise.ranks.spawn import spawn
from shardwise.ranks.transport import ProcessTransport
from shardwise.stages.split import split
from shardwise.states.buckets.make import HeldStages, ParameterOwners, ZeroConfig
from shardwise.states.data_parallel import DataParallel
from shardwise.states.make_optimizers import make_optimizers

_RANKS, _STEPS_OF_A_TURN = 2, 2
_PEERS = {"data parallel": "DDP", "ZeRO-1": "DDP", "ZeRO-2": "DDP", "ZeRO-3": "FSDP2"}

Batch = dict[str, Tensor]
Train = Callable[[Batch], float]
make_optimizer = partial(AdamW, lr=1e-3)


def mean_loss(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def summed_loss(logits: Tensor, batch: Batch) -> tuple[Tensor, int]:
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"), batch["labels"].numel()


def plain(module: torch.nn.Module) -> Train:
    """A step as one writes it with DDP or FSDP2."""
    optimizer = make_optimizer(module.parameters())

    def train(batch: Batch) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = mean_loss(module(batch["input_ids"]), batch)
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return float(total) / _RANKS

    return train


def ddp() -> Train:
    return plain(DistributedDataParallel(Llama()))


def fsdp2() -> Train:
    module, mesh = Llama(), init_device_mesh("cpu", (_RANKS,))
    for layer in module.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return plain(module)


def ours(zero: int, example: Batch) -> Train:
    """One stage, one microbatch."""
    plan = Plan(dp=_RANKS, zero=zero)
    mesh, module = make_mesh(plan), Llama()
    stages = split(module.train(), 1, example)
    schedule = complete(schedule_of(plan), stages, reduce_gradients=True)
    held = stages.stages[0]
    assert held is not None
    data = DataParallel(
        HeldStages(stages={0: held}, schedule=schedule, ranks=[0], module=module),
        ParameterOwners(replicas_of=partial(_always, make_replicas(mesh.ranks("gradients")))),
        sharing=ZeroConfig(zero=zero, layerwise=True), optimizers=make_optimizers(make_optimizer, held.parameters),
        exchange=CpuExchange(),
    )  # fmt: skip
    transport = ProcessTransport(make_groups(mesh.pipelines))
    executor = ProcessExecutor(
        0, schedule, stages, summed_loss, transport=transport, on_reduce=data.reduce, beside=data
    )

    def train(batch: Batch) -> float:
        data.begin_step()
        tally = executor.run([batch], signature=None)
        numbers = torch.tensor([tally.total, tally.count], dtype=torch.float64)
        dist.all_reduce(numbers)
        data.finish()
        data.step(1 / float(numbers[1]))
        return float(numbers[0] / numbers[1])

    return train


def _always(replicas: Replicas, _: str) -> Replicas:
    return replicas


def measure(num_rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each way's turns, and the losses of its steps, on one rank."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(VOCABULARY, (BATCH // _RANKS, LENGTH + 1), generator=generator)
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    ways: dict[str, Train] = {
        "DDP": ddp(),
        "data parallel": ours(0, batch),
        "ZeRO-1": ours(1, batch),
        "ZeRO-2": ours(2, batch),
        "FSDP2": fsdp2(),
        "ZeRO-3": ours(3, batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [train(batch)] for name, train in ways.items()}
    names = list(ways)
    for turn in range(num_rounds):
        # Nobody always comes after the same.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(_STEPS_OF_A_TURN):
                losses[name].append(ways[name](batch))
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return seconds, losses


def main(num_rounds: int) -> None:
    seconds, losses = spawn(measure, _RANKS, (num_rounds,))[0]
    tokens = BATCH * LENGTH * _STEPS_OF_A_TURN
    results: dict[str, object] = {
        "ranks": _RANKS,
        "rounds": num_rounds,
        "tokens_per_second": {name: round(tokens / median(each), 1) for name, each in seconds.items()},
        "over_peer": {
            f"{name} over {peer}": round(median(b / a for a, b in zip(seconds[name], seconds[peer], strict=True)), 3)
            for name, peer in _PEERS.items()
        },
        "last_loss": {name: round(each[-1], 5) for name, each in losses.items()},
    }
    for what, values in results.items():
        print(what, values)
    record("data_parallel", results)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
