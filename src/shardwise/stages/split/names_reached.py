"""Collect the names used in code that a forward or a loss may reach: functions, and those that they name or close over.

A named function may never be called, and all methods of an object in an attribute are read. So the answer is what may
be drawn at random, and it is used only where nothing more precise is known. This file has the only list of names that
draw.
"""

import random
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from shardwise.stages.split.drawn_state import names_in
from shardwise.stages.split.theirs import is_own
from shardwise.torch_private import DropoutModule

#: Code of these packages is not read: it draws by other names, or draws nothing that a user's forward controls.
_NOT_READ = frozenset({"torch", "shardwise", "numpy", *sys.stdlib_module_names})
_NO_ROOTS = frozenset({int, float, bool, str, bytes, type(None)})
_STATE = frozenset({"seed", "getstate", "setstate", "get_state", "set_state"})
_OF_PYTHON = frozenset(name for name in dir(random.Random) if not name.startswith("_")) - _STATE
_OF_TORCH = frozenset({
    "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "normal", "normal_", "uniform_",
    "bernoulli", "bernoulli_", "multinomial", "exponential_", "random_", "geometric_", "cauchy_", "log_normal_",
    "poisson", "binomial", "gumbel_softmax", "rrelu", "alpha_dropout", "feature_alpha_dropout", "dropout1d",
    "dropout2d", "dropout3d", "trunc_normal_", "orthogonal_", "sample", "rsample",
})  # fmt: skip
#: NumPy's names that neither Python nor torch has, without common words such as `beta`.
_OF_NUMPY = frozenset({"permutation", "permuted", "standard_normal", "integers", "random_sample"})
#: Torch's layers that draw. `nn.Dropout` and `F.dropout` are not among them: their masks depend on the position of
#: each element only (`sharding/dropout.py`).
_DRAWING_LAYERS = (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)


def may_draw_by(*roots: Any) -> tuple[bool, bool, bool]:
    """Whether modules and functions may draw from the generators of Python, NumPy and torch, judged by names."""
    names = names_reached(*roots)
    numpy = sys.modules.get("numpy")
    layers = [layer for each in roots if isinstance(each, nn.Module) for layer in each.modules()]
    return (
        not names.isdisjoint(_OF_PYTHON),
        numpy is not None and "numpy" in names and not names.isdisjoint(dir(numpy.random.RandomState)),
        not names.isdisjoint(_OF_TORCH) or any(map(_draws, layers)),
    )


def may_draw(function: Any) -> bool:
    """Whether a function names anything that draws, also from generators that it creates."""
    return not names_reached(function).isdisjoint(_OF_TORCH | _OF_PYTHON | _OF_NUMPY)


def _draws(layer: nn.Module) -> bool:
    if isinstance(layer, nn.RNNBase):
        return layer.dropout > 0
    is_dropout = isinstance(layer, DropoutModule) and not isinstance(layer, nn.Dropout)
    return is_dropout or isinstance(layer, _DRAWING_LAYERS)


def names_reached(*roots: Any) -> frozenset[str]:
    """Return all names in functions that these roots may call. Anything of NumPy's adds the name `numpy`."""
    waiting, seen, found = list(roots), set[int](), set[str]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType) and is_read(each):
            names = set(names_in(each.__code__))
            held = [each.__globals__[name] for name in names if name in each.__globals__]
            found |= names | {str(getattr(one, "__name__", "")) for one in held}  # `from random import random as draw`
            found |= {"numpy" for one in held if _is_numpys(one)}
        waiting.extend(_next(each))
    return frozenset(found)


def numbers_reached(*roots: Any) -> frozenset[float]:
    """Return the numbers in functions that these roots may call, in what they close over, and in objects that they
    read: `labels != 255`, `self.padding`."""
    waiting, seen, found = list(roots), set[int](), set[float]()
    while waiting:
        each = waiting.pop()
        if type(each) in (int, float):
            found.add(each)
        if type(each) in _NO_ROOTS or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, FunctionType) and is_read(each):
            found |= _numbers_in(each.__code__)
            waiting += each.__defaults__ or ()
            # Numbers of the file, and of objects in it: `config.padding`.
            named = (each.__globals__.get(name) for name in names_in(each.__code__))
            waiting += [held for held in named if type(held) in (int, float, dict) or is_own(type(held))]
        elif isinstance(each, (nn.Module, SimpleNamespace, Namespace)) or is_own(type(each)):
            waiting += [held for held in getattr(each, "__dict__", {}).values() if type(held) in (int, float)]
        waiting.extend(_next(each))
    return frozenset(found)


def _numbers_in(code: CodeType) -> set[float]:
    found = {each for each in code.co_consts if type(each) in (int, float)}
    for each in code.co_consts:
        if isinstance(each, (tuple, frozenset)):
            found |= {one for one in each if type(one) in (int, float)}
        elif isinstance(each, CodeType):
            found |= _numbers_in(each)
    return found


def is_read(each: Any) -> bool:
    return str(getattr(each, "__module__", None) or "torch").partition(".")[0] not in _NOT_READ


def _is_numpys(held: Any) -> bool:
    """Whether this is NumPy, one of its submodules, or a function that draws from its generator."""
    owner = getattr(held, "__self__", None)
    name = held.__name__ if isinstance(held, ModuleType) else type(owner).__module__
    return name.partition(".")[0] == "numpy"


def _next(each: Any) -> Iterator[Any]:
    if isinstance(each, FunctionType):
        yield from (cell.cell_contents for cell in each.__closure__ or () if is_full(cell))
        if is_read(each):
            named = (each.__globals__.get(name) for name in names_in(each.__code__))
            yield from (held for held in named if isinstance(held, (FunctionType, type, nn.Module)))
    elif isinstance(each, MethodType):
        yield from (each.__func__, each.__self__)
    elif isinstance(each, partial):
        yield from (each.func, *each.args, *each.keywords.values())
    elif isinstance(each, dict):
        yield from each.values()
    elif isinstance(each, type):
        yield from _methods(each)
    elif isinstance(each, nn.Module):
        yield type(each)
        yield from each.children()
        yield from filter(is_followed, vars(each).values())
    elif hasattr(each, "__dict__") and is_own(type(each)):
        yield from (held for base in type(each).__mro__ for held in vars(base).values() if is_read(held))
        yield from filter(is_followed, vars(each).values())
    elif callable(each) and hasattr(each, "__dict__"):
        yield type(each)
        yield from vars(each).values()


def is_followed(held: Any) -> bool:
    """Whether this may be called, or hold something that is."""
    if isinstance(held, type):
        return False
    return isinstance(held, (FunctionType, MethodType, partial, dict)) or is_own(type(held))


def _methods(kind: type) -> Iterator[FunctionType]:
    """Yield a class's `forward` and `__call__`, and the methods that they name, transitively."""
    bases = [each for each in kind.__mro__ if is_read(each)]
    seen, waiting = set[str](), ["forward", "__call__"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for held in [vars(base)[name] for base in bases if name in vars(base)]:
            function = getattr(held, "__func__", held)
            if isinstance(function, FunctionType):
                yield function
                waiting.extend(names_in(function.__code__))


def is_full(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
