"""Where a step of a Llama of 1.2 billion parameters goes on one GPU: kernels by family, and gaps by their cause.

    python -m benchmarks.step_profile --who ours,eager,sketch,parts [--save step_profile.json]

`ours` is the model of `single_gpu.py`, blocks compiled, `eager` the same without a compiler, and `graph` its step
captured; `sketch` is the plain compiled model. Each runs in a process of its own: steps are timed first without a
profiler, each waited for and launched ahead, then a few are looked at by the device's profiler alone. A gap is time in
which no kernel and no copy runs. It is

    waited      the host had waited for the device, and launched nothing meanwhile
    late        the host launched the next kernel after the gap had begun: it was busy with something else
    device      the next kernel was there, and the device took that long to begin it

`parts` times products and attention of such a layer alone, as they are and as they might be: q, k and v in one
product, gate and up in one, each of torch's attention kernels. `small` is a model that is bound by launches.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parent))
import single_gpu as one

from shardwise.execution.collector import DeviceEvent, device_events
from shardwise.torch_private import DeviceProfiler

ROWS, LENGTH, WARM, STEPS, LOOKED_AT = 4, 4096, 4, 8, 3
#: A kernel belongs to the first family of which it has a mark. The last takes what is left.
FAMILIES = (
    ("attention", ("sdpa", "flash", "fmha", "attention")),
    ("optimizer", ("adam", "multi_tensor_apply")),
    ("products", ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "_mm_")),
    ("head's loss", ("_stats", "_gradient", "_label", "cross_entropy", "_scale")),
    ("compiled", ("triton_",)),
    ("copies and sets", ("memcpy", "memset", "copy_kernel", "fill")),
    ("norms, rotary, gates", ("norm", "rotat", "gated")),
    ("other", ("",)),
)
#: Shorter ones are how kernels follow each other.
SHORTEST_GAP = 2e-6
WAITS = ("synchronize", "cudaMemcpyAsync", "cudaEventQuery")


class Gap(NamedTuple):
    """Seconds in which a device did nothing, why, and between which families."""

    seconds: float
    cause: str
    between: str


def family_of(name: str) -> str:
    lower = name.lower()
    return next(family for family, marks in FAMILIES if any(mark in lower for mark in marks))


def gaps_of(seen: Sequence[DeviceEvent]) -> Iterator[Gap]:
    """What is between kernels and copies, of whatever stream."""
    ran = sorted((each for each in seen if each.stream is not None), key=lambda each: each.start)
    calls = sorted((each for each in seen if each.stream is None), key=lambda each: each.start)
    launched = {each.correlation: each for each in calls if each.correlation}
    waits = [each for each in calls if any(mark.lower() in each.name.lower() for mark in WAITS)]
    end, before = ran[0].start, "the beginning"
    for each in ran:
        if each.start - end > SHORTEST_GAP * 1e9:
            call = launched.get(each.correlation)
            if call is None or call.start <= end:
                cause = "device"
            elif any(wait.start < end < wait.end <= call.start for wait in waits):
                cause = "waited"
            else:
                cause = "late"
            yield Gap((each.start - end) / 1e9, cause, f"{before} -> {family_of(each.name)}")
        if each.end > end:
            end, before = each.end, family_of(each.name)


def report(name: str, steps: dict[str, Callable[[], Any]], tokens: int) -> None:
    """Time each way of stepping, look at the last of them, and print one line of JSON."""
    for _ in range(WARM):
        for step in steps.values():
            step()
    found: dict[str, Any] = {}
    for way, step in steps.items():
        seconds = timed(step)
        found[f"{way}_ms"], found[f"{way}_tokens_per_second"] = round(seconds * 1e3, 2), round(tokens / seconds)
    found["clock_mhz_and_watts"] = clocks(step)
    # The first look of a process starts what looks.
    for _ in range(2):
        torch.cuda.synchronize()
        profiler = DeviceProfiler()
        profiler.start()
        for _ in range(LOOKED_AT):
            step()
        torch.cuda.synchronize()
        seen = device_events(profiler.stop())
    print(json.dumps({name: {**found, **table_of(seen)}}), flush=True)


def table_of(seen: Sequence[DeviceEvent]) -> dict[str, Any]:
    """Milliseconds a step."""
    ran = [each for each in seen if each.stream is not None]
    whole = max(each.end for each in ran) - min(each.start for each in ran)
    families, kernels = Counter[str](), Counter[str]()
    counts = Counter(each.name for each in ran)
    for each in ran:
        families[family_of(each.name)] += each.end - each.start
        kernels[each.name] += each.end - each.start
    gaps = list(gaps_of(seen))
    causes, between = Counter[str](), Counter[str]()
    for gap in gaps:
        causes[gap.cause] += round(gap.seconds * 1e9)
        between[f"{gap.cause}: {gap.between}"] += round(gap.seconds * 1e9)

    def ms(nanoseconds: float) -> float:
        return round(nanoseconds / 1e6 / LOOKED_AT, 3)

    return {
        "looked_at_ms": ms(whole),
        "kernels_ms": ms(sum(families.values())),
        "kernels": len(ran) // LOOKED_AT,
        "families_ms": {name: ms(total) for name, total in families.most_common()},
        "gaps_ms": {name: ms(total) for name, total in causes.most_common()},
        "gaps_between_ms": {name: ms(total) for name, total in between.most_common(8)},
        "longest_ms": {
            f"{name[:90]} x{counts[name] // LOOKED_AT}": ms(total) for name, total in kernels.most_common(24)
        },
    }


def timed(step: Callable[[], Any]) -> float:
    """Seconds of a step among others: the median of three runs."""
    runs = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = perf_counter()
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
        runs.append((perf_counter() - begun) / STEPS)
    return median(runs)


def clocks(step: Callable[[], Any]) -> list[str]:
    """What the card says of itself while it steps: nothing is set."""
    for _ in range(STEPS):
        step()
    asked = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw,clocks_throttle_reasons.active", "--format=csv,noheader"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    torch.cuda.synchronize()
    return told.split(", ")


def ours(*, compile: bool, **options: Any) -> None:
    import shardwise as sw
    from shardwise.nets.loss import next_token_loss

    module, batch = one.make_ours(LENGTH), one.tokens_of(ROWS, LENGTH)
    engine = sw.parallelize(
        module, "precision=bf16", loss=next_token_loss, optimizer=one.ADAMW, example=batch, compile=compile,
        masters=False, **options,
    )  # fmt: skip
    ways = {"waited": lambda: engine.train_step(batch), "launched": lambda: engine.launch_step(batch)}
    name = "ours" if compile else "eager"
    report("graph" if options else name, ways, ROWS * LENGTH)


def sketch() -> None:
    """The compiled sketch, whose loss nobody reads."""
    _, step_on = one.make_sketch("bf16")
    batch = one.tokens_of(ROWS, LENGTH)
    report("sketch", {"launched": lambda: step_on(batch)}, ROWS * LENGTH)


def small() -> None:
    """A model bound by launches, 12 layers of 128 on 4 x 64 tokens: ours with and without kernels, captured, compiled,
    and plain torch by hand. Milliseconds of a step, launched ahead."""
    import shardwise as sw
    from shardwise.nets.loss import next_token_loss
    from shardwise.nets.settings import Heads, Mlp, Settings
    from shardwise.nets.transformer import Transformer

    settings = Settings(
        vocabulary=512, width=128, num_layers=12, length=64, mlp=Mlp(width=256),
        attention=Heads(num_heads=4, num_kv_heads=2, head_dim=32),
    )  # fmt: skip
    ids = torch.randint(512, (4, 65), device="cuda")
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def a_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return Transformer(settings).cuda().to(torch.bfloat16)

    found = {}
    cases: dict[str, dict[str, Any]] = {
        "kernels": {}, "plain operators": {"kernels": False}, "captured": {"graphs": True},
        "compiled": {"compile": True},
    }  # fmt: skip
    for name, options in cases.items():
        engine = sw.parallelize(
            a_model(), "precision=bf16", loss=next_token_loss, optimizer=one.ADAMW, example=batch, masters=False,
            **options,
        )  # fmt: skip
        found[name] = small_ms(lambda engine=engine: engine.launch_step(batch))
    model = a_model()
    optimizer = one.ADAMW(model.parameters())

    def by_hand() -> None:
        total, count = next_token_loss(model(batch["input_ids"]), batch)
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()

    found["by hand"] = small_ms(by_hand)
    print(json.dumps({"small_ms": found}), flush=True)


def small_ms(step: Callable[[], Any]) -> float:
    for _ in range(6):
        step()
    return round(timed(step) * 1e3, 2)


def parts() -> None:
    """Products and attention of a layer alone, in microseconds: forward, then backward."""
    from triton.testing import do_bench

    tokens, width, inner = ROWS * LENGTH, one.WIDTH, one.INNER
    keys = one.KEY_HEADS * one.DIM

    def us(run: Callable[[], Any]) -> float:
        return round(do_bench(run, warmup=20, rep=60, return_mode="median") * 1e3, 1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def product(given: int, made: int) -> list[float]:
        """x W^T; then dy W, and dy^T x."""
        x, weight, dy = random(tokens, given), random(made, given), random(tokens, made)
        return [us(lambda: x @ weight.t()), us(lambda: dy @ weight), us(lambda: dy.t() @ x)]

    found: dict[str, Any] = {
        name: product(given, made)
        for name, given, made in (
            ("q or out", width, width), ("k or v", width, keys), ("qkv", width, width + 2 * keys),
            ("gate or up", width, inner), ("gate and up", width, 2 * inner), ("down", inner, width),
        )
    }  # fmt: skip
    x, weight, out = random(1024, width), random(one.VOCABULARY, width), random(1024, one.VOCABULARY)
    large = random(one.VOCABULARY, width)
    for chunk in (1024, 2048, 4096):
        x, out = random(chunk, width), random(chunk, one.VOCABULARY)
        found[f"head, {chunk} tokens"] = [
            us(lambda x=x, out=out: torch.mm(x, weight.t(), out=out)),
            us(lambda out=out: out @ weight),
            us(lambda x=x, out=out: large.addmm_(out.t(), x)),
        ]
    print(json.dumps({"products_us": found}), flush=True)
    print(json.dumps({"attention_us": attentions(us, random)}), flush=True)


def attentions(us: Callable[[Callable[[], Any]], float], random: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """Each of torch's kernels on queries and keys as a layer has them: tokens before heads in memory."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as attend

    found: dict[str, Any] = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        for layout in ("tokens first", "heads first", "parts of one product"):
            q, k, v = heads(layout, random)
            name = f"{backend.name.lower()}, {layout}"
            try:
                with sdpa_kernel([backend]):
                    made = attend(q, k, v, is_causal=True, enable_gqa=True)
                    dy = torch.randn_like(made)
                    forward = us(lambda q=q, k=k, v=v: attend(q, k, v, is_causal=True, enable_gqa=True))
                backward = us(
                    lambda made=made, q=q, k=k, v=v, dy=dy: torch.autograd.grad(made, (q, k, v), dy, retain_graph=True)
                )
                found[name] = [forward, backward]
            except RuntimeError as error:
                found[name] = str(error).splitlines()[0]
    return found


def heads(layout: str, random: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
    counts = (one.HEADS, one.KEY_HEADS, one.KEY_HEADS)
    if layout == "parts of one product":
        whole = random(ROWS, LENGTH, sum(counts) * one.DIM)
        made = [each.unflatten(-1, (-1, one.DIM)) for each in whole.split([count * one.DIM for count in counts], -1)]
        return tuple(each.transpose(1, 2).detach().requires_grad_() for each in made)
    if layout == "tokens first":
        return tuple(random(ROWS, LENGTH, count, one.DIM).transpose(1, 2).requires_grad_() for count in counts)
    return tuple(random(ROWS, count, LENGTH, one.DIM).requires_grad_() for count in counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--who", default="ours,eager,sketch,parts")
    parser.add_argument("--save", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("one GPU is looked at, and torch sees none")
        return
    if given.one is not None:
        cases: dict[str, Callable[[], None]] = {
            "ours": lambda: ours(compile=True), "eager": lambda: ours(compile=False),
            "graph": lambda: ours(compile=True, graphs=True), "sketch": sketch, "parts": parts,
            "small": small,
        }  # fmt: skip
        cases[given.one]()
        return
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    for who in given.who.split(","):
        lines = subprocess.run(
            [sys.executable, __file__, "--one", who], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        ).stdout.splitlines()  # fmt: skip
        told = [json.loads(line) for line in lines if line.startswith("{")]
        for each in told:
            results.update(each)
            print(json.dumps(each, indent=1), flush=True)
        if not told:
            print("\n".join([f"{who} has failed:", *lines[-25:]]), flush=True)
        if given.save is not None:
            given.save.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
