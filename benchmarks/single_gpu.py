"""A Llama of 1.2 billion parameters on one GPU: ours, transformers' through `parallelize`, Liger, a compiled sketch.

    python -m benchmarks.single_gpu --save single_gpu.json [--liger liger_kernel.whl] [--who ours,unmodified,liger]
    python -m benchmarks.single_gpu --save single_gpu_fp8.json --who ours,sketch --precision fp8

`unmodified` is LlamaForCausalLM as it is, with labels, its blocks compiled and not; Liger patches the same model.
bf16 weights, fused AdamW, 4 x 4096 and 16 x 4096 tokens a step; `packed` is ours on rows of 8192, unpacked, and packed
with documents of 600 tokens on average; `selective` is ours with recompute=selective. Each runs in a process of its
own. MFU counts 6 FLOPs a weight a token and causal attention at half, against 989.5 TFLOP/s, in fp8 too. Memory is the
peak of what torch has allocated. With `--precision fp8` (or fp8-rows, of ours alone) linear layers multiply in 8 bits,
the head does not.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from shardwise import environment

VOCABULARY, WIDTH, LAYERS, HEADS, KEY_HEADS, DIM, INNER = 128_256, 2048, 16, 32, 8, 64, 8192
PEAK = 989.5e12
SIZES = ((4, 4096), (16, 4096))
WARM, STEPS = 4, 8
ADAMW = partial(AdamW, lr=1e-5, fused=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, default=Path(__file__).parent / "results" / "single_gpu.json")
    parser.add_argument("--liger", type=Path)
    parser.add_argument("--who", default="ours,unmodified,liger,sketch,packed,selective")
    parser.add_argument("--precision", choices=("bf16", "fp8", "fp8-rows"), default="bf16")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("one GPU is measured, and torch sees none")
        return
    if given.one is not None:
        by_name = {
            "ours": ours, "unmodified": unmodified, "liger": liger, "sketch": sketch, "packed": packed,
            "selective": selective,
        }  # fmt: skip
        with_precision = partial(by_name[given.one], given.precision) if given.one in ("ours", "sketch") else None
        (with_precision or by_name[given.one])()
        return
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "precision": given.precision,
        "versions": environment.versions_of(["torch", "triton", "transformers"]),
        "cases": {},
    }
    extra = ""
    if given.liger is not None:
        extra = tempfile.mkdtemp()
        zipfile.ZipFile(given.liger).extractall(extra)
    for who in given.who.split(","):
        results["cases"][who] = run_one(who, extra, given.precision)
        given.save.parent.mkdir(parents=True, exist_ok=True)
        given.save.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def run_one(who: str, extra: str, precision: str) -> Any:
    paths = [*sys.path, extra] if extra else sys.path
    variables = {**environment.all_variables(), "PYTHONPATH": ":".join(each for each in paths if each)}
    process = subprocess.Popen(
        [sys.executable, __file__, "--one", who, "--precision", precision],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found: dict[str, Any] = {}
    lines: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("{"):
            found.update(json.loads(line))
            print(f"{who:8s} {line.strip()}", flush=True)
    if process.wait():
        print("".join(lines[-25:]), flush=True)
        found["failed"] = lines[-1].strip() if lines else "no output"
    return found


def tokens_of(rows: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    ids = torch.randint(VOCABULARY, (rows, length + 1), device="cuda", generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def measure(name: str, step: Callable[[], Any], rows: int, length: int, parameters: int) -> None:
    """Print tokens a second, MFU and GiB of a step, as one line of JSON."""
    begun = perf_counter()
    for _ in range(WARM):
        loss = step()
    torch.cuda.synchronize()
    warm = perf_counter() - begun
    torch.cuda.reset_peak_memory_stats()
    begun = perf_counter()
    for _ in range(STEPS):
        loss = step()
    torch.cuda.synchronize()
    seconds = (perf_counter() - begun) / STEPS
    speed = rows * length / seconds
    flops = 6 * parameters + 6 * LAYERS * WIDTH * length
    numbers = {
        "tokens_per_second": round(speed),
        "mfu": round(speed * flops / PEAK, 4),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "loss": round(float(loss), 4),
        "warm_seconds": round(warm, 1),
    }
    if name == "packed":
        del numbers["mfu"]  # Attention between documents is not computed, and MFU would count it.
    print(json.dumps({name: numbers}), flush=True)


def make_ours(length: int) -> Any:
    from shardwise.nets.settings import Heads, Mlp, Settings
    from shardwise.nets.transformer import Transformer

    torch.manual_seed(0)
    settings = Settings(
        vocabulary=VOCABULARY,
        width=WIDTH,
        num_layers=LAYERS,
        length=length,
        attention=Heads(num_heads=HEADS, num_kv_heads=KEY_HEADS, head_dim=DIM),
        mlp=Mlp(width=INNER),
        tied=True,
    )
    with torch.device("cuda"):
        module = Transformer(settings)
    for each in module.parameters():
        torch.nn.init.normal_(each, std=0.02) if each.dim() > 1 else None
    return module.to(torch.bfloat16)


def run_ours(
    name: str, rows: int, length: int, batch: dict[str, Tensor], precision: str = "bf16", recompute: str = "none"
) -> None:
    import shardwise as sw
    from shardwise.nets.loss import next_token_loss

    module = make_ours(length)
    parameters = sum(each.numel() for each in module.parameters())
    # Weights of 16 bits without masters, as the others have them.
    engine = sw.parallelize(
        module, f"precision={precision},recompute={recompute}", loss=next_token_loss, optimizer=ADAMW, example=batch,
        compile=True, masters=False,
    )  # fmt: skip
    under_way: list[Any] = []

    def step() -> float:
        """Launch one, and read the one before it, as `shardwise train` does."""
        under_way.append(engine.launch_step(batch))
        return float(under_way.pop(0).read().loss) if len(under_way) > 1 else 0.0

    measure(name, step, rows, length, parameters)


def clear() -> None:
    """An engine and its module know each other: what is left of them would count as the next one's memory."""
    gc.collect()
    torch.compiler.reset()
    torch.cuda.empty_cache()


def ours(precision: str) -> None:
    for rows, length in SIZES:
        run_ours(f"{rows}x{length}", rows, length, tokens_of(rows, length), precision)
        clear()


def selective() -> None:
    """What recomputing all but products and attention costs, and what of the memory is left."""
    for rows, length in SIZES:
        run_ours(f"{rows}x{length}", rows, length, tokens_of(rows, length), recompute="selective")
        clear()


def packed() -> None:
    rows, length = 2, 8192
    batch = tokens_of(rows, length)
    run_ours("unpacked", rows, length, batch)
    clear()
    documents = (torch.rand(rows, length, device="cuda") < 1 / 600).cumsum(1)
    run_ours("packed", rows, length, {**batch, "documents": documents})


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=DIM,
        intermediate_size=INNER,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        return LlamaForCausalLM(config).to(torch.bfloat16).train()


def unmodified() -> None:
    """The model that Liger patches, as it is: the same labels, and its own loss."""
    for compile in (False, True):
        for rows, length in SIZES:
            name = f"{rows}x{length}" + (" compiled" if compile else "")
            run_unmodified(name, rows, length, compile=compile)
            clear()


def run_unmodified(name: str, rows: int, length: int, *, compile: bool) -> None:
    import shardwise as sw

    ids = tokens_of(rows, length)["input_ids"]
    batch = {"input_ids": ids, "labels": ids}
    module = make_llama()
    parameters = sum(each.numel() for each in module.parameters())
    engine = sw.parallelize(
        module, "dp=1", loss=lambda output, _: output.loss, optimizer=ADAMW, example=batch, compile=compile
    )
    print(engine.explain(), flush=True)
    measure(name, lambda: engine.train_step(batch), rows, length, parameters)


def liger() -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama()
    model = make_llama()
    optimizer = ADAMW(model.parameters())
    parameters = sum(each.numel() for each in model.parameters())
    for rows, length in SIZES:
        batch = tokens_of(rows, length)

        def step(batch: dict[str, Tensor] = batch) -> Tensor:
            loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        measure(f"{rows}x{length}", step, rows, length, parameters)
        torch.cuda.empty_cache()


def sketch(precision: str) -> None:
    """What somebody writes who wants speed and nothing else, in plain torch."""
    model, step_on = make_sketch(precision)
    parameters = sum(each.numel() for each in model.parameters())
    for rows, length in SIZES:
        measure(f"{rows}x{length}", partial(step_on, tokens_of(rows, length)), rows, length, parameters)
        torch.cuda.empty_cache()


def make_sketch(precision: str) -> tuple[torch.nn.Module, Callable[[dict[str, Tensor]], Tensor]]:
    """The model, and a step of it on a batch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.checkpoint import checkpoint

    sys.path.insert(0, str(Path(__file__).parent))
    from single_gpu_sketch import Sketch, in_fp8

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Sketch(VOCABULARY, WIDTH, LAYERS, HEADS, KEY_HEADS, DIM, INNER).to(torch.bfloat16)
    if precision == "fp8":
        in_fp8(model)
    optimizer = ADAMW(model.parameters())
    for layer in model.layers:
        layer.compile(dynamic=False)
    torch.backends.cuda.enable_flash_sdp(False)

    @torch.compile(dynamic=False)
    def part_of_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels, reduction="sum")

    def step(batch: dict[str, Tensor]) -> Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            hidden = model(batch["input_ids"]).flatten(0, 1)
            weight, labels = model.embed.weight, batch["labels"].flatten()
            parts = [
                checkpoint(part_of_loss, *each, use_reentrant=False)
                for each in zip(hidden.split(2048), [weight] * len(labels), labels.split(2048), strict=False)
            ]
            loss = torch.stack(parts).sum() / labels.numel()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


if __name__ == "__main__":
    main()
