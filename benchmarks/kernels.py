"""Every kernel of `shardwise.kernels` on one GPU, forward and backward, beside torch, Liger and the bytes.

    python -m benchmarks.kernels --save kernels.json [--liger liger_kernel.whl] [--only rms_norm,rotary] [--sweep]

Times are medians by events of the device, after the cache was overwritten; what is queued meanwhile hides the host. The
limit is the fewest bytes a call must move, at what a copy moves on this GPU. Each kernel is checked in the same run: it
must be no further from the numbers of float32 than torch's own operators are, but for one step of bfloat16.
"""

import argparse
import json
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shardwise import environment

sys.path.insert(0, str(Path(__file__).parent))  # As a module, too, it finds the file beside it.
import kernel_cases

#: What a copy moves on an H200, bytes a second, read and written.
LIMIT = 4.24e12
REPEATS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one size. `functions` are by who computes it, each from the same inputs."""

    name: str
    shape: str
    inputs: Callable[[], list[Any]]
    functions: dict[str, Callable[..., Any]]
    forward_bytes: int
    backward_bytes: int
    #: Inputs that are small enough to be computed in float32 too.
    small: Callable[[], list[Any]] = field(default=list)


def main() -> None:
    given = read_arguments()
    if given.table is not None:
        print(table(json.loads(given.table.read_text(encoding="utf-8"))))
        return
    if not torch.cuda.is_available():
        print("kernels are measured on a GPU, and torch sees none")
        return
    if given.liger is not None:
        folder = tempfile.mkdtemp()
        zipfile.ZipFile(given.liger).extractall(folder)
        sys.path.insert(0, folder)
    # What is compiled may then be asked for its backward more than once.
    import torch._functorch.config as functorch

    functorch.donated_buffer = False
    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "versions": environment.versions_of(["torch", "triton", "liger_kernel"]),
        "limit_bytes_per_second": LIMIT,
        "copy_bytes_per_second": copy_speed(),
        "cases": {},
    }
    print(f"{results['device']}, a copy moves {results['copy_bytes_per_second'] / 1e12:.2f} TB/s", flush=True)
    names = given.only.split(",") if given.only else None
    for case in kernel_cases.cases(Case):
        if names is None or case.name in names:
            results["cases"][case.name] = measured(case)
            save(given.save, results)
    if given.sweep:
        results["sweep"] = sweep()
        save(given.save, results)
    wrong = [name for name, each in results["cases"].items() if not each.get("is_right", True)]
    if wrong:
        sys.exit(f"wrong: {', '.join(wrong)}")


def table(results: dict[str, Any]) -> str:
    """Microseconds forward + backward, and how much of the limit that is, as Markdown."""
    who = ("ours", "torch", "compiled", "liger")
    lines = [f"| kernel | size | limit | {' | '.join(who)} | ours, fraction of the limit |", "|---" * 8 + "|"]
    for name, case in results["cases"].items():
        times = [
            f"{each['forward_us']:,.0f} + {each['backward_us']:,.0f}" if "forward_us" in each else "-"
            for each in (case.get(other, {}) for other in who)
        ]
        limit = case["limit_us"]["forward"] + case["limit_us"]["backward"]
        share = f"{case['ours']['of_limit']:.0%}" if limit and "of_limit" in case["ours"] else "-"
        lines.append(f"| `{name}` | {case['shape']} | {limit:,.0f} | {' | '.join(times)} | {share} |")
    return "\n".join(lines)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, default=Path(__file__).parent / "results" / "kernels.json")
    parser.add_argument("--liger", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--table", type=Path, help="write the table of such a file, and measure nothing")
    return parser.parse_args()


def save(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def measured(case: Case) -> dict[str, Any]:
    torch.compiler.reset()  # Cases share lines of torch's, and each counts against the limit of what is compiled there.
    found: dict[str, Any] = {"shape": case.shape, "error": {}}
    limits = {"forward": case.forward_bytes / LIMIT, "backward": case.backward_bytes / LIMIT}
    found["limit_us"] = {name: round(each * 1e6, 1) for name, each in limits.items()}
    for who, function in case.functions.items():
        try:
            forward, backward, extra = times_of(function, case.inputs())
        except Exception as error:  # A peer that cannot do it is told as such.
            found[who] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            if who == "ours":
                found["is_right"] = False
            print(f"{case.name:22s} {who:9s} {found[who]['failed']}", flush=True)
            continue
        both = forward + backward
        found[who] = {
            "forward_us": round(forward * 1e6, 1),
            "backward_us": round(backward * 1e6, 1),
            "extra_bytes": extra,
            "of_limit": round(sum(limits.values()) / both, 3),
        }
        print(
            f"{case.name:22s} {who:9s} forward {forward * 1e6:9.1f} us ({limits['forward'] / forward:4.0%})"
            f"  backward {backward * 1e6:9.1f} us ({limits['backward'] / max(backward, 1e-9):4.0%})"
            f"  beside {extra / 1e6:9.1f} MB",
            flush=True,
        )
        torch.cuda.empty_cache()
    inputs = case.small()
    if inputs:
        try:
            found["error"], found["is_right"] = errors_of(case, inputs)
        except Exception as error:  # The other cases are measured all the same.
            found["error"], found["is_right"] = {"failed": f"{type(error).__name__}: {error}"[:300]}, False
        print(f"{case.name:22s} {'right' if found['is_right'] else 'WRONG'} {found['error']}", flush=True)
    return found


def times_of(function: Callable[..., Any], inputs: list[Any]) -> tuple[float, float, int]:
    """Seconds of a forward and of its backward, and bytes taken beside inputs, outputs and gradients."""
    trash = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    wanted = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
    forwards, backwards, extra = [], [], 0
    for repeat in range(REPEATS + 3):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trash.zero_()
        marks[0].record()
        made = function(*inputs)
        marks[1].record()
        outputs = [each for each in (made if isinstance(made, tuple) else (made,)) if each.is_floating_point()]
        outputs = [each for each in outputs if each.requires_grad]
        gradients: Any = ()
        if outputs and wanted:
            incoming = incoming_of(outputs)
            trash.zero_()
            marks[2].record()
            gradients = torch.autograd.grad(outputs, wanted, incoming, allow_unused=True)
        else:
            marks[2].record()
        marks[3].record()
        torch.cuda.synchronize()
        if repeat >= 3:
            forwards.append(marks[0].elapsed_time(marks[1]) / 1e3)
            backwards.append(marks[2].elapsed_time(marks[3]) / 1e3)
            kept = [each for each in (*gradients, *outputs) if each is not None]
            kept_bytes = sum(each.untyped_storage().nbytes() for each in kept)
            extra = torch.cuda.max_memory_allocated() - before - kept_bytes
        del made, outputs, gradients
    return median(forwards), median(backwards) if wanted else 0.0, extra


_INCOMING: dict[Any, Tensor] = {}


def incoming_of(outputs: list[Tensor]) -> list[Tensor]:
    """Random gradients, the same for everybody, made once."""
    for each in outputs:
        key = each.shape, each.dtype
        if key not in _INCOMING:
            _INCOMING.clear() if each.numel() > 2**28 else None
            _INCOMING[key] = torch.randn(each.shape, device="cuda", dtype=each.dtype)
    return [_INCOMING[each.shape, each.dtype] for each in outputs]


def errors_of(case: Case, inputs: list[Any]) -> tuple[dict[str, float], bool]:
    """How far ours and torch's are from float32, relative to its norm: the worst of all outputs and gradients."""

    def outputs_of(function: Callable[..., Any], given: list[Any]) -> list[Tensor]:
        wanted = [each for each in given if isinstance(each, Tensor) and each.requires_grad]
        made = function(*given)
        outputs = [each for each in (made if isinstance(made, tuple) else (made,)) if each.is_floating_point()]
        learning = [each for each in outputs if each.requires_grad]
        torch.manual_seed(1)
        incoming = [torch.randn(each.shape, device="cuda") for each in learning]
        gradients: Any = ()
        if learning and wanted:
            cast = [one.to(each.dtype) for one, each in zip(incoming, learning, strict=True)]
            gradients = torch.autograd.grad(learning, wanted, cast, allow_unused=True)
        return [each.detach().double() for each in (*outputs, *gradients) if each is not None]

    def up(each: Any) -> Any:
        if not isinstance(each, Tensor) or not each.is_floating_point():
            return each
        return each.detach().float().requires_grad_(each.requires_grad)

    exact = outputs_of(case.functions["torch"], [up(each) for each in inputs])
    mine, plain = (outputs_of(case.functions[who], inputs) for who in ("ours", "torch"))

    def distances(found: list[Tensor]) -> list[float]:
        return [
            float((one - other).norm() / other.norm().clamp(min=1e-30)) for one, other in zip(found, exact, strict=True)
        ]

    ours, theirs = distances(mine), distances(plain)
    is_right = all(one <= 1.5 * other + 4e-3 for one, other in zip(ours, theirs, strict=True))
    return {"ours": float(f"{max(ours):.2e}"), "torch": float(f"{max(theirs):.2e}")}, is_right


def copy_speed() -> float:
    source = torch.randn(2**30, device="cuda", dtype=torch.bfloat16)
    forward, _, _ = times_of(lambda x: x.clone(), [source])
    return 2 * source.nbytes / forward


def sweep() -> dict[str, dict[str, list[float]]]:
    """Other block sizes, warps and programs than those that the kernels have: microseconds forward and backward."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, module, settings in kernel_cases.variants():
        case = next(each for each in kernel_cases.cases(Case) if each.name == name)
        inputs, rows = case.inputs(), found.setdefault(name, {})
        for setting in settings:
            before = {key: getattr(module, key) for key in setting}
            for key, value in setting.items():
                setattr(module, key, value)
            try:
                forward, backward, _ = times_of(case.functions["ours"], inputs)
                rows[str(setting)] = [round(forward * 1e6, 1), round(backward * 1e6, 1)]
            except Exception as error:  # More registers or shared memory than there are.
                print(name, setting, type(error).__name__, flush=True)
            for key, value in before.items():
                setattr(module, key, value)
        print(name, *(f"\n  {key} {value}" for key, value in rows.items()), flush=True)
    return found


if __name__ == "__main__":
    main()
