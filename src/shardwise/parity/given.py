"""A user's own module to check: `package.module:factory`, a function that returns the module, a batch and a loss.

    def factory():
        batch = {"x": torch.randn(8, 16), "y": torch.randn(8, 4)}
        return Net(), batch, lambda output, batch: (output - batch["y"]).square().mean()

Instead of one batch, used in every step, it may return a list, used in turn. What `parallelize` is to be told beside
it returns as a fourth thing: `{"tensor": {"layers.*.up": "column", "layers.*.down": "row"}}`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, unknown
from shardwise.parity.problem import OPTIONS, MakeProblem, Problem
from shardwise.stages.factory import find_factory, split_name
from shardwise.torch_private import DropoutModule

_HALVES = (torch.bfloat16, torch.float16)
_OPTION = "--module "


def problem_from(where: str, num_steps: int) -> MakeProblem:
    """What calls the factory, on every rank alike."""
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
        raise ShardwiseError(f"the batch of {where} is no dictionary", remedy='{"input_ids": ids, "labels": labels}')
    for each in module.modules():
        if isinstance(each, DropoutModule) and not isinstance(each, nn.Dropout):
            each.p = 0.0  # One device and many ranks draw other masks, and other masks are no mistake.
    # All is computed in fp32 at least: rounding would hide what is sought.
    wide = [{name: _wide(entry) for name, entry in each.items()} for each in batches]
    return Problem(
        module=_wide_module(module).train(),
        batches=[wide[step % len(wide)] for step in range(num_steps)],
        loss=loss,
        options=options,
    )


def _wide(entry: Any) -> Any:
    return entry.float() if isinstance(entry, Tensor) and entry.dtype in _HALVES else entry


def _wide_module(module: nn.Module) -> nn.Module:
    has_halves = any(each.dtype in _HALVES for each in (*module.parameters(), *module.buffers()))
    return module.float() if has_halves else module


def _options(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ShardwiseError(
            f"the fourth thing that {where} returns is of type {type(given).__name__}, and not a dictionary",
            remedy='{"tensor": {"layers.*.up": "column", "layers.*.down": "row"}}',
        )
    for key in given:
        if key not in OPTIONS:
            raise unknown("option of a module", key, OPTIONS)
    return given
