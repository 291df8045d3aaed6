"""ResNet-50 on one GPU: `shardwise train resnet50` beside torch by hand, both compiled, in channels last and bf16.

    python -m benchmarks.resnet [--batch 256] [--steps 60]

`train` makes random images in a thread, sends them to the GPU as bytes, logs, and saves at its end; its figure is that
of its steps after the first. By hand the same module is compiled whole and steps on images that lie on the GPU. Both
use SGD with momentum, and autocast of fp32 weights. Each runs in a process of its own. Asked is a ratio of at least 1.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from record import record

WARM = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--by-hand", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("one GPU is measured, and torch sees none")
        return
    if given.by_hand:
        print(json.dumps(by_hand(given.batch, given.steps)), flush=True)
        return
    hand = told_by([sys.executable, __file__, "--by-hand", "--batch", str(given.batch), "--steps", str(given.steps)])
    print("by hand", hand, flush=True)
    ours = trained(given.batch, given.steps)
    print("train", ours, flush=True)
    results: dict[str, Any] = {"batch": given.batch, "by_hand": hand, "train": ours}
    if "images_per_second" in hand and "images_per_second" in ours:
        results["ratio"] = round(ours["images_per_second"] / hand["images_per_second"], 3)
        print(f"train over by hand: {results['ratio']} (asked: 1)")
    record("resnet", {"device": torch.cuda.get_device_name(), **results})


def told_by(words: list[str]) -> dict[str, Any]:
    """The last object of JSON that a program prints; or its last lines."""
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    begin = ran.stdout.find("{")
    try:
        found: dict[str, Any] = json.loads(ran.stdout[begin:])
    except json.JSONDecodeError:
        return {"failed": (ran.stdout + ran.stderr)[-2000:]}
    return found


def trained(batch: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        settings = {"batch": batch, "steps": steps, "log": 20, "precision": "bf16", "compile": "on"}
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = [
            sys.executable,
            "-m",
            "shardwise",
            "train",
            "resnet50",
            "--plan",
            "dp=1",
            "--folder",
            f"{folder}/run",
        ]
        found = told_by([*command, *words, "--json"])
    if "tokens_per_second" not in found:
        return {"failed": found}
    kept = {key: found.get(key) for key in ("loss", "mfu", "memory_bytes", "seconds")}
    return {"images_per_second": round(found["tokens_per_second"]), **kept}


def by_hand(batch: int, steps: int) -> dict[str, Any]:
    from shardwise.nets.resnet import class_loss, resnet50

    torch.manual_seed(0)
    model = resnet50()[0].cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)
    compiled = torch.compile(model)
    images = torch.randint(0, 256, (4, batch, 3, 224, 224), dtype=torch.uint8, device="cuda")
    labels = torch.randint(0, 1000, (4, batch), device="cuda")

    def step(number: int) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = compiled(images[number % 4])
            total, count = class_loss(output, {"labels": labels[number % 4]})
        (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        return total.detach() / count

    for number in range(WARM):
        step(number)
    torch.cuda.synchronize()
    begun = perf_counter()
    for number in range(steps):
        loss = step(number)
    torch.cuda.synchronize()
    seconds = (perf_counter() - begun) / steps
    return {"images_per_second": round(batch / seconds), "step_ms": round(seconds * 1e3, 2), "loss": float(loss)}


if __name__ == "__main__":
    main()
