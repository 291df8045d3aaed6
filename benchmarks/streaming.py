"""Models larger than the room that they have on a GPU: streamed forwards, and training with the optimizer on the host.

Needs a GPU. Weights are random numbers: only their bytes matter. Of each forward the bound is the larger of what its
computation takes where everything is on the device (measured, of one layer, times their number) and of what its bytes
take on the link (measured, pinned, one copy of 2 GiB). Accelerate, if it is there, runs the first case in the same run.

    python benchmarks/streaming.py half host          Llama-8B, 8 x 512 tokens: half of the layers on the host, and all
    python benchmarks/streaming.py larger seventy     1.5 times a budget of 40 GiB; 70B with 40 GiB
    python benchmarks/streaming.py train3 fsdp3       Llama-3B trained, its optimizer's state on the host; FSDP2
    python benchmarks/streaming.py train3cores        the same, updated by the host's cores
    python benchmarks/streaming.py train13            a 13B model, which fits neither the GPU nor the host
    python benchmarks/streaming.py disk               8 layers of Llama-8B that stay on disk, beside plain reads of them

What is measured is laid over what the file of results has of other cases.
"""

import copy
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from record import kept, record
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.dataflow.machine import Machine
from shardwise.states.tiers import HostUpdates, StreamedWeights, stream

PLACE, GIB = "cuda:0", 2**30
SHAPES: dict[str, dict[str, int]] = {
    "3B": {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "intermediate_size": 8192},
    "8B": {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14336},
    "13B": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 13824},
    "32B": {"hidden_size": 6656, "num_hidden_layers": 60, "num_attention_heads": 52, "intermediate_size": 17920},
    "70B": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
}
VOCABULARY = 128_256


def config_of(name: str) -> LlamaConfig:
    heads = SHAPES[name]["num_attention_heads"]
    few = {"3B": 8, "8B": 8, "70B": 8}.get(name, heads)
    vocabulary = 32_000 if name == "13B" else VOCABULARY
    return LlamaConfig(
        **SHAPES[name],
        num_key_value_heads=few,
        vocab_size=vocabulary,
        tie_word_embeddings=name == "3B",
        use_cache=False,
        torch_dtype=torch.bfloat16,
    )


def make(name: str, device: str, num_layers: int | None = None) -> LlamaForCausalLM:
    """A model of random weights on the GPU, or of no weights yet on the CPU: memory that nobody has touched is none."""
    config = config_of(name)
    config.num_hidden_layers = num_layers or config.num_hidden_layers
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.to_empty(device=device)
    model.tie_weights()
    small = copy.deepcopy(config)
    small.num_hidden_layers = 1
    small.hidden_size, small.num_attention_heads, small.intermediate_size = 64, 1, 64
    small.head_dim = config.hidden_size // config.num_attention_heads
    turns = LlamaForCausalLM(small).model.rotary_emb
    model.model.rotary_emb = turns.to(device)
    if device != "cpu":
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    return model


def fill(model: LlamaForCausalLM, weights: StreamedWeights | None) -> None:
    """Random weights where none are yet."""
    random = torch.randn(64 * 2**20, device=PLACE, dtype=torch.bfloat16) * 0.02
    held = weights.weights() if weights is not None else {}
    for parameter in model.parameters():
        target = held.get(parameter, parameter.data)
        if target.dim() == 1:
            target.fill_(1.0)
            continue
        flat = target.view(-1)
        for piece in flat.split(random.numel()):
            piece.copy_(random[: piece.numel()], non_blocking=True)
    torch.cuda.synchronize()


def timed(run: Callable[[], object], count: int = 5, warm: int = 2) -> float:
    for _ in range(warm):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(count):
        start = perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return median(times)


def link_speed(machine: Machine) -> float:
    """Bytes a second from pinned memory."""
    source = machine.pinned((2 * GIB,), torch.uint8)
    target = torch.empty(2 * GIB, dtype=torch.uint8, device=PLACE)
    return 2 * GIB / timed(lambda: target.copy_(source, non_blocking=True))


def tokens(vocabulary: int, rows: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (rows, length), device=PLACE)


def compute_seconds(name: str, ids: Tensor) -> float:
    """What a forward takes with everything on the device: two numbers of layers, and a straight line through them."""
    config = config_of(name)
    seconds = []
    for count in (2, 6):
        part_config = copy.deepcopy(config)
        part_config.num_hidden_layers = count
        with torch.device(PLACE):
            part = LlamaForCausalLM(part_config).to(torch.bfloat16)
        with torch.no_grad():
            seconds.append(timed(lambda part=part: part(ids), 5))  # type: ignore[misc]
        del part
        torch.cuda.empty_cache()
    layer = (seconds[1] - seconds[0]) / 4
    return seconds[0] + (config.num_hidden_layers - 2) * layer


def forward(name: str, machine: Machine, speed: float, *, on_host: float | None, room: int | None) -> dict[str, Any]:
    ids = tokens(config_of(name).vocab_size, 8, 512)
    compute = compute_seconds(name, ids)
    start = perf_counter()
    model = make(name, "cpu")
    blocks = list(model.model.layers)
    if on_host is not None:
        every = round(1 / on_host)
        blocks = blocks[every - 1 :: every]
    weights = stream(model, machine, PLACE, blocks=blocks, room_bytes=room)
    assert weights is not None, "all of it fits"
    fill(model, weights)
    made = perf_counter() - start
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        seconds = timed(lambda: model(ids), 5)
    moved = weights.host_bytes / seconds
    bound = max(compute, weights.host_bytes / speed)
    row = {
        "model": name,
        "host_bytes": weights.host_bytes,
        "seconds": seconds,
        "compute_seconds": compute,
        "link_seconds": weights.host_bytes / speed,
        "bytes_per_second": moved,
        "of_bound": bound / seconds,
        "tokens_per_second": ids.numel() / seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "seconds_to_make": made,
    }
    weights.close()
    return row


def drop_cached(folder: Path) -> None:
    """Have the files read from the disk the next time, and not from memory."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def plain_reads(folder: Path) -> float:
    """Seconds that eight threads take to read all files into memory that is there already."""
    part = 8 * 2**20
    parts = [(path, start) for path in folder.iterdir() for start in range(0, path.stat().st_size, part)]
    files = {path: os.open(path, os.O_RDONLY) for path in folder.iterdir()}
    kept_memory = threading.local()

    def read(path: Path, start: int) -> None:
        if not hasattr(kept_memory, "memory"):
            kept_memory.memory = bytearray(part)
        os.preadv(files[path], [kept_memory.memory], start)

    with ThreadPoolExecutor(8) as threads:
        start = perf_counter()
        for each in [threads.submit(read, *each) for each in parts]:
            each.result()
        seconds = perf_counter() - start
    for file in files.values():
        os.close(file)
    return seconds


def from_disk(machine: Machine, speed: float) -> dict[str, Any]:
    """Layers that are read in every pass: bytes a second from disk to GPU, beside plain reads of the same files."""
    model = make("8B", "cpu", 8)
    fill(model, None)
    ids = tokens(VOCABULARY, 8, 512)
    row: dict[str, Any] = {"link_bytes_per_second": speed}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name, torch.no_grad():
        folder = Path(name) / "weights"
        weights = stream(model, machine, PLACE, blocks=list(model.model.layers), host_bytes=0, folder=folder)
        assert weights is not None, "all of it fits"
        row["disk_bytes"] = num_bytes = weights.disk_bytes
        model(ids)
        torch.cuda.synchronize()
        for state in ("cold", "warm"):
            ours, plain = [], []
            for _ in range(3):
                for times, run in (
                    (plain, lambda: plain_reads(folder)),
                    (ours, lambda: timed(lambda: model(ids), 1, 0)),
                ):
                    if state == "cold":
                        drop_cached(folder)
                    times.append(run())
            row[state] = {
                "seconds": median(ours),
                "bytes_per_second": num_bytes / median(ours),
                "plain_bytes_per_second": num_bytes / median(plain),
                "of_plain": median(plain) / median(ours),
                "of_bound": max(median(plain), num_bytes / speed) / median(ours),
            }
        weights.close()
    return row


def accelerates(speed: float) -> dict[str, Any]:
    """The same half of the layers kept on the host by Accelerate's device map."""
    from accelerate import dispatch_model

    model = make("8B", "cpu")
    layers = {f"model.layers.{number}": "cpu" if number % 2 else 0 for number in range(32)}
    rest = {"model.embed_tokens": 0, "model.norm": 0, "lm_head": 0, "model.rotary_emb": 0}
    fill(model, None)
    model = dispatch_model(model, {**layers, **rest}, main_device=0)
    ids = tokens(VOCABULARY, 8, 512)
    with torch.no_grad():
        seconds = timed(lambda: model(ids), 3, 1)
    num_bytes = sum(each.numel() * 2 for each in make("8B", "meta").model.layers.parameters()) / 2
    return {"seconds": seconds, "bytes_per_second": num_bytes / seconds, "of_link": num_bytes / seconds / speed}


def train(
    name: str,
    machine: Machine,
    *,
    rows: int,
    length: int,
    on_host: float,
    steps: int,
    recompute: bool,
) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    model = make(name, PLACE)
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    start = perf_counter()
    updates = HostUpdates(
        model,
        list(model.model.layers),
        lambda some: AdamW(some, lr=1e-5, fused=True),
        machine,
        PLACE,
        on_host=on_host,
    )
    made = perf_counter() - start
    ids = tokens(config_of(name).vocab_size, rows, length)
    losses, starts = [], []
    for _ in range(steps + 1):
        starts.append(perf_counter())
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        updates.step()
        losses.append(loss.detach())
    began = perf_counter()
    updates.wait()
    tail = perf_counter() - began
    compute = []
    for _ in range(3):  # The device alone: no update is waited for or made.
        updates.accumulate(is_last=False)
        torch.cuda.synchronize()
        start = perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.cuda.synchronize()
        compute.append(perf_counter() - start)
    # From the start of a step to the start of the next: each forward waits for the updates of the step before. The
    # first two make the optimizer's state and fill the pipe.
    times = [after - before for before, after in pairwise(starts)][2:]
    seconds = sum(times) / len(times)
    row = {
        "model": name,
        "tokens_per_second": rows * length / seconds,
        "seconds": seconds,
        "all_steps": times,
        "compute_seconds": min(compute),
        "tail_seconds": tail,
        "host_fraction": updates.host_fraction,
        "losses": [float(each) for each in losses],
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "seconds_to_make": made,
    }
    updates.close()
    return row


def by_fsdp2(name: str, rows: int, length: int, steps: int) -> dict[str, Any]:
    """The same training by torch's FSDP2 with everything offloaded to the host, on one rank."""
    dist.init_process_group("cuda:nccl,cpu:gloo", init_method="tcp://127.0.0.1:29577", rank=0, world_size=1)
    torch.cuda.reset_peak_memory_stats()
    policy = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        "offload_policy": CPUOffloadPolicy(),
        "mesh": init_device_mesh("cuda", (1,)),
    }
    model = make(name, PLACE).float()
    for layer in model.model.layers:
        fully_shard(layer, **policy)
    fully_shard(model, **policy)
    optimizer = AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = tokens(config_of(name).vocab_size, rows, length)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(step, steps, 2)
    dist.destroy_process_group()
    return {
        "model": name,
        "tokens_per_second": rows * length / seconds,
        "seconds": seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
    }


def same_as_plain(machine: Machine) -> float:
    """The largest difference of a weight after 5 steps with and without the state on the host."""
    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=999
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(PLACE)
    found = []
    for fraction in (1.0, 0.0):
        one = copy.deepcopy(model)
        updates = HostUpdates(
            one, list(one.model.layers), lambda some: AdamW(some, lr=1e-3), machine, PLACE, on_host=fraction
        )
        for step in range(5):
            ids = torch.randint(0, 999, (4, 64), generator=torch.Generator().manual_seed(step)).to(PLACE)
            one(input_ids=ids, labels=ids).loss.backward()
            updates.step()
        updates.close()
        found.append([each.detach().float() for each in one.parameters()])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def main(names: list[str]) -> int:
    results: dict[str, Any] = {**kept("streaming"), "device": torch.cuda.get_device_name()}
    with Machine([PLACE]) as machine:
        speed = link_speed(machine)
        results["link_bytes_per_second"] = speed
        print(f"link: {speed / 1e9:.1f} GB/s", flush=True)
        cases: dict[str, Callable[[], Any]] = {
            "half": lambda: forward("8B", machine, speed, on_host=0.5, room=None),
            "accelerate": lambda: accelerates(speed),
            "host": lambda: forward("8B", machine, speed, on_host=1.0, room=None),
            "larger": lambda: forward("32B", machine, speed, on_host=None, room=36 * GIB),
            "seventy": lambda: forward("70B", machine, speed, on_host=None, room=36 * GIB),
            "disk": lambda: from_disk(machine, speed),
            "same": lambda: same_as_plain(machine),
            "train3": lambda: train("3B", machine, rows=8, length=2048, on_host=1.0, steps=8, recompute=False),
            "fsdp3": lambda: by_fsdp2("3B", 8, 2048, 3),
            "train13": lambda: train("13B", machine, rows=4, length=2048, on_host=0.6, steps=5, recompute=True),
        }
        for name in names:
            try:
                results[name] = cases[name]()
            except Exception as error:
                results[name] = {"failed": f"{type(error).__name__}: {error}"}
            print(name, results[name], flush=True)
            torch.cuda.empty_cache()
            record("streaming", results)
    if "half" in results and "seconds" in results.get("accelerate", {}):
        ratio = results["accelerate"]["seconds"] / results["half"]["seconds"]
        results["half_over_accelerate"] = ratio
        print(f"{ratio:.2f} x Accelerate")
        record("streaming", results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["half", "accelerate", "host"]))
