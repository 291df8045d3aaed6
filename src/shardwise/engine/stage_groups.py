"""Optimizer groups under pp: refuse reductions over a group's parameters, which would cover only this rank's stages.

Under pp, a rank's `optimizer.param_groups` have the parameters of its stages only. Code that goes over them between
steps is right if it treats each parameter by itself, in place (a manual decay, an average of each), and wrong if it
combines them: a norm, `clip_grad_norm_`, one tensor of all. So tensors taken from a group are tracked:

    use                                                  result
    a tensor of one parameter, written in place or kept  works as always; results computed from it are tracked too
    one tensor computed from two parameters              raises, with a remedy that covers all parameters
    a Python number: `.item()`, `float`, `if`            raises too: it would differ between ranks

Tracking lasts from an access to a group to the engine's next call. Parameters accessed by the module's own names are
not tracked: such code gets the parameter it names.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from threading import get_ident
from typing import Any, SupportsIndex
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.engine.shown import HARMLESS, Shown, has_come
from shardwise.errors import ShardwiseError
from shardwise.torch_private import pytree, without_subclasses

#: Functions that turn a tensor into a Python number or an array.
_LEAVING = frozenset(
    [
        "item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__complex__", "__format__",
        "__array__", "__contains__", "equal", "allclose", "is_nonzero",
    ]
)  # fmt: skip
_CLASSES: dict[type, type] = {}
#: The origin of a tracked tensor: ids of parameters, each with the plan's pp. Not an attribute: those are saved.
_MADE_OF = WeakTensorKeyDictionary()


def follow_groups(optimizer: Optimizer, shown: Shown, pp: int) -> None:
    """Track accesses to this optimizer's groups between steps."""
    for group in optimizer.param_groups:
        group["params"] = StageParameters(group["params"], shown, pp)


class StageParameters(list[Any]):
    """The parameters of a group that are on this rank."""

    def __init__(self, parameters: Iterable[Tensor], shown: Shown, pp: int) -> None:
        super().__init__(parameters)
        self._shown, self._pp, self._thread = ref(shown), pp, get_ident()

    def _lend(self) -> None:
        shown = self._shown()
        if shown is None or not shown.is_idle or get_ident() != self._thread:
            return
        for each in super().__iter__():
            if type(each) not in _CLASSES.values() and has_come(each):
                _MADE_OF[each] = {id(each): self._pp}
                shown.lend(each, _followed_class(type(each)))

    def __iter__(self) -> Iterator[Any]:
        self._lend()
        return super().__iter__()

    def __reversed__(self) -> Iterator[Any]:
        self._lend()
        return super().__reversed__()

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        self._lend()
        return super().__getitem__(place)

    def __add__(self, other: Any) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Any) -> list[Any]:
        return [*other, *self]

    def copy(self) -> list[Any]:
        return [*self]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let copies and files have a plain list."""
        return list, ([*self],)


def _followed_class(kind: type) -> type:
    if kind not in _CLASSES:
        body = {"__torch_function__": classmethod(_followed), "__deepcopy__": _copied, "__reduce_ex__": _reduced}
        _CLASSES[kind] = type(kind)(kind.__name__, (kind,), {**body, "__module__": kind.__module__})
    return _CLASSES[kind]


def _followed(
    cls: type, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Intercept a torch function with a tracked tensor among its arguments (`__torch_function__`)."""
    del cls, types
    kwargs = kwargs or {}
    if function in HARMLESS:
        with without_subclasses():
            return function(*args, **kwargs)
    name = getattr(function, "__name__", "")
    given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    origin: dict[int, int] = {}
    for each in given:
        origin |= _origin_of(each)
    is_in_place = name.endswith("_") and not name.endswith("__")
    of_each = name.startswith("_foreach_") and is_in_place
    # A number that was there before, to which one of a group is added.
    adds_up = is_in_place and bool(given) and given[0].dim() == 0 and not _origin_of(given[0])
    if name in _LEAVING or adds_up or (len(origin) > 1 and not of_each):
        raise _of_one_rank(next(iter(origin.values())))
    with without_subclasses():
        result = function(*args, **kwargs)
    return result if of_each else pytree.tree_map(lambda each: _marked(each, given, origin), result)


def _marked(result: Any, given: list[Tensor], origin: dict[int, int]) -> Any:
    if type(result) is not Tensor or any(result is each for each in given):
        return result
    made: Any = result.as_subclass(_followed_class(Tensor))
    _MADE_OF[made] = origin
    return made


def _origin_of(tensor: Tensor) -> dict[int, int]:
    found: dict[int, int] = _MADE_OF[tensor] if type(tensor) in _CLASSES.values() and tensor in _MADE_OF else {}
    return found


def _of_one_rank(pp: int) -> ShardwiseError:
    return ShardwiseError(
        "a number is made of the parameters in optimizer.param_groups, and on this rank these are the ones of its"
        f" stages alone (pp={pp}): it would be another number on every rank",
        remedy="engine.state_dict() on every rank, which has all of them; engine.gradients(), or engine.gradient_norm"
        " with clip=float('inf'), for gradients",
    )


def _copied(tensor: Any, memo: dict[int, Any]) -> Any:
    return _as_ever(tensor, lambda: deepcopy(tensor, memo))


def _reduced(tensor: Any, protocol: Any) -> Any:
    return _as_ever(tensor, lambda: tensor.__reduce_ex__(protocol))


def _as_ever(tensor: Any, do: Callable[[], Any]) -> Any:
    kind = type(tensor)
    tensor.__class__ = kind.__base__
    try:
        return do()
    finally:
        tensor.__class__ = kind
