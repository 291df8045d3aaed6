"""What it costs to compare a cut model with the whole one before training: `parallelize(verify=True)` of tp ranks.

A Llama of 1.1 billion parameters (hidden 2048, 22 layers, 32 heads with 4 key heads, ffn 5632, vocabulary 32,000), on
the GPU where there is one. Every process of a plan does what is timed here, with its ranks as threads: no other process
is needed. The part that is there without it (the runs that find what can be cut) is timed too.
"""

import argparse
import gc
import json
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.ranks.simulated import SimulatedGroup
from shardwise.sharding.tensor import shard

_LIMIT_SECONDS = 2.0


def make(num_layers: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=4,
    )
    with torch.device("meta"):  # Numbers of its own are of no matter, and take a minute to draw.
        return LlamaForCausalLM(config).to(torch.bfloat16)


def seconds(module: nn.Module, tp: int, device: str, *, verify: bool) -> float:
    ids = torch.randint(32_000, (4, 2048), device=device)
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronise()
    start = perf_counter()
    sharding = shard(module, SimulatedGroup(0, tp), example={"input_ids": ids}, verify=verify)
    synchronise()
    took = perf_counter() - start
    if verify and sharding.unverified:
        raise SystemExit(f"nothing was compared: {sharding.unverified}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = []
    seconds(make(1), 2, device, verify=True)  # What a process does once: kernels are loaded.
    for tp in arguments.tp:
        without, with_it = [], []
        for _ in range(3):
            for verify, into in ((False, without), (True, with_it)):
                into.append(seconds(make(arguments.layers), tp, device, verify=verify))
                gc.collect()
        found.append({
            "tp": tp, "without_seconds": min(without), "with_seconds": min(with_it),
            "check_seconds": min(with_it) - min(without),
        })  # fmt: skip
        print(f"tp={tp}: {min(with_it):.2f} s, of which the comparison {found[-1]['check_seconds']:.2f} s", flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    answer = {"device": name, "layers": arguments.layers, "torch": torch.__version__, "runs": found}
    if arguments.save is not None:
        arguments.save.write_text(json.dumps(answer, indent=2) + "\n")
    if device == "cuda":
        worst = max(each["check_seconds"] for each in found if each["tp"] <= 8)
        print(f"{'at most' if worst <= _LIMIT_SECONDS else 'MORE THAN'} {_LIMIT_SECONDS} s: {worst:.2f} s")


if __name__ == "__main__":
    main()
