"""Traces of GPUs: do parts add up, does torch's profiler say the same, what does a look cost, what is exposed?

    python benchmarks/gpu_traces.py            on a machine with a GPU, about 4 minutes
    python benchmarks/gpu_traces.py --cases one,offloaded       some of it; what is kept of the rest stays

Four questions, each of real steps:

- The parts of every looked-at step against a clock outside of it.
- NCCL and copies: sums of our trace against those of torch's profiler, of the same capture, and of steps in turn that
  torch's profiler alone has seen.
- Steps with and without a look in turn; and steps before the first look of a process against steps after it. Blocks
  are compiled, as `train` has them on a GPU: a look costs about a microsecond for each kernel.
- Two ranks of dp=2 on the GPU: what the trace says is exposed of the sum of gradients, and by how much steps are
  shorter in which nothing is summed.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from record import kept, record
from torch import Tensor
from torch.optim import AdamW

from shardwise.engine.engine import Engine
from shardwise.engine.parallelize import parallelize
from shardwise.execution.collector import StreamCollector
from shardwise.nets.loss import next_token_loss
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.ranks.backend_exchange import BackendExchange
from shardwise.ranks.spawn import Ranks
from shardwise.ranks.worker import Gpus
from shardwise.trace.activities import COPIES, ActivityKind, kind_of
from shardwise.trace.events import Trace
from shardwise.trace.streams import streams_of_ranks
from shardwise.trace.stretches import Part, parts_of_ranks, stretches

#: Most that is off: parts of the step, sums of torch's, the cost of a look, what is exposed.
MOST_PARTS, MOST_SUMS, MOST_COST, MOST_EXPOSED = 0.01, 0.02, 0.02, 0.10
SUM, SHARING, BF16 = "a sum of gradients", "dp=2 sharing a GPU", "precision=bf16"
#: Plans of the cases, and what their results are called.
CASES = {"one": BF16, "offloaded": f"{BF16},offload.activations=1", "two": f"dp=2,{BF16}"}
NAMES = {"one": "one GPU", "offloaded": "activations offloaded"}
_MOVED = {*COPIES, ActivityKind.NCCL}

#: A Llama of 1.2 billion parameters, 4 rows of 4096 tokens: what `train_job.py` trains and `single_gpu.py` times.
LARGE = Settings(
    vocabulary=128_256,
    width=2048,
    num_layers=16,
    length=4096,
    attention=Heads(num_heads=32, num_kv_heads=8, head_dim=64),
    mlp=Mlp(width=8192),
    tied=True,
)
MIDDLE = Settings(
    vocabulary=8000,
    width=768,
    num_layers=6,
    length=1024,
    attention=Heads(num_heads=6, num_kv_heads=6, head_dim=128),
    mlp=Mlp(width=2048),
)
SMALL = Settings(
    vocabulary=64,
    width=32,
    num_layers=2,
    length=32,
    attention=Heads(num_heads=4, num_kv_heads=4, head_dim=8),
    mlp=Mlp(width=64),
)


def make_engine(settings: Settings, plan: str, rows: int, **options: Any) -> tuple[Engine, dict[str, Tensor]]:
    """An engine, and a batch on the host, pinned where there is a GPU."""
    torch.manual_seed(0)
    with _device():
        module = Transformer(settings)
    with torch.no_grad():
        for each in module.parameters():
            each.normal_(0, 0.02) if each.dim() > 1 else each.fill_(1)
    ids = torch.randint(0, settings.vocabulary, (rows, settings.length + 1))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    if torch.cuda.is_available():
        batch = {name: each.pin_memory() for name, each in batch.items()}
    engine = parallelize(
        module.to(_device()),
        plan,
        loss=next_token_loss,
        optimizer=partial(AdamW, lr=1e-4, fused=torch.cuda.is_available()),
        example=on_gpu(batch),
        **options,
    )
    return engine, batch


def on_gpu(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    device = _device()
    return {name: each.to(device, non_blocking=True) for name, each in batch.items()}


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@cache
def _others() -> dist.ProcessGroup | None:
    """All ranks, over gloo: what they agree on is nothing that a GPU does."""
    return dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None


def _together() -> None:
    """All ranks begin a step at once, with nothing under way."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if _others() is not None:
        dist.barrier(group=_others())


def plain(engine: Engine, batch: Mapping[str, Tensor]) -> float:
    """Seconds of a step without a look, by a clock around it."""
    _together()
    start = perf_counter()
    engine.train_step(on_gpu(batch))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return perf_counter() - start


def looked(engine: Engine, batch: Mapping[str, Tensor]) -> tuple[float, Trace, StreamCollector | None]:
    """The same with a look: the seconds are of the step alone."""
    streams = StreamCollector(_device()) if torch.cuda.is_available() else None
    if streams is not None:
        streams.start()
    _together()
    start = perf_counter()
    engine.train_step(on_gpu(batch), trace=True, data_wait=perf_counter() - start, streams=streams)
    end = perf_counter() if streams is None else streams.ended
    trace = engine.trace
    assert trace is not None, "it was recorded"
    return end - start, trace, streams


def moved_by_trace(trace: Trace, rank: int) -> dict[str, float]:
    """Seconds of NCCL and of copies by direction, of one rank."""
    sums: dict[str, float] = {}
    for each in trace.activities_of_ranks[rank]:
        if each.kind in _MOVED:
            sums[each.kind] = sums.get(each.kind, 0.0) + each.seconds
    return sums


def moved_by_torch(events: Any) -> dict[str, float]:
    """The same from the events of a profiler of torch's."""
    sums: dict[str, float] = {}
    for each in events:
        kind = kind_of(each.name)
        if each.device_type == torch.profiler.DeviceType.CUDA and kind in _MOVED:
            sums[kind] = sums.get(kind, 0.0) + each.time_range.elapsed_us() / 1e6
    return sums


def by_torch_alone(engine: Engine, batch: Mapping[str, Tensor]) -> dict[str, float]:
    """A step that torch's own profiler sees, and nothing of ours."""
    if not torch.cuda.is_available():
        plain(engine, batch)
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        plain(engine, batch)
    return moved_by_torch(profiler.events() or ())


def off(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """By how much sums differ, as shares of theirs."""
    return {kind: ours.get(kind, 0.0) / theirs[kind] - 1 for kind in theirs if theirs[kind] > 0}


def measure(settings: Settings, plan: str, rows: int, num_steps: int, compile: bool) -> dict[str, Any]:
    """Everything but what is exposed, of one plan on this rank."""
    engine, batch = make_engine(settings, plan, rows, compile=compile)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for _ in range(3):
        plain(engine, batch)
    before = [plain(engine, batch) for _ in range(num_steps)]
    looked(engine, batch)  # The first starts CUPTI.
    without, with_look, parts, same, ours, theirs, costs = [], [], [], [], [], [], []
    for _ in range(num_steps):
        without.append(plain(engine, batch))
        seconds, trace, streams = looked(engine, batch)
        with_look.append(seconds)
        parts.append(abs(sum(parts_of_ranks(trace)[rank].values()) / seconds - 1))
        ours.append(moved_by_trace(trace, rank))
        if streams is not None:
            costs.append(streams.cost_seconds)
            same.append(off(ours[-1], moved_by_torch(streams.profiler.profile.function_events)))
        theirs.append(by_torch_alone(engine, batch))
    engine.close()
    kinds = sorted({kind for each in theirs for kind in each})
    middle = [{kind: median(each.get(kind, 0.0) for each in some) for kind in kinds} for some in (ours, theirs)]
    last = parts_of_ranks(trace)[rank]
    return {
        "step_seconds": median(without),
        "looked_seconds": median(with_look),
        "cost": median(with_look) / median(without) - 1,
        "cost_of_pairs": median(one / other for one, other in zip(with_look, without, strict=True)) - 1,
        "after_first_look": median(without) / median(before) - 1,
        "beside_step_seconds": median(costs) if costs else 0.0,
        "parts_off": max(parts),
        "sums_off_same_capture": {kind: max(abs(each.get(kind, 0.0)) for each in same) for kind in kinds},
        "sums_off_other_steps": off(*middle),
        "sums_seconds": middle[0],
        "parts": {part: seconds for part, seconds in last.items() if seconds > 0},
        "streams": [
            {"stream": use.stream, "role": use.role, "seconds": use.seconds, "idle": use.idle_seconds}
            for use in streams_of_ranks(trace)[rank]
        ],
        "num_activities": len(trace.activities_of_ranks[rank]),
    }


@contextmanager
def nothing_summed() -> Iterator[None]:
    """Steps in which replicas sum nothing: each asks, and nothing is sent."""

    def nothing(*_: Any, **__: Any) -> Callable[[], None]:
        return lambda: None

    kept = BackendExchange._start_all, BackendExchange._start_shards
    BackendExchange._start_all = BackendExchange._start_shards = nothing  # type: ignore[method-assign]
    try:
        yield
    finally:
        BackendExchange._start_all, BackendExchange._start_shards = kept  # type: ignore[method-assign]


def exposed_in(trace: Trace) -> float:
    """Seconds, on average over ranks, in which only the sum of gradients moved."""
    found = [
        sum(each.seconds for each in rank if each.part is Part.EXPOSED and each.on == SUM) for rank in stretches(trace)
    ]
    return sum(found) / len(found)


def measure_exposed(settings: Settings, rows: int, num_steps: int, bucket_bytes: int | None) -> dict[str, Any]:
    """Steps with and without the sum in turn, on each of the ranks."""
    engine, batch = make_engine(settings, CASES["two"], rows, bucket_bytes=bucket_bytes)
    for _ in range(3):
        plain(engine, batch)
    looked(engine, batch)
    with_sum, without_sum, traced, computed = [], [], [], []
    for _ in range(num_steps):
        with_sum.append(plain(engine, batch))
        _, trace, _ = looked(engine, batch)
        traced.append(exposed_in(trace))
        with nothing_summed():
            without_sum.append(plain(engine, batch))
            _, bare, _ = looked(engine, batch)
        pair = [sum(rank[Part.COMPUTE] for rank in parts_of_ranks(each)) / 2 for each in (trace, bare)]
        computed.append(pair[0] - pair[1])
    engine.close()
    parts = parts_of_ranks(trace)[dist.get_rank()]
    return {
        "with": with_sum,
        "without": without_sum,
        "traced": traced,
        "compute_longer": computed,
        "parts": {part: seconds for part, seconds in parts.items() if seconds > 0},
    }


def exposed_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What both ways say. A step is as long as it is on the slower rank."""
    with_sum, without = (
        median(max(pair) for pair in zip(*(rank[key] for rank in ranks), strict=True)) for key in ("with", "without")
    )
    by_trace = median(ranks[0]["traced"])
    by_runs = with_sum - without
    return {
        "step_seconds": with_sum,
        "step_without_sum_seconds": without,
        "exposed_by_runs_seconds": by_runs,
        "exposed_by_trace_seconds": by_trace,
        "off": by_trace / by_runs - 1 if by_runs > 0 else None,
        "compute_longer_beside_sum_seconds": median(ranks[0]["compute_longer"]),
        "parts": ranks[0]["parts"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of each kind (10)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"which of them ({','.join(CASES)})")
    parser.add_argument("--try-on-cpu", action="store_true", help="the same steps on processors, and no result is kept")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.try_on_cpu:
        print("error: traces of GPUs are measured on a GPU, and torch sees none here", file=sys.stderr)
        print("  try: python benchmarks/gpu_traces.py --try-on-cpu --steps 1", file=sys.stderr)
        return 1
    large, middle = (SMALL, SMALL) if arguments.try_on_cpu else (LARGE, MIDDLE)
    gpus: Gpus = "none" if arguments.try_on_cpu else "shared"
    is_met = True
    for case in arguments.cases.split(","):
        with Ranks(2 if case == "two" else 1, gpus=gpus) as ranks:
            if case == "two":
                found = two_ranks(ranks, middle, arguments.steps)
            else:
                told = ranks.run(measure, large, CASES[case], 4, arguments.steps, not arguments.try_on_cpu)[0]
                _tell(NAMES[case], told)
                found = {NAMES[case]: told}
        is_met = is_met and all(_is_met(found))
        if not arguments.try_on_cpu:
            found["most"] = {"parts": MOST_PARTS, "sums": MOST_SUMS, "cost": MOST_COST, "exposed": MOST_EXPOSED}
            found["device"] = torch.cuda.get_device_name()
            record("gpu_traces", kept("gpu_traces") | found)
    return 0 if arguments.try_on_cpu else int(not is_met)


def two_ranks(ranks: Ranks, settings: Settings, num_steps: int) -> dict[str, Any]:
    """What both say that share a GPU, and what is exposed of their sums."""
    found = {SHARING: ranks.run(measure, settings, CASES["two"], 64, num_steps, False)[0]}
    _tell(SHARING, found[SHARING])
    for name, size in (("one bucket", 2**34), ("usual buckets", None)):
        told = found[f"exposed, {name}"] = exposed_of(ranks.run(measure_exposed, settings, 64, num_steps, size))
        by_trace, by_runs = told["exposed_by_trace_seconds"], told["exposed_by_runs_seconds"]
        print(f"exposed, {name}: {by_trace:.4f} s by the trace, {by_runs:.4f} s by runs", flush=True)
    return found


def _tell(name: str, found: Mapping[str, Any]) -> None:
    print(
        f"{name}: a step of {found['step_seconds']:.4f} s, {found['num_activities']} activities\n"
        f"    parts off by {found['parts_off']:.3%}; a look costs {found['cost']:.2%} ({found['cost_of_pairs']:.2%} by "
        f"pairs) and {found['beside_step_seconds']:.2f} s beside it; steps after it {found['after_first_look']:+.2%}\n"
        f"    off from torch {found['sums_off_same_capture']}, in other steps {found['sums_off_other_steps']}",
        flush=True,
    )


def _is_met(found: Mapping[str, Any]) -> Iterator[bool]:
    for name, each in found.items():
        if "parts_off" in each:
            yield each["parts_off"] <= MOST_PARTS
            yield all(share <= MOST_SUMS for share in each["sums_off_same_capture"].values())
            if name != SHARING:
                yield each["cost"] <= MOST_COST
        elif name.startswith("exposed"):
            yield each["off"] is not None and abs(each["off"]) <= MOST_EXPOSED


if __name__ == "__main__":
    sys.exit(main())
