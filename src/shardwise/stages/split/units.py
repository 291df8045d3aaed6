"""Find the units of a module: the calls between which it may be cut.

A unit is a called module that holds weights or state: an embedding, one block, a norm, a head. The code around units is
glue. It holds no weights, and every stage runs it.

    module
    ├── embed        unit
    ├── rotary       glue: it has no weights, and the same inputs give the same output anywhere
    ├── dropout      unit: its mask must be drawn once
    ├── layers       opened: a list of blocks
    │   ├── 0        unit
    │   └── 1        unit
    └── head         unit
"""

from collections.abc import Collection, Iterator

from torch import nn

from shardwise.torch_private import DropoutModule, buffer_slots, is_persistent

#: Containers that are never called themselves.
SHELVES = (nn.ModuleList, nn.ModuleDict)
#: Modules of torch that call some of their children depending on the input.
_CHOOSING = (nn.AdaptiveLogSoftmaxWithLoss,)


def find_units(root: nn.Module, opened: Collection[str] = ()) -> dict[str, nn.Module]:
    """Return every unit by its name, in the module's order. `opened` names would-be units to look into instead."""
    units: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(name: str, module: nn.Module, *, is_block: bool) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        is_open = name == "" or name in opened or isinstance(module, SHELVES)
        if is_open or (not is_block and holds_blocks(module) and not isinstance(module, _CHOOSING)):
            for child_name, child in module.named_children():
                path = f"{name}.{child_name}" if name else child_name
                visit(path, child, is_block=is_block_list(module))
        elif holds_state(module):
            units[name] = module

    visit("", root, is_block=False)
    return units


def holds_state(module: nn.Module) -> bool:
    """Whether a module must run on one stage only: it has weights or state, or draws random numbers."""
    return (
        next(module.parameters(), None) is not None
        or any(isinstance(each, DropoutModule) for each in module.modules())
        or any(True for _ in persistent_buffers(module))
    )


def persistent_buffers(module: nn.Module) -> Iterator[str]:
    """Yield buffers that are saved with the module. Others can be recomputed, so any stage may have its own."""
    for name, each in module.named_modules():
        for key, buffer in buffer_slots(each).items():
            if buffer is not None and is_persistent(each, key):
                yield f"{name}.{key}" if name else key


def is_block_list(module: nn.Module) -> bool:
    """Whether a module is a list of at least two blocks. A Sequential of linear, activation, linear is one block."""
    if isinstance(module, SHELVES):
        return len(module) >= 2
    if not isinstance(module, nn.Sequential) or len(module) < 2:
        return False
    return sum(next(child.children(), None) is not None and holds_state(child) for child in module) >= 2


def holds_blocks(module: nn.Module) -> bool:
    """Whether a module is a list of blocks or has one inside."""
    return any(is_block_list(each) for each in module.modules())


def can_open(root: nn.Module, name: str) -> bool:
    """Whether a unit has children that could be units instead of it."""
    unit = root.get_submodule(name)
    return not isinstance(unit, _CHOOSING) and any(holds_state(child) for child in unit.children())
