"""A mixture on one GPU: layers of Qwen3-30B-A3B (128 experts of 768, 8 chosen, width 2048), ours beside transformers'.

    python -m benchmarks.mixture [--who ours,eager,dense,transformers,unmodified] [--layers 8] [--save FILE]

`ours` has compiled blocks and `eager` none; `dense` is ours with one MLP of 8 x 768, which does the same FLOPs;
`transformers` is Qwen3MoeForCausalLM as it is, and `unmodified` the same through `parallelize`. bf16 weights, fused
AdamW, 4 x 4096 random tokens a step, each in a process of its own. Told are tokens a second, milliseconds, GiB, how
often the host waited for the GPU within a step (torch tells), and two ratios: ours over transformers', asked 3, and
over dense, asked 0.9.
"""

import argparse
import gc
import json
import subprocess
import sys
import warnings
from collections import Counter
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

VOCABULARY, WIDTH, HEADS, KEY_HEADS, DIM = 151_936, 2048, 32, 4, 128
EXPERTS, CHOSEN, INNER = 128, 8, 768
ROWS, LENGTH = 4, 4096
ADAMW = partial(AdamW, lr=1e-5, fused=True)
ASKED_TRANSFORMERS, ASKED_DENSE = 3.0, 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, default=Path(__file__).parent / "results" / "mixture.json")
    parser.add_argument("--who", default="ours,eager,dense,transformers,unmodified")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("one GPU is measured, and torch sees none")
        return
    if given.one is not None:
        {
            "ours": lambda: ours(given.layers, compile=True),
            "eager": lambda: ours(given.layers, compile=False),
            "dense": lambda: ours(given.layers, compile=True, is_dense=True),
            "transformers": lambda: theirs(given.layers),
            "unmodified": lambda: through_parallelize(given.layers),
        }[given.one]()
        return
    cases: dict[str, Any] = {}
    for who in given.who.split(","):
        lines = subprocess.run(
            [sys.executable, __file__, "--one", who, "--layers", str(given.layers)], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, check=False,
        ).stdout.splitlines()  # fmt: skip
        told = next((line for line in lines if line.startswith("{")), None)
        cases[who] = json.loads(told) if told else {"failed": lines[-1] if lines else "no output"}
        print(who, json.dumps(cases[who]) if told else "\n".join(["has failed:", *lines[-20:]]), flush=True)
        results = {
            "date": datetime.now(UTC).date().isoformat(),
            "device": torch.cuda.get_device_name(),
            "versions": environment.versions_of(["torch", "triton", "transformers"]),
            "layers": given.layers,
            "cases": cases,
            "ratios": ratios(cases),
        }
        given.save.parent.mkdir(parents=True, exist_ok=True)
        given.save.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(ratios(cases)), flush=True)


def ratios(cases: dict[str, Any]) -> dict[str, float]:
    """Our better one over others."""
    speeds = {who: each["tokens_per_second"] for who, each in cases.items() if "tokens_per_second" in each}
    best = max(speeds.get("ours", 0), speeds.get("eager", 0))
    asked = {"transformers": ASKED_TRANSFORMERS, "dense": ASKED_DENSE}
    return {f"over {who}, asked {least}": round(best / speeds[who], 3) for who, least in asked.items() if who in speeds}


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(0)
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), device="cuda", generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def measure(step: Callable[[], Any], *, warm: int = 3, steps: int = 6) -> None:
    for _ in range(warm):
        loss = step()
    torch.cuda.synchronize()
    waits = waits_in(step)
    torch.cuda.reset_peak_memory_stats()
    begun = perf_counter()
    for _ in range(steps):
        loss = step()
    torch.cuda.synchronize()
    seconds = (perf_counter() - begun) / steps
    numbers = {
        "tokens_per_second": round(ROWS * LENGTH / seconds),
        "step_ms": round(seconds * 1e3, 1),
        "gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "waits_in_a_step": sum(waits.values()),
        "waits_at": dict(waits),
        "loss": round(float(loss), 4),
    }
    print(json.dumps(numbers), flush=True)


def waits_in(step: Callable[[], Any]) -> Counter[str]:
    """How often the host waits for the GPU in a step, and in which lines, as torch tells it."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in told if "synchronizing CUDA operation" in str(each.message)]
    return Counter(f"{Path(each.filename).name}:{each.lineno}" for each in waits)


def ours(layers: int, *, compile: bool, is_dense: bool = False) -> None:
    import shardwise as sw
    from shardwise.nets.loss import next_token_loss
    from shardwise.nets.settings import Heads, Mixture, Mlp, Settings
    from shardwise.nets.transformer import Transformer

    torch.manual_seed(0)
    mixture = Mixture(num_experts=EXPERTS, num_chosen=CHOSEN, width=INNER)
    settings = Settings(
        vocabulary=VOCABULARY, width=WIDTH, num_layers=layers, length=LENGTH, mlp=Mlp(width=CHOSEN * INNER),
        attention=Heads(num_heads=HEADS, num_kv_heads=KEY_HEADS, head_dim=DIM, qk_norm=True),
        mixture=None if is_dense else mixture,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        module = Transformer(settings)
    torch.set_default_dtype(torch.float32)
    batch = tokens()
    engine = sw.parallelize(
        module, "precision=bf16", loss=next_token_loss, optimizer=ADAMW, example=batch, compile=compile, masters=False
    )

    last: list[Any] = []

    def step() -> float:
        """Launch one, and read the one before, as `train` does."""
        last.append(engine.launch_step(batch))
        return float(last.pop(0).read().loss) if len(last) > 1 else 0.0

    measure(step)


def make_theirs(layers: int) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS, head_dim=DIM, num_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        moe_intermediate_size=INNER, norm_topk_prob=True, use_cache=False, max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        module = Qwen3MoeForCausalLM(config).train()
    torch.set_default_dtype(torch.float32)
    gc.collect()
    return module


def theirs(layers: int) -> None:
    model, batch = make_theirs(layers), tokens()
    optimizer = ADAMW(model.parameters())

    def step() -> Tensor:
        loss: Tensor = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    measure(step, warm=2, steps=3)


def through_parallelize(layers: int) -> None:
    import shardwise as sw

    batch = tokens()
    batch["labels"] = batch["input_ids"]
    engine = sw.parallelize(
        make_theirs(layers), "dp=1", loss=lambda output, _: output.loss, optimizer=ADAMW, example=batch
    )
    measure(lambda: engine.train_step(batch), warm=2, steps=3)


if __name__ == "__main__":
    main()
