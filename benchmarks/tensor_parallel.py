"""Tensor parallelism of two CPU ranks, beside DTensor's two forms on the same model, in one run.

The model is of the Llama kind: hidden 512, 8 layers, 8 heads, ffn 1,376, vocabulary 8,192; batch 16 x 256, fp32. One
thread a rank. Forms take turns, step by step, so that whatever else the machine does meets all of them alike. The
ceiling is two processes that compute the same on their own.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist
from record import record
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from shardwise.ranks.collectives import Group
from shardwise.ranks.spawn import Ranks
from shardwise.sharding.tensor import shard

_LIMIT = 1.05
Step = Callable[[], float]


class Attention(nn.Module):
    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            each.view(batch, length, -1, self.head_dim).transpose(1, 2) for each in (self.q(x), self.k(x), self.v(x))
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(batch, length, -1))


class Feed(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed = Attention(width, 64), Feed(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.feed(self.second(x))


class Net(nn.Module):
    def __init__(self, width: int, hidden: int, num_layers: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, hidden) for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def make() -> Net:
    torch.manual_seed(0)
    return Net(512, 1376, 8, 8192)


def batches(num_sequences: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(8192, (num_sequences, 257), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def step_of(module: nn.Module, num_sequences: int, *, loss_in_shards: bool = False) -> Step:
    tokens, labels = batches(num_sequences)

    def compute() -> float:
        loss = functional.cross_entropy(module(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        return float(loss.detach())

    def step() -> float:
        module.zero_grad(set_to_none=True)
        if not loss_in_shards:
            return compute()
        with loss_parallel():
            return compute()

    return step


def dtensor(module: Net, *, sequence: bool) -> Net:
    """As torch's own tutorial does it, with the loss computed where the words are."""
    mesh = init_device_mesh("cpu", (2,))
    stream = Shard(1) if sequence else Replicate()
    for layer in module.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.o": RowwiseParallel(output_layouts=stream),
                "feed.gate": ColwiseParallel(),
                "feed.up": ColwiseParallel(),
                "feed.down": RowwiseParallel(output_layouts=stream),
                **(
                    {
                        "first": SequenceParallel(),
                        "second": SequenceParallel(),
                        "attention": PrepareModuleInput(
                            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
                        ),
                        "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                    }
                    if sequence
                    else {}
                ),
            },
        )
    parallelize_module(
        module,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
            **({"norm": SequenceParallel()} if sequence else {}),
            "head": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    return module


def measure(rounds: int, num_sequences: int) -> dict[str, list[float]]:
    """Seconds of every step of every form, on one rank."""
    torch.set_num_threads(1)
    whole = make()
    tokens, _ = batches(2)
    forms: dict[str, Step] = {}
    for name, sequence in (("shardwise", False), ("shardwise, sequence parallel", True)):
        module = copy.deepcopy(whole)
        shard(module, Group(dist.group.WORLD), example={"tokens": tokens}, sequence=sequence)
        forms[name] = step_of(module, num_sequences)
    for name, sequence in (("dtensor", False), ("dtensor, sequence parallel", True)):
        forms[name] = step_of(dtensor(copy.deepcopy(whole), sequence=sequence), num_sequences, loss_in_shards=True)
    forms["two on their own"] = step_of(whole, num_sequences)
    losses = {name: step() for name, step in forms.items()}
    assert max(losses.values()) - min(losses.values()) < 1e-4, f"the forms compute different losses: {losses}"
    seconds: dict[str, list[float]] = {name: [] for name in [*forms, "one alone"]}
    for _ in range(rounds):
        for name, step in forms.items():
            dist.barrier()
            start = perf_counter()
            step()
            dist.barrier()
            seconds[name].append(perf_counter() - start)
        dist.barrier()
        if dist.get_rank() == 0:
            start = perf_counter()
            forms["two on their own"]()
            seconds["one alone"].append(perf_counter() - start)
        dist.barrier()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=16)
    options = parser.parse_args()
    with Ranks(2) as ranks:
        seconds = ranks.run(measure, options.rounds, options.sequences)[0]
    tokens = options.sequences * 256
    speeds = {name: tokens / statistics.median(some) for name, some in seconds.items()}
    speeds["two on their own"] *= 2
    results = {name: {"tokens/s": speed, "of one alone": speed / speeds["one alone"]} for name, speed in speeds.items()}
    for name, row in results.items():
        print(f"{name:32} {row['tokens/s']:8.0f} tokens/s   {row['of one alone']:.2f} x one alone")
    ours = max(speeds["shardwise"], speeds["shardwise, sequence parallel"])
    theirs = max(speeds["dtensor"], speeds["dtensor, sequence parallel"])
    print(f"the better of ours is {ours / theirs:.3f} x the better of theirs (wanted: {_LIMIT})")
    record("tensor_parallel", {**results, "of the better of dtensor": {"ratio": ours / theirs, "wanted": _LIMIT}})
    return 0 if ours >= _LIMIT * theirs else 1


if __name__ == "__main__":
    sys.exit(main())
