"""A user's own module to check: `package.module:factory`, or `file.py:factory`: a module, a batch and a loss.

    def factory():
        batch = {"x": torch.randn(8, 16), "y": torch.randn(8, 4)}
        return Net(), batch, lambda output, batch: (output - batch["y"]).square().mean()

One batch is used for all steps, with its rows rotated from step to step. A list of batches is used in turn. A fourth
value configures the training: `{"optimizer": make, "scheduler": lambda optimizer: StepLR(optimizer, 2), "clip": 1.0}`,
as `parallelize` and torch take them, with other options of `parallelize`: `{"tensor": {"layers.*.up": "column"}}`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, unknown
from shardwise.parity.problem import CLIP, OPTIONS, MakeProblem, Problem, make_optimizer, make_scheduler
from shardwise.stages.batch import length_of
from shardwise.stages.factory import find_factory, split_name
from shardwise.stages.stage import Batch
from shardwise.torch_private import DropoutModule

_HALVES = (torch.bfloat16, torch.float16)
_OPTION = "--module "
#: Options of the training. All others go to `parallelize`.
_TRAINING = ("optimizer", "scheduler", "clip", "held_out", "by_microbatches")


def problem_from(where: str, num_steps: int) -> MakeProblem:
    """Return a function that calls the factory, the same way on every rank."""
    split_name(where, _OPTION)
    return partial(_make, where, num_steps, str(Path.cwd()))


def _make(where: str, num_steps: int, folder: str) -> Problem:
    factory = find_factory(where, _OPTION, folder)
    torch.manual_seed(0)
    return _checked(factory(), where, num_steps)


def _checked(made: Any, where: str, num_steps: int) -> Problem:
    parts: Sequence[Any] = made if isinstance(made, (tuple, list)) else (made,)
    if len(parts) not in (3, 4) or not isinstance(parts[0], nn.Module) or not callable(parts[2]):
        kinds = ", ".join(type(each).__name__ for each in parts)
        raise ShardwiseError(
            f"{where} returns {kinds}, and not a module, a batch and a loss", remedy="return module, batch, loss"
        )
    module, given, loss = parts[:3]
    options = _options(parts[3] if len(parts) > 3 else {}, where)
    batches = [given] if isinstance(given, Mapping) else list(given)
    if not batches or not all(isinstance(each, Mapping) for each in batches):
        raise ShardwiseError(f"the batch of {where} is not a dictionary", remedy='{"input_ids": ids, "labels": labels}')
    left_out = _without_other_dropout(module)
    # All is computed in fp32 at least, as rounding would hide errors.
    wide = [{name: _wide(entry) for name, entry in each.items()} for each in batches]
    return Problem(
        module=_wide_module(module).train(),
        batches=[_turned(wide[step % len(wide)], step // len(wide)) for step in range(num_steps)],
        loss=loss,
        options={key: each for key, each in options.items() if key not in _TRAINING},
        optimizer=options.get("optimizer", make_optimizer),
        # A user's own optimizer has a user's own schedule, or none.
        scheduler=options.get("scheduler", None if "optimizer" in options else make_scheduler),
        clip=options.get("clip", CLIP),
        held_out=options.get("held_out", _turned(wide[-1], 1)),
        by_microbatches=bool(options.get("by_microbatches", False)),
        left_out=left_out,
    )


def _without_other_dropout(module: nn.Module) -> list[str]:
    """Turn off kinds of dropout whose masks depend on the plan. Return a description of each."""
    found = []
    for name, each in module.named_modules():
        if isinstance(each, DropoutModule) and not isinstance(each, nn.Dropout) and each.p:
            each.p = 0.0  # One device and many ranks draw different masks, which is not an error.
            found.append(f"dropout by {name or 'the module'} ({type(each).__name__}): it is off here")
    return found


def _turned(batch: Batch, by: int) -> Batch:
    """Return a batch with its rows rotated: state that a stage kept from the example is then wrong."""
    length = length_of(batch)
    return {
        name: entry.roll(by, 0) if isinstance(entry, Tensor) and entry.dim() and entry.shape[0] == length else entry
        for name, entry in batch.items()
    }


def _wide(entry: Any) -> Any:
    return entry.float() if isinstance(entry, Tensor) and entry.dtype in _HALVES else entry


def _wide_module(module: nn.Module) -> nn.Module:
    has_halves = any(each.dtype in _HALVES for each in (*module.parameters(), *module.buffers()))
    return module.float() if has_halves else module


def _options(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ShardwiseError(
            f"the fourth thing that {where} returns is of type {type(given).__name__}, and not a dictionary",
            remedy='{"optimizer": make, "clip": 1.0}, or {"tensor": {"layers.*.up": "column"}}',
        )
    for key in given:
        if key not in (*_TRAINING, *OPTIONS):
            raise unknown("option of a module", key, (*_TRAINING, *OPTIONS))
    return given
