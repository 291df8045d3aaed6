"""`shardwise train` end to end against the bare step of plain torch: a Llama-1B, 4 rows of 4096 tokens, on one GPU.

    bare          the plain module, blocks and loss compiled, autocast to bf16, fused AdamW, clipped; one batch that
                  lies on the GPU, nothing read, nothing written
    engine        the same module in `parallelize`, steps launched and not waited for
    engine, read  the same, each step read before the next (`train_step`)
    train         `shardwise train` as a user types it: data from a file, a log, a trace every tenth step, a checkpoint
                  (15 GB) in the middle; tokens a second over all steps but the first

All in one run, the bare step before and after, for a GPU that has become warm is slower. Then small models in fp32 and
bf16: from which size on the second pays.

    python benchmarks/train_job.py              about 3 minutes on an H200
    python benchmarks/train_job.py --quick      a tiny model, on any machine: that it runs, not how fast
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from record import kept, record
from torch import Tensor, nn

from shardwise.cluster.catalogue import DEVICES
from shardwise.engine.parallelize import parallelize
from shardwise.nets.loss import next_token_loss
from shardwise.nets.transformer import Transformer
from shardwise.training.data.tokens import TokenWriter
from shardwise.training.device_defaults import flops_of_step
from shardwise.training.machine import find_device
from shardwise.training.make_engine import make_optimizer
from shardwise.training.model import Ours
from shardwise.training.recipe import Recipe

LEAST = 0.97
CLIP = 1.0
#: Llama-3.2-1B, but for what its rotary positions are stretched by.
LLAMA_1B = {
    "model.width": 2048, "model.layers": 16, "model.heads": 32, "model.kv_heads": 8, "model.mlp": 8192,
    "model.tied": True, "batch": 4, "data.sequence": 4096,
}  # fmt: skip
TINY = {"model.width": 64, "model.layers": 2, "model.heads": 2, "batch": 2, "data.sequence": 64}
#: Width, layers, rows and tokens of a row.
SIZES = ((128, 4, 32, 128), (256, 4, 32, 128), (512, 8, 16, 256), (1024, 8, 8, 512))


def make_recipe(folder: Path, *, quick: bool) -> Recipe:
    """What is trained, with its data: random tokens, for which a model is as fast as for any others."""
    vocabulary, num_tokens, steps = (1000, 40_000, 12) if quick else (128_256, 4_000_000, 100)
    path, numbers = folder / "random.tokens", np.random.default_rng(0)
    with TokenWriter(path, vocabulary=vocabulary, tokenizer="none") as writer:
        writer.add(numbers.integers(0, vocabulary, num_tokens).tolist())
    entries = {
        **(TINY if quick else LLAMA_1B), "name": "train_job", "steps": steps, "data.source": str(path),
        "data.masks": False, "checkpoint.every": steps * 6 // 10, "checkpoint.keep": 1, "evaluation.every": 0,
        "evaluation.batches": 1, "evaluation.sample": 0, "optimizer.rate": 1e-4, "optimizer.clip": CLIP,
        "precision": "fp32" if quick else "bf16", "compile": "off" if quick else "on",
    }  # fmt: skip
    return Recipe().changed(entries, source="the benchmark")


class Measured:
    """Steps timed from a device at rest to a device at rest."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.tokens, self.flops = recipe.batch * recipe.data.sequence, flops_of_step(recipe)
        name = find_device(torch.cuda.get_device_name()) if device.type == "cuda" else None
        self.peak = None if name is None else DEVICES[name].peak(recipe.precision)
        self.device = device

    def steps(self, run: Callable[[], object], count: int, *, warm: int) -> dict[str, Any]:
        begin = perf_counter()
        for _ in range(warm):
            run()
        self.finish()
        start = perf_counter()
        for _ in range(count):
            run()
        self.finish()
        return self.told(self.tokens * count / (perf_counter() - start), warm_up_seconds=round(start - begin, 1))

    def told(self, speed: float, **more: Any) -> dict[str, Any]:
        seconds = self.tokens / speed
        mfu = {} if self.peak is None else {"mfu": round(self.flops / seconds / self.peak, 4)}
        return {"tokens_per_second": round(speed, 1), "step_seconds": round(seconds, 5), **mfu, **more}

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def room(device: torch.device) -> Iterator[None]:
    """Afterwards the memory of the GPU is free."""
    yield
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def a_batch(recipe: Recipe, vocabulary: int, device: torch.device) -> dict[str, Tensor]:
    ids = torch.randint(0, vocabulary, (recipe.batch, recipe.data.sequence + 1), device=device)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def a_module(recipe: Recipe, vocabulary: int, device: torch.device) -> nn.Module:
    with torch.device(device):
        module = Transformer(Ours(recipe, vocabulary).settings)
    for each in module.parameters():
        if each.dim() > 1:
            nn.init.normal_(each, std=0.02)
    return module.train()


def bare(recipe: Recipe, vocabulary: int, measured: Measured, count: int) -> dict[str, Any]:
    """The step as one writes it with torch alone."""
    device = measured.device
    module, batch = a_module(recipe, vocabulary, device), a_batch(recipe, vocabulary, device)
    optimizer = make_optimizer(recipe.optimizer, module.parameters())
    loss_of: Any = next_token_loss
    if recipe.compile == "on":
        for layer in module.layers:
            layer.compile()
        loss_of = torch.compile(next_token_loss)

    def run() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
            total, number = loss_of(module(batch["input_ids"]), batch)
        (total / number).backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return {**measured.steps(run, count, warm=4), **_memory(device)}


def engine(recipe: Recipe, vocabulary: int, measured: Measured, count: int) -> dict[str, dict[str, Any]]:
    """The same in an engine: steps that are launched, and steps that are read."""
    device = measured.device
    batch = a_batch(recipe, vocabulary, device)
    loss: Any = torch.compile(next_token_loss) if recipe.compile == "on" else next_token_loss
    made = parallelize(
        a_module(recipe, vocabulary, device),
        f"dp=1,precision={recipe.precision}",
        loss=loss,
        optimizer=lambda parameters: make_optimizer(recipe.optimizer, parameters),
        example=batch,
        clip=CLIP,
        compile=recipe.compile == "on",
    )
    found = {"engine": measured.steps(lambda: made.launch_step(batch), count, warm=4) | _memory(device)}
    found["engine, read"] = measured.steps(lambda: made.train_step(batch), count, warm=1)
    made.close()
    return found


def _memory(device: torch.device) -> dict[str, Any]:
    return {"memory_bytes": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


def train(recipe: Recipe, folder: Path, measured: Measured) -> dict[str, Any]:
    """As a user types it, in a process of its own."""
    path, run = folder / "train_job.toml", folder / "run"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    words = ["train", str(path), "--plan", "dp=1", "--devices", "1", "--folder", str(run), "--json"]
    start = perf_counter()
    done = subprocess.run([sys.executable, "-m", "shardwise", *words], stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    seconds = [row["seconds"] for row in rows if "seconds" in row]
    return measured.told(
        answer["tokens_per_second"],
        seconds_in_all=round(perf_counter() - start, 1),
        first_step_seconds=round(seconds[0], 2),
        median_step_seconds=round(float(np.median(seconds[1:])), 5),
        memory_bytes=answer["memory_bytes"],
        said_mfu=answer["mfu"],
    )


def small_models(device: torch.device) -> list[dict[str, Any]]:
    """Steps of small models in fp32 and in bf16, as they are."""
    found = []
    for width, layers, rows, length in SIZES:
        entries = {
            "model.width": width, "model.layers": layers, "model.heads": width // 64, "batch": rows,
            "data.sequence": length,
        }  # fmt: skip
        row: dict[str, Any] = {"width": width, "layers": layers, "tokens": rows * length}
        for precision in ("fp32", "bf16"):
            recipe = Recipe().changed({**entries, "precision": precision, "compile": "off"}, source="the benchmark")
            with room(device):
                measured = Measured(recipe, device)
                made = engine(recipe, 256, measured, 20)["engine"]
            row |= {"gflop": round(measured.flops / 1e9, 1), f"{precision}_seconds": made["step_seconds"]}
        found.append(row)
        print(f"  {row['gflop']:8.1f} GFLOP a step: fp32 {row['fp32_seconds']:.5f} s, bf16 {row['bf16_seconds']:.5f} s")
    return found


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, and nothing is kept")
    parser.add_argument("--large", action="store_true", help="without small models: those stay as they were recorded")
    parser.add_argument("--folder", help="where data and checkpoints go meanwhile: 35 GB")
    arguments = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.quick:
        print("no GPU was found; try: python benchmarks/train_job.py --quick", file=sys.stderr)
        return 1
    count = 3 if arguments.quick else 25
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        folder = Path(temporary)
        recipe = make_recipe(folder, quick=arguments.quick)
        vocabulary, measured = 1000 if arguments.quick else 128_256, Measured(recipe, device)
        results: dict[str, Any] = {}
        with room(device):
            results["bare"] = told("bare", bare(recipe, vocabulary, measured, count))
        with room(device):
            for name, each in engine(recipe, vocabulary, measured, count).items():
                results[name] = told(name, each)
        results["train"] = told("train", train(recipe, folder, measured))
        with room(device):
            results["bare, again"] = told("bare, again", bare(recipe, vocabulary, measured, count))
    plain = (results["bare"]["tokens_per_second"] + results["bare, again"]["tokens_per_second"]) / 2
    for name in ("engine", "engine, read", "train"):
        share = results[name]["tokens_per_second"] / plain
        results[name]["of_bare"] = round(share, 4)
        print(f"{name}: {share:.2%} of the bare step")
    if arguments.quick:
        return 0
    results["small models"] = kept("train_job")["small models"] if arguments.large else small_models(device)
    record("train_job", {"gpu": torch.cuda.get_device_name(), **results})
    return 0 if results["train"]["of_bare"] >= LEAST else 1


def told(name: str, result: dict[str, Any]) -> dict[str, Any]:
    print(f"{name:14} {json.dumps(result)}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
