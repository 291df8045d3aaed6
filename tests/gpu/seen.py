"""What is to be true of a command that was typed: each gives back what is wrong, or None."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Holds = Callable[["Seen"], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a command has written, and where."""

    folder: Path
    device: str
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        """Its JSON; what a launcher says before it is no part of it."""
        found: dict[str, Any] = json.loads(self.out[self.out.index("{") :])
        return found

    def told(self) -> dict[str, Any]:
        """The numbers of it that are worth keeping."""
        keys = ("step", "loss", "held_out_loss", "tokens_per_second", "mfu", "memory_bytes", "precision", "compiled")
        try:
            return {key: self.answer[key] for key in (*keys, "step_seconds") if self.answer.get(key) is not None}
        except ValueError:
            return {}


def has_trained(steps: int, *, sample: bool = False, precision: str | None = None, compiled: bool = False) -> Holds:
    """It has trained so many steps, on the device that was meant, and has told how fast."""

    def holds(seen: Seen) -> str | None:
        answer = seen.answer
        if answer["step"] != steps or not answer["tokens_per_second"]:
            return f"step {answer['step']} at {answer['tokens_per_second']} tokens/s"
        if not answer["checkpoint"] or answer["held_out_loss"] is None:
            return "there is no checkpoint, or no evaluation"
        if sample and not (answer["sample"] or "").startswith("def "):
            return f"the sample is {answer['sample']!r}"
        if precision is not None and (answer["precision"], answer["compiled"]) != (precision, compiled):
            return f"it is in {answer['precision']}, compiled: {answer['compiled']}"
        if seen.device == "cuda" and ("x cuda" not in seen.err or answer["mfu"] is None):
            return f"it was not on the GPU, or its MFU is not known: {answer['mfu']}"
        manifest = json.loads((seen.folder / answer["run"] / "manifest.json").read_text(encoding="utf-8"))
        is_gpu = "processes" not in manifest["device"]
        return None if is_gpu == (seen.device == "cuda") else f"the manifest says {manifest['device']}"

    return holds


def finished_before(steps: int) -> Holds:
    """Nothing was left to do, and it says so."""

    def holds(seen: Seen) -> str | None:
        answer = seen.answer
        return None if (answer["step"], answer["tokens_per_second"]) == (steps, None) else f"it says {answer}"

    return holds


def same_losses(one: str, other: str) -> Holds:
    """Two runs of one recipe have the same losses, to rounding."""

    def holds(seen: Seen) -> str | None:
        first, second = (_losses(seen.folder / run) for run in (one, other))
        worst = max(abs(a - b) / abs(a) for a, b in zip(first, second, strict=True))
        return None if first and worst < 1e-4 else f"losses differ by {worst:.1e}: {first}, {second}"

    return holds


def has_steps(name: str, steps: int) -> Holds:
    """A run that something else has started has made so many steps."""

    def holds(seen: Seen) -> str | None:
        found = len(_losses(seen.folder / name))
        return None if found == steps else f"{name} has {found} steps"

    return holds


def _losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


def stopped_at(words: str) -> Holds:
    """It has stopped with a sentence that has these words."""

    def holds(seen: Seen) -> str | None:
        problem = seen.answer["error"]["problem"]
        return None if words in problem and "Traceback" not in seen.err else f"it says {problem}"

    return holds


def said(key: str) -> Holds:
    """Its answer has something under a key."""
    return lambda seen: None if key in seen.answer else f"its answer has no {key}, but {', '.join(seen.answer)}"


def has_page(name: str) -> Holds:
    """A page is there."""
    return lambda seen: None if (seen.folder / name).stat().st_size > 10_000 else f"{name} is empty"


def calibrated(name: str) -> Holds:
    """A profile has measured steps, and written this machine as a cluster."""

    def holds(seen: Seen) -> str | None:
        text = (seen.folder / name).read_text(encoding="utf-8")
        if not seen.answer["step_seconds"] or "memory" not in text:
            return f"a step of {seen.answer['step_seconds']} s, and {name} is {text[:200]!r}"
        busy = sum(sum(use["seconds"].values()) for rank in seen.answer["streams"] for use in rank)
        return None if seen.device == "cpu" or busy > 0 else "nothing was seen on any stream"

    return holds


def converted(name: str) -> Holds:
    """A folder of Hugging Face is there."""

    def holds(seen: Seen) -> str | None:
        lacking = [each for each in ("config.json", "model.safetensors") if not (seen.folder / name / each).exists()]
        return f"{name} has no {lacking[0]}" if lacking else None

    return holds


def is_same(seen: Seen) -> str | None:
    """A plan and one device are the same."""
    answer = seen.answer
    return None if answer["ok"] and answer["device"] == seen.device else f"it says {answer}"


def learns(seen: Seen) -> str | None:
    """An example's loss falls."""
    losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", seen.out, re.MULTILINE)]
    return None if len(losses) == 5 and losses[-1] < losses[0] else f"losses are {losses}"
