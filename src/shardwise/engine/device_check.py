"""Find tensors on the wrong device before the first step, with the line to edit.

Torch only reports, in the middle of a step, that two tensors are on different devices. The error here names them, where
each is and should be, the line of the user's source that put it there, and what to write instead.
"""

import inspect
import linecache
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError
from shardwise.torch_private import buffer_slots, parameter_slots
from shardwise.units import counted

_OURS = (Path(__file__).parents[1], Path(torch.__file__).parent)
_MOST_TOLD = 8
ATTRIBUTE = "attribute"


class Misplaced(NamedTuple):
    """A tensor on the wrong device. `line` is where the user's source makes it or hands it over, if it was found."""

    what: str
    name: str
    where: str
    should: str
    line: str | None
    edit: str

    def __str__(self) -> str:
        at = f"\n    {self.line}" if self.line else ""
        return f"{self.what} {self.name} is on {self.where}, not on {self.should}{at}\n    write: {self.edit}"


def check_devices(
    module: nn.Module,
    *,
    batch: Mapping[str, Any] | None = None,
    optimizers: Iterable[Optimizer] = (),
    device: torch.device | str | None = None,
) -> None:
    """Refuse tensors that are not where the module is. All that are wrong are told at once.

    Not plain attributes: a module may never compute with them.
    """
    all_of_them = find_misplaced(module, batch=batch, optimizers=optimizers, device=device)
    found = [each for each in all_of_them if each.what != ATTRIBUTE]
    if found:
        told = [str(each) for each in found[:_MOST_TOLD]]
        told += [f"and {len(found) - _MOST_TOLD} more"] if len(found) > _MOST_TOLD else []
        problem = f"{counted(len(found), 'tensor')} on the wrong device:\n  " + "\n  ".join(told)
        raise ShardwiseError(problem, remedy=found[0].edit)


def find_misplaced(
    module: nn.Module,
    *,
    batch: Mapping[str, Any] | None = None,
    optimizers: Iterable[Optimizer] = (),
    device: torch.device | str | None = None,
) -> list[Misplaced]:
    """Return all tensors that are not on `device`; by default the device of most of the module's parameters."""
    home = torch.device(device) if device is not None else _home_of(module)
    if home is None:
        return []
    here = _calling_line()
    return [
        *_of_module(module, home),
        *_of_batch(batch or {}, home, here),
        *_of_optimizers(module, optimizers, home, here),
    ]


def check_example(module: nn.Module, example: Any) -> None:
    """Check, before anything is split, that everything that the module or the loss computes with is on one device.

    A module that is on the meta device, whole or in part, gets its weights later. Of the example, only entries that the
    module's forward names, masks and targets are checked: others may be unused.
    """
    is_meta = any(each.is_meta for each in (*module.parameters(), *module.buffers()))
    if is_meta or not isinstance(example, Mapping):  # What is not a batch is reported where batches are cut.
        return
    wanted = _names_of(module)
    used = {key: each for key, each in example.items() if key in wanted or _role(key) != "input"}
    check_devices(module, batch={key: each for key, each in used.items() if isinstance(each, Tensor) and each.dim()})


def _names_of(module: nn.Module) -> Collection[str]:
    """Return the names of the forward's arguments."""
    try:
        return inspect.signature(module.forward).parameters.keys()
    except ValueError:  # Compiled code has no signature.
        return ()


def _home_of(module: nn.Module) -> torch.device | None:
    """Return the device of most of the parameters, by bytes."""
    sizes: Counter[torch.device] = Counter()
    for each in module.parameters():
        sizes[each.device] += each.numel()
    return sizes.most_common(1)[0][0] if sizes else None


def _of_module(module: nn.Module, home: torch.device) -> Iterator[Misplaced]:
    for owner_name, owner in module.named_modules():
        kinds: list[tuple[str, Mapping[str, Any]]] = [
            ("parameter", parameter_slots(owner)),
            ("buffer", buffer_slots(owner)),
            (ATTRIBUTE, {key: each for key, each in vars(owner).items() if isinstance(each, Tensor)}),
        ]
        for what, tensors in kinds:
            for key, tensor in tensors.items():
                if isinstance(tensor, Tensor) and tensor.device != home:
                    name = f"{owner_name}.{key}" if owner_name else key
                    line = _line_of(module, owner_name, key)
                    yield Misplaced(what, name, str(tensor.device), str(home), line, _edit(what, key, owner_name, home))


def _edit(what: str, key: str, owner: str, home: torch.device) -> str:
    if what == ATTRIBUTE:
        # A plain attribute stays where it is when the module is moved.
        return f'self.register_buffer("{key}", self.{key})   (a plain attribute does not move with its module)'
    path = f"module.{owner}" if owner else "module"
    return f'{path}.to("{home}")'


def _of_batch(batch: Mapping[str, Any], home: torch.device, here: str | None) -> Iterator[Misplaced]:
    for key, value in batch.items():
        if isinstance(value, Tensor) and value.device != home:
            edit = f'batch["{key}"] = batch["{key}"].to("{home}")'
            yield Misplaced(_role(key), f'batch["{key}"]', str(value.device), str(home), here, edit)


def _role(key: str) -> str:
    """Return the role of a batch's entry, by its name."""
    if "mask" in key:
        return "mask"
    return "target" if re.search(r"label|target|^y$", key) else "input"


def _of_optimizers(
    module: nn.Module, optimizers: Iterable[Optimizer], home: torch.device, here: str | None
) -> Iterator[Misplaced]:
    names = {id(each): name for name, each in module.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if id(weight) not in names and weight.device != home:
                    edit = f'module.to("{home}") first, then {type(optimizer).__name__}(module.parameters(), ...)'
                    name = f"of shape {tuple(weight.shape)} in {type(optimizer).__name__}"
                    yield Misplaced("parameter", name, str(weight.device), str(home), here, edit)
        for weight, state in optimizer.state.items():
            for key, value in state.items():
                # A count of steps is kept on the host on purpose.
                if isinstance(value, Tensor) and value.dim() > 0 and value.device != weight.device:
                    name = f"{key} of {names.get(id(weight), 'a parameter')}"
                    edit = f'state["{key}"] = state["{key}"].to("{weight.device}") of optimizer.state[parameter]'
                    yield Misplaced("optimizer state", name, str(value.device), str(weight.device), here, edit)


def _line_of(root: nn.Module, owner: str, key: str) -> str | None:
    """Return the line of the user's source that makes a tensor; or the nearest module around it that is the user's."""
    path, wanted = owner, key
    while True:
        found = _find_assignment(type(root.get_submodule(path)), wanted)
        if found is not None or not path:
            return found
        path, _, wanted = path.rpartition(".")


def _find_assignment(kind: type, key: str) -> str | None:
    """Return where a user's class assigns to `self.key`, or registers it."""
    try:
        file, (lines, first) = inspect.getsourcefile(kind), inspect.getsourcelines(kind)
    except (OSError, TypeError):
        return None
    if file is None or any(Path(file).is_relative_to(folder) for folder in _OURS):
        return None
    quoted = rf"""["']{re.escape(key)}["']"""
    pattern = re.compile(rf"self\.{re.escape(key)}\s*(:[^=]+)?=(?!=)|register_(buffer|parameter)\(\s*{quoted}")
    for number, line in enumerate(lines, first):
        if pattern.search(line):
            return f"{Path(file).name}:{number}: {line.strip()}"
    return None


def _calling_line() -> str | None:
    """Return the nearest line of the call stack that is neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not any(Path(file).is_relative_to(folder) for folder in _OURS) and Path(file).is_file():
            return f"{Path(file).name}:{frame.f_lineno}: {linecache.getline(file, frame.f_lineno).strip()}"
        frame = frame.f_back
    return None
