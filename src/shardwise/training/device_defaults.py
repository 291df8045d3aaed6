"""Defaults that depend on the device: the precision, and whether blocks are compiled.

On a GPU, bf16 and compilation are chosen where they are faster, and one line reports the choice. On CPUs a run uses
fp32 without compilation, unless its recipe says otherwise.
"""

from typing import NamedTuple

import torch

from shardwise.cluster.catalogue import DEVICES, find_device
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import FP8_SCALES, Offload, Plan
from shardwise.ranks.gpus import check_precision, find_gpus
from shardwise.stages.compiled import find_missing
from shardwise.training.data.source import check_data
from shardwise.training.recipe import Recipe
from shardwise.training.subject import subject_of
from shardwise.units import format_seconds

#: The first compute capability with bf16 in its tensor cores: Ampere.
_BF16_SINCE = (8, 0)
#: The casts of autocast are kernel launches too. bf16 is faster if the FLOPs of a step in fp32, at peak, take longer
#: than this. On an H200 a step of 10 ms takes 1.4 times as long in bf16, one of 39 ms 0.7 (results/train_job.json).
_BF16_PAYS_SECONDS = 2e-2
#: The shortest run that is compiled for. Compiling a block takes 10 to 15 s, and there may be several kinds of blocks.
_COMPILE_PAYS_SECONDS = 180.0
#: A typical share of its peak that a GPU reaches in training, to estimate the duration of a run.
_USUAL_SHARE = 0.4
#: The assumed FLOP/s of a GPU that is not in the catalogue.
_UNKNOWN_PEAK = 1e14

AUTO = "auto"


class Choice(NamedTuple):
    """A value and the reason for it. The reason is empty for values that the recipe gives."""

    value: str
    why: str = ""


def choose_precision(recipe: Recipe, num_ranks: int) -> Choice:
    """Return the precision of a run: the recipe's own, or on a GPU bf16 where it is faster."""
    if recipe.precision != AUTO:
        _check_bf16(recipe.precision)
        if recipe.precision in FP8_SCALES:
            check_precision(find_gpus().gpus, recipe.precision, "--set precision=bf16", key="--set precision")
        return Choice(recipe.precision)
    if not torch.cuda.is_available():
        return Choice("fp32")
    if not _has_bf16():
        return Choice("fp32", "it has no bf16")
    wide, narrow = (_peak(precision) for precision in ("fp32", "bf16"))
    flops = flops_of_step(recipe) / num_ranks
    if flops / wide < _BF16_PAYS_SECONDS:
        return Choice("fp32", f"a step of {flops / 1e9:.3g} GFLOP on a rank is too small for bf16 to pay")
    return Choice("bf16", f"matmuls are up to {narrow / wide:.0f} times as fast as in fp32")


def choose_compile(recipe: Recipe, plan: Plan) -> Choice:
    """Return `on` or `off`: the recipe's choice, or `on` on a GPU if blocks can be compiled and the run is long."""
    if recipe.compile != AUTO:
        return Choice(recipe.compile)
    if not torch.cuda.is_available():
        return Choice("off")
    inside = [f"{axis}={getattr(plan, axis)}" for axis in ("tp", "cp", "ep") if getattr(plan, axis) > 1]
    if inside:
        return Choice("off", f"under {','.join(inside)} ranks talk inside of blocks")
    if plan.offload != Offload():
        return Choice("off", "a part of the state lives on the host")
    if recipe.model.dropout or recipe.model.experts:
        return Choice("off", "masks of dropout and rows of experts are found in blocks as they are")
    missing = find_missing(torch.device("cuda"))
    if missing is not None:
        return Choice("off", f"{missing} is not found")
    seconds = flops_of_step(recipe) * recipe.steps / plan.num_ranks / (_USUAL_SHARE * _peak(plan.precision))
    if seconds < _COMPILE_PAYS_SECONDS:
        return Choice("off", f"a run of about {format_seconds(seconds)} is too short to compile for")
    return Choice("on", f"the run takes {format_seconds(seconds)} or so")


def line_of_choices(precision: Choice, compile: Choice) -> str | None:
    """Return the line that reports the choices, or None if nothing was chosen."""
    parts, words = [], []
    if precision.why:
        # Torch's default is "highest".
        exact = "" if torch.get_float32_matmul_precision() != "highest" else " (TF32 off)"
        parts.append(f"{precision.value}{exact if precision.value == 'fp32' else ''}, as {precision.why}")
        words.append(f"--set precision={'fp32' if precision.value == 'bf16' else 'bf16'}")
    if compile.why:
        parts.append(f"blocks {'compiled' if compile.value == 'on' else 'as they are'}, as {compile.why}")
        words.append(f"--set compile={'off' if compile.value == 'on' else 'on'}")
    if not parts:
        return None
    return f"on {torch.cuda.get_device_name()}: {'; '.join(parts)} (else: {' '.join(words)})"


def with_precision(recipe: Recipe, precision: str) -> Recipe:
    """Return the recipe with the chosen precision, so that the run keeps it when it is resumed on another device."""
    return recipe.changed({"precision": precision})


def with_masks(recipe: Recipe) -> Recipe:
    """Return the recipe with `data.masks` decided by whether the module takes masks, if it was not set."""
    if recipe.data.masks is not None:
        return recipe
    return recipe.changed({"data.masks": subject_of(recipe, check_data(recipe.data, verify=False)).masks})


def flops_of_step(recipe: Recipe) -> float:
    """Return the model FLOPs of a step, forward and backward, from the recipe alone."""
    subject = subject_of(recipe, check_data(recipe.data, verify=False))
    module = subject.make(tp=1, device=torch.device("cpu"))
    return subject.flops_per_token(module) * recipe.batch * recipe.data.sequence


def _check_bf16(precision: str) -> None:
    """Refuse bf16 on a GPU that emulates it or does not support it."""
    if precision == "bf16" and torch.cuda.is_available() and not _has_bf16():
        major, minor = torch.cuda.get_device_capability()
        raise ShardwiseError(
            f"precision=bf16, and {torch.cuda.get_device_name()} of compute capability {major}.{minor} has none: it"
            " came with 8.0",
            remedy="--set precision=fp16, or --set precision=fp32",
        )


def _has_bf16() -> bool:
    # All AMD GPUs that torch supports have bf16.
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= _BF16_SINCE


def _peak(precision: str) -> float:
    name = find_device(torch.cuda.get_device_name())
    return _UNKNOWN_PEAK if name is None else DEVICES[name].peak(precision)
