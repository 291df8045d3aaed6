"""A user's own module to check: `package.module:factory`, or `file.py:factory`: a module, a batch and a loss.

    def factory():
        batch = {"x": torch.randn(8, 16), "y": torch.randn(8, 4)}
        return Net(), batch, lambda output, batch: (output - batch["y"]).square().mean()

Instead of one batch, whose rows change places from step to step, it may return a list, used in turn. How it is trained
is a fourth thing: `{"optimizer": make, "scheduler": lambda optimizer: StepLR(optimizer, 2), "clip": 1.0}`, each as
`parallelize` and torch take it, beside what else `parallelize` is to be told: `{"tensor": {"layers.*.up": "column"}}`.
"""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, unknown
from shardwise.parity.problem import CLIP, OPTIONS, MakeProblem, Problem, make_optimizer, make_scheduler
from shardwise.stages.batch import length_of
from shardwise.stages.split.lines import line_of_error
from shardwise.stages.stage import Batch
from shardwise.torch_private import DropoutModule

_HALVES = (torch.bfloat16, torch.float16)
_EXAMPLE = "--module my_package.my_module:factory, or --module my_file.py:factory"
#: How a module is trained; the rest of what may be said goes to `parallelize`.
_TRAINING = ("optimizer", "scheduler", "clip", "held_out", "by_microbatches")


def problem_from(where: str, num_steps: int) -> MakeProblem:
    """What calls the factory, on every rank alike."""
    name, colon, attribute = where.partition(":")
    if not colon or not name or not attribute:
        raise ShardwiseError(f"--module {where} is no package.module:factory", remedy=_EXAMPLE)
    return partial(_make, name, attribute, num_steps, str(Path.cwd()))


def _make(name: str, attribute: str, num_steps: int, folder: str) -> Problem:
    if folder not in sys.path:
        sys.path.insert(0, folder)  # As `python -m` would: a module beside which the command is called is found.
    try:
        home = _from_file(name, folder) if name.endswith(".py") else import_module(name)
    except Exception as error:
        why = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ShardwiseError(f"--module {name}:{attribute} cannot be imported: {why}", remedy=_EXAMPLE) from None
    factory = getattr(home, attribute, None)
    if not callable(factory):
        functions = [key for key, each in vars(home).items() if callable(each) and not key.startswith("_")]
        told = unknown(f"function of {name}", attribute, functions)
        raise ShardwiseError(told.problem, remedy=told.remedy and f"--module {name}:{told.remedy}")
    torch.manual_seed(0)
    try:
        made = factory()
    except ShardwiseError:
        raise
    except Exception as error:
        raise ShardwiseError(
            f"{name}:{attribute} raises {type(error).__name__}: {error}, at {line_of_error(error)}",
            remedy="a function without arguments that returns a module, a batch and a loss",
        ) from error
    return _checked(made, f"{name}:{attribute}", num_steps)


def _from_file(name: str, folder: str) -> Any:
    """A file as a module: under its own name, so that what it defines is the same on all ranks."""
    path = Path(folder, name)
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None, "and that is it"
    home = module_from_spec(spec)
    sys.modules[path.stem] = home
    spec.loader.exec_module(home)
    return home


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
    left_out = _without_other_dropout(module)
    # All is computed in fp32 at least: rounding would hide what is sought.
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
    """Turn off dropout of whose masks no plan is promised the same; say which."""
    found = []
    for name, each in module.named_modules():
        if isinstance(each, DropoutModule) and not isinstance(each, nn.Dropout) and each.p:
            each.p = 0.0  # One device and many ranks draw other masks, and other masks are no mistake.
            found.append(f"dropout by {name or 'the module'} ({type(each).__name__}): it is off here")
    return found


def _turned(batch: Batch, by: int) -> Batch:
    """A batch with its rows in other places: what a stage has kept of the example is then wrong."""
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
