"""A training step with activations on the host, beside the same step with all of them on the device.

The model is Llama-like, in bfloat16, placed on one GPU with the host beside it; forward, the user's backward and AdamW.
For each part of the activations on the host: tokens a second, bytes out and back in, peak of the GPU's memory, the
largest difference of a loss and of a gradient from those without a host (and of two runs without one, to compare), and
the bound: forward and backward each take the larger of their computation and of their bytes over the link. The last row
is what `place` finds out by itself where there is room for a part of the activations.

    python benchmarks/placing_activations.py                    with a GPU
    python benchmarks/placing_activations.py --small            fp32 on the CPU, copies by threads: 14 s on 2 cores

Without `--small` it needs a GPU, and pins as much of the host's memory as activations are.
"""

import argparse
import gc
import json
from statistics import median
from time import perf_counter
from typing import Any, Literal

import torch
from record import record
from torch import Tensor, nn
from torch.optim import AdamW
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw
from shardwise.dataflow.machine import Machine
from shardwise.placing.loads import find_loads

LARGE = {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "intermediate_size": 8192}
SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}


class Case:
    """What is trained, and where."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.device = "cpu" if given.small else "cuda:0"
        self.devices = ["cpu:0", "cpu"] if given.small else ["cuda:0", "cpu"]
        self.host: Literal["stream", "auto"] = "stream" if given.small else "auto"
        self.steps = given.steps
        self._dtype = torch.float32 if given.small else torch.bfloat16
        vocabulary = 512 if given.small else 32_000
        self._config = LlamaConfig(
            **(SMALL if given.small else LARGE), num_hidden_layers=given.layers, vocab_size=vocabulary, use_cache=False
        )
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (given.batch, given.length)
        self.ids = torch.randint(0, vocabulary, shape, device=self.device, generator=generator)

    def model(self) -> Any:
        torch.manual_seed(0)
        with torch.device(self.device):
            return LlamaForCausalLM(self._config).to(self._dtype).train()

    def wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def trained(case: Case, model: nn.Module) -> dict[str, Any]:
    """Medians of the passes and of a step; losses; and the gradients of the last backward."""
    optimizer = AdamW(model.parameters(), lr=1e-5, foreach=True)
    forwards, backwards, steps, losses = [], [], [], []
    if case.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(case.steps + 1):  # The first pins memory.
        optimizer.zero_grad()
        case.wait()
        start = perf_counter()
        loss = model(input_ids=case.ids, labels=case.ids).loss
        case.wait()
        middle = perf_counter()
        loss.backward()
        case.wait()
        end = perf_counter()
        optimizer.step()
        case.wait()
        forwards.append(middle - start)
        backwards.append(end - middle)
        steps.append(perf_counter() - start)
        losses.append(loss.item())
    return {
        "forward_seconds": median(forwards[1:]),
        "backward_seconds": median(backwards[1:]),
        "tokens_per_second": case.ids.numel() / median(steps[1:]),
        "losses": losses,
        "gradients": [each.grad.cpu() for each in model.parameters() if each.grad is not None],
        "peak_gib": None if case.device == "cpu" else torch.cuda.max_memory_allocated() / 2**30,
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """The largest of a loss and of a gradient."""
    pairs: list[tuple[Tensor, Tensor]] = list(zip(one["gradients"], other["gradients"], strict=True))
    return {
        "loss_difference": max(abs(a - b) for a, b in zip(one["losses"], other["losses"], strict=True)),
        "gradient_difference": max(float((a.float() - b.float()).abs().max()) for a, b in pairs),
    }


def link_rates(case: Case) -> tuple[float, float]:
    """Bytes a second from the device to the host, and back."""
    if case.device == "cpu":
        with Machine(["cpu:0"]) as machine:
            links = machine.measure()
        return links["cpu:0", "host"].bytes_per_second, links["host", "cpu:0"].bytes_per_second
    pinned = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=case.device)
    found = []
    for target, source in ((pinned, there), (there, pinned)):
        seconds = []
        for _ in range(4):
            start = perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(perf_counter() - start)
        found.append(2**30 / median(seconds[1:]))
    return found[0], found[1]


def freed() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def row(case: Case, plain: dict[str, Any], rates: tuple[float, float], **wishes: Any) -> dict[str, Any]:
    """One placement, measured."""
    placed = sw.place(case.model(), case.devices, host=case.host, **wishes)
    ours, stashes = trained(case, placed), placed.activations
    out, back, held = 0.0, 0.0, 0
    if stashes is not None:  # Else another way was faster: the reason says which.
        out, back = stashes.sent_bytes / (case.steps + 1), stashes.returned_bytes / (case.steps + 1)
        held = stashes.host_bytes
    bound = max(plain["forward_seconds"], out / rates[0]) + max(plain["backward_seconds"], back / rates[1])
    taken = ours["forward_seconds"] + ours["backward_seconds"]
    return {
        "parts": {} if stashes is None else stashes.parts,
        "reason": placed.reason,
        **{name: each for name, each in ours.items() if name != "gradients"},
        "bytes_out": out,
        "bytes_in": back,
        "host_bytes": held,
        "bound_seconds": bound,
        "of_bound": bound / taken,
        **difference(plain, ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--small", action="store_true", help="a small model, on the CPU")
    parser.add_argument("--layers", type=int, default=None, help="12, or 4 of the small model")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=None, help="2048, or 128 for the small model")
    parser.add_argument("--steps", type=int, default=3, help="measured steps, of which the median counts")
    parser.add_argument("--parts", default="0.25,0.5,1", help="of the activations, with commas between them")
    given = parser.parse_args()
    given.layers = given.layers or (4 if given.small else 12)
    given.length = given.length or (128 if given.small else 2048)
    case = Case(given)
    model = case.model()
    example = {"input_ids": case.ids, "labels": case.ids}
    calls = find_loads(model, example, moments=2).calls
    kept = sum(load.kept_bytes for load in calls)
    states = 4 * sum(each.numel() * each.element_size() for each in model.parameters())
    plain = trained(case, model)
    del model
    freed()
    again = difference(plain, trained(case, case.model()))
    freed()
    rates = link_rates(case)
    rows = []
    for part in given.parts.split(","):
        rows.append(row(case, plain, rates, activations_on_host=float(part)))
        print(json.dumps(rows[-1], indent=2), flush=True)
        freed()
    budget = {case.devices[0]: states + int(0.6 * kept)}
    rows.append(row(case, plain, rates, example=example, budget=budget))
    results = {
        "device": "cpu" if given.small else torch.cuda.get_device_name(),
        "layers": given.layers,
        "tokens": case.ids.numel(),
        "kept_bytes": kept,
        "state_bytes": states,
        "bytes_per_second_out": rates[0],
        "bytes_per_second_in": rates[1],
        "all_on_the_device": {name: each for name, each in plain.items() if name != "gradients"},
        "two_runs_without_a_host": again,
        "rows": rows,
    }
    print(json.dumps({**results, "rows": rows[-1:]}, indent=2))
    if not given.small:
        record("placing_activations", results)


if __name__ == "__main__":
    main()
