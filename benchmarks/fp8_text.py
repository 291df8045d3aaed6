"""The loss of a training in fp8 beside that in bf16: 300 steps on real text, the same batches, the same first weights.

    python -m benchmarks.fp8_text --save fp8_text.json [--steps 300] [--precisions bf16,fp8,fp8-rows]

Text are the pages and sources of this repository, as bytes. On a GPU: 8 layers of width 1024, 16 rows of 1024 bytes,
blocks compiled. On a processor a small model, and 8-bit products are emulated (`SHARDWISE_EMULATE_FP8=1`). What is
compared is the mean loss of the last 50 steps, and that of text that was not trained on.
"""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

import shardwise as sw
from shardwise import environment
from shardwise.nets.loss import next_token_loss
from shardwise.nets.settings import Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer

ROOT = Path(__file__).parents[1]
LAST = 50
WARM_STEPS, RATE = 30, 6e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--precisions", default="bf16,fp8,fp8-rows")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = read_text().to(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else environment.processor_name()
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": name,
        "versions": environment.versions_of(["torch", "triton"]),
        "bytes": len(text),
        "steps": given.steps,
    }
    for precision in given.precisions.split(","):
        results[precision] = found = train(precision, text, device, given.steps)
        for key in ("loss", "held_out"):
            found[f"{key}_ratio"] = round(found[key] / results["bf16"][key], 5) if "bf16" in results else None
        print(json.dumps({precision: {key: each for key, each in found.items() if key != "losses"}}), flush=True)
        if given.save is not None:
            given.save.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def read_text() -> Tensor:
    """Pages, then sources, in the order of their names."""
    files = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]
    return torch.frombuffer(bytearray(b"".join(each.read_bytes() for each in files)), dtype=torch.uint8).long()


def settings_for(device: torch.device) -> tuple[Settings, int]:
    """The model, and how many rows a batch has."""
    is_gpu = device.type == "cuda"
    width, layers, length, rows = (1024, 8, 1024, 16) if is_gpu else (64, 2, 64, 8)
    heads = Heads(num_heads=width // 64 if is_gpu else 4, num_kv_heads=width // 64 if is_gpu else 4,
                  head_dim=64 if is_gpu else 16)  # fmt: skip
    settings = Settings(
        vocabulary=256, width=width, num_layers=layers, length=length, attention=heads, mlp=Mlp(width=4 * width)
    )
    return settings, rows


def batch_at(text: Tensor, rows: int, length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
    ids = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def train(precision: str, text: Tensor, device: torch.device, steps: int) -> dict[str, Any]:
    settings, rows = settings_for(device)
    torch.manual_seed(0)
    module = Transformer(settings).to(device)
    kept = len(text) // 20
    trained, held_out = text[kept:], batch_at(text[:kept], 4 * rows, settings.length, 0)
    first = batch_at(trained, rows, settings.length, 0)
    with sw.parallelize(
        module, f"precision={precision}", loss=next_token_loss,
        optimizer=lambda parameters: AdamW(parameters, lr=RATE, betas=(0.9, 0.95)), example=first, clip=1.0,
        compile=device.type == "cuda",
    ) as engine:  # fmt: skip
        losses = []
        begun = perf_counter()
        for step in range(steps):
            for group in (group for optimizer in engine.optimizers for group in optimizer.param_groups):
                group["lr"] = RATE * min((step + 1) / WARM_STEPS, 1 - 0.9 * step / steps)
            losses.append(engine.train_step(batch_at(trained, rows, settings.length, step)))
        seconds = perf_counter() - begun
        return {
            "loss": round(mean(losses[-LAST:]), 5),
            "held_out": round(engine.evaluate(held_out), 5),
            "seconds": round(seconds, 1),
            "losses": [round(each, 4) for each in losses],
        }


if __name__ == "__main__":
    main()
