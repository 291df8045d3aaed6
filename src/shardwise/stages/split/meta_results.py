"""Cache what operators return on the meta device, by the outlines of their arguments.

Many operators compute their shapes there in Python, a millisecond each (torch 2.13: norms, products with a bias,
anything that broadcasts). The blocks of a model repeat the same calls, and a module is run on the meta device several
times: for its channels, for its shards and for its stages.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.torch_private import pytree, schema_of, storage_id

#: The cache is cleared at this many results.
_MOST = 20_000
_PLAIN = (Tensor, nn.Parameter)
_VALUES = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)


class _Made(NamedTuple):
    """The outline of one tensor that an operator returned."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def again(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


_KNOWN: dict[tuple[Any, ...], tuple[_Made, ...]] = {}


def run_or_recall(key: tuple[Any, ...], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator, or return new tensors like those of an earlier call with this key."""
    known = _KNOWN.get(key)
    if known is not None:
        return known[0].again() if len(known) == 1 else tuple(each.again() for each in known)
    returned = operator(*args, **kwargs)
    made = _outlines(returned, args)
    if made is not None:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[key] = made
    return returned


def find_key(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return everything that the outline of a result depends on; None if it may depend on more.

    Only operators that return new tensors from arguments on the meta device have a key. Operators that write to an
    argument or return a view of one have none.
    """
    if not _makes_new(operator):
        return None
    # Division of integers gives the default float dtype.
    key: list[Any] = [operator, torch.get_default_dtype()]
    if not _add(key, args):
        return None
    for name, each in kwargs.items():
        key.append(name)
        if not _add(key, (each,)):
            return None
    return tuple(key)


@cache
def _makes_new(operator: Any) -> bool:
    """Whether the schema of an aten operator says that it returns new tensors and writes to no argument."""
    if getattr(operator, "namespace", None) != "aten":
        return False
    schema = schema_of(operator)
    named = [*schema.arguments, *schema.returns]
    return all(each.alias_info is None for each in named) and all(
        isinstance(each.type, torch.TensorType) for each in schema.returns
    )


def _add(key: list[Any], given: Any) -> bool:
    key.append(len(given))
    for each in given:
        kind = type(each)
        if kind in _PLAIN:
            # A tensor without dims may count as a Python number in type promotion.
            if (
                not each.is_meta
                or not each.dim()
                or each.layout is not torch.strided
                or each.is_conj()
                or each.is_neg()
            ):
                return False
            key += (each.shape, each.stride(), each.dtype)
        elif kind in (list, tuple, torch.Size):
            if not _add(key, each):
                return False
        elif kind in _VALUES:
            key += (kind, each)  # 1, 1.0 and True are equal.
        else:
            return False
    return True


def _outlines(returned: Any, args: tuple[Any, ...]) -> tuple[_Made, ...] | None:
    """Return the outlines of new tensors on the meta device; None if anything else was returned."""
    several = returned if type(returned) is tuple and len(returned) > 1 else (returned,)
    for each in several:
        if type(each) is not Tensor or not each.is_meta or each.layout is not torch.strided or each.storage_offset():
            return None
    # Some operators return a view of an argument although their schema does not say so.
    held = {storage_id(each.untyped_storage()) for each in pytree.tree_leaves(args) if isinstance(each, Tensor)}
    if any(storage_id(each.untyped_storage()) in held for each in several):
        return None
    return tuple(_Made(tuple(each.shape), each.stride(), each.dtype) for each in several)
