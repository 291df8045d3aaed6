"""What operators return on the meta device, remembered by the outlines of what they are given.

Many operators have their shapes computed there in Python, a millisecond each (torch 2.13: norms, products with a bias,
whatever broadcasts). Blocks of a model ask the same of them again and again, and a module is run without numbers
several times: for its channels, for its pieces, for its stages.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.torch_private import pytree, schema_of, storage_id

#: So many results are remembered, then all are forgotten.
_MOST = 20_000
_PLAIN = (Tensor, nn.Parameter)
_VALUES = (int, float, bool, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)


class _Made(NamedTuple):
    """One tensor that an operator has made."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def again(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


_KNOWN: dict[tuple[Any, ...], tuple[_Made, ...]] = {}


def run_or_recall(key: tuple[Any, ...], operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator returns: made by it, or tensors like those of an earlier call with this key."""
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
    """All that the outline of a result depends on; None where it may depend on more.

    There is one only where an operator makes new tensors, of tensors that are all on the meta device: what it writes
    into, or gives a view of, it is given.
    """
    if not _makes_new(operator):
        return None
    # Integers that are divided become floats of the default type.
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
    """Whether an operator, one of torch's own, says that it returns new tensors and writes nowhere."""
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
            # A number in a tensor may count as a number alone when types are settled.
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
    """Of new tensors on the meta device; None if there is anything else."""
    several = returned if type(returned) is tuple and len(returned) > 1 else (returned,)
    for each in several:
        if type(each) is not Tensor or not each.is_meta or each.layout is not torch.strided or each.storage_offset():
            return None
    # Some give a view of what they are given and do not say so.
    held = {storage_id(each.untyped_storage()) for each in pytree.tree_leaves(args) if isinstance(each, Tensor)}
    if any(storage_id(each.untyped_storage()) in held for each in several):
        return None
    return tuple(_Made(tuple(each.shape), each.stride(), each.dtype) for each in several)
