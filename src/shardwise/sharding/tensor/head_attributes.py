"""What an attention module remembers of its heads, corrected to this rank's share.

Most modules of today leave the number of heads open in their views. Others keep counts and widths, which are of all
heads; they are known by their names, and changed in proportion.
"""

import copy
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from torch import Tensor, nn

from shardwise.sharding.tensor.regions import Region
from shardwise.sharding.wrap_forward import wrap_forward

_KEYS = re.compile(r"(num|n)_(key_value|kv)_heads?")
_GROUPS = re.compile(r"(num|n)_(key_value|kv)_groups")
_QUERIES = re.compile(r"(num|n)_(attention_|query_|q_)?heads?|heads|all_head_size|inner_dim|split_size")


def correct(module: nn.Module, region: Region, rank: int) -> list[str]:
    """Correct the counts of a module that holds columns or rows of a region; return what was changed, in words."""
    queries, keys = Fraction(*region.fine[rank]), Fraction(*region.coarse[rank])
    changed = []
    for key, value in _corrected(vars(module), queries, keys).items():
        changed.append(f"{key} {getattr(module, key)} -> {value}")
        setattr(module, key, value)
    config = getattr(module, "config", None)
    if config is not None:
        corrected = _corrected(vars(config), queries, keys)
        if corrected:
            # Everyone has the same configuration; this module gets one of its own.
            module.config = copy.copy(config)
            for key, value in corrected.items():
                setattr(module.config, key, value)
    return changed


def _corrected(values: dict[str, Any], queries: Fraction, keys: Fraction) -> dict[str, int]:
    found = {}
    for name, value in values.items():
        if type(value) is not int:
            continue
        factor = keys if _KEYS.fullmatch(name) else queries / keys if _GROUPS.fullmatch(name) else None
        if factor is None and _QUERIES.fullmatch(name):
            factor = queries
        if factor is not None and factor != 1 and (value * factor).denominator == 1:
            found[name] = int(value * factor)
    return found


def take_own_heads(module: nn.Module, name: str, region: Region, rank: int) -> None:
    """Give a module only its heads of an argument that has one row for every head of every sequence."""
    first = sum(count for count, _ in region.fine[:rank])
    count, all_heads = region.fine[rank]

    def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get(name)
        if isinstance(given, Tensor):
            kwargs[name] = given.view(-1, all_heads, *given.shape[1:])[:, first : first + count].flatten(0, 1)
        return call(*args, **kwargs)

    wrap_forward(module, around)
