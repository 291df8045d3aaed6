"""How much a training step's speed depends on the numbers that it multiplies, on a GPU at its power limit.

    python -m benchmarks.power                       less than a minute on an H200

The step is that of the compiled sketch in `single_gpu.py` (Llama-1B, bf16, 4 x 4096 tokens): the same kernels on other
numbers. Transistors that do not switch need no power. With weights and tokens that are all alike the clock stays high;
with random ones it falls until the card is within its limit.
"""

import subprocess
import time

import torch
from torch import Tensor

from benchmarks.record import record
from benchmarks.single_gpu import make_sketch, tokens_of

ROWS, LENGTH, WARM, STEPS = 4, 4096, 3, 8


def main() -> None:
    if not torch.cuda.is_available():
        print("one GPU is measured, and torch sees none")
        return
    model, step = make_sketch("bf16")
    random = tokens_of(ROWS, LENGTH)
    results: dict[str, object] = {"device": torch.cuda.get_device_name()}

    def run(name: str, batch: dict[str, Tensor]) -> None:
        for _ in range(WARM):
            step(batch)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(STEPS):
            step(batch)
        clock = _clock_and_power()  # While steps that were launched are still running.
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - begun) / STEPS
        results[name] = {"tokens_per_second": round(ROWS * LENGTH / seconds), "clock_and_power": clock}
        print(f"{name:24} {ROWS * LENGTH / seconds:9,.0f} tokens/s  {clock}", flush=True)

    run("random tokens", random)
    run("one token", {name: torch.full_like(each, 7) for name, each in random.items()})
    run("1,000 words", {name: each % 1000 for name, each in random.items()})
    with torch.no_grad():
        model.get_parameter("embed.weight").fill_(float("nan"))
    run("all values NaN", random)
    record("power", results)


def _clock_and_power() -> str:
    command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
