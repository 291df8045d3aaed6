"""A Triton kernel over two places: transfers and waits are found from what it reads and writes."""

import os

import torch
import triton
import triton.language as tl

from shardwise.dataflow.machine import Machine

NUM_GPUS = torch.cuda.device_count()
PLACES = [f"cuda:{number % NUM_GPUS}" for number in range(2)] if NUM_GPUS else ["cpu:0", "cpu:1"]
if not NUM_GPUS:
    os.environ["TRITON_INTERPRET"] = "1"  # Without a GPU the kernel runs in Triton's interpreter.


@triton.jit
def step(w_ptr, x_ptr, next_ptr, n, rate, BLOCK: tl.constexpr):  # noqa: N803
    """One step down the slope of (w - x)^2."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.load(w_ptr + offsets, mask=offsets < n)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(next_ptr + offsets, w - rate * (w - x), mask=offsets < n)


if __name__ == "__main__":
    with Machine(sorted(set(PLACES)), trace=True) as machine:
        x, w = machine.data(torch.arange(1000.0) / 1000), machine.data(torch.zeros(1000))
        for number in range(5):
            made, loss = machine.empty((1000,)), machine.empty(())
            machine.submit(step, w, x, made, 1000, 0.3, BLOCK=1024, grid=(1,), place=PLACES[number % 2])
            machine.submit(torch.nn.functional.mse_loss, made, x, into=loss, place=PLACES[(number + 1) % 2])
            print(f"step {number}  loss {loss.get():.4f}")
            w = made
        print(machine.report().moved_bytes)
