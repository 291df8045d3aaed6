"""Which pieces of a module are blocks: the items of its lists of blocks, or else its children."""

from collections.abc import Iterator

from torch import nn

# These hold modules and are never called themselves.
_SHELVES = (nn.ModuleList, nn.ModuleDict)


def find_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Every block by its name. A module without lists of blocks is taken apart into its children with parameters."""
    found = dict(_items(root, ""))
    if found:
        return found
    return {name: child for name, child in root.named_children() if _has_parameters(child)}


def _items(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The items of the outermost lists of blocks in a module."""
    is_list = _is_block_list(module)
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if is_list and not isinstance(child, _SHELVES):
            if _has_parameters(child):
                yield path, child
        else:
            yield from _items(child, path)


def _is_block_list(module: nn.Module) -> bool:
    """A list of two blocks or more. Linear, activation, linear in a Sequential is one block, not a list of them."""
    if isinstance(module, _SHELVES):
        return len(module) >= 2
    if not isinstance(module, nn.Sequential):
        return False
    return sum(next(child.children(), None) is not None and _has_parameters(child) for child in module) >= 2


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
