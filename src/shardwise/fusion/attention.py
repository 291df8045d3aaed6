"""Attention of Hugging Face models: rotary positions by a kernel, and torch's attention by its fastest kernel.

Their attention modules call functions by global names: one that rotates queries and keys, and the table of attention
functions. A forward with the same code and other globals replaces theirs; no globals of other code change.

The rotation function is recognised by its arguments `(q, k, cos, sin, ...)`, and by its result on a small example. It
is replaced only if the modules that make cosines and sines give the same values for both halves of a head, as the
kernel assumes. This is also tested on a small example.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.fusion.example import computes, small_copy
from shardwise.kernels.choose import takes_kernel
from shardwise.kernels.rotary import rotary
from shardwise.nets.attention import fastest_first


@dataclass(frozen=True, slots=True)
class AttentionForward:
    """A forward with replaced globals."""

    forward: Callable[..., Any]
    rotates: bool
    attends: bool

    def __call__(self, module: Any, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        del own
        return self.forward(module, *args, **kwargs)

    def __str__(self) -> str:
        words = ["rotary positions"] * self.rotates + ["torch's fastest attention"] * self.attends
        return " and ".join(words)


def find_attention(module: nn.Module, *, has_halves: bool) -> AttentionForward | str | None:
    """Return the replacement, or the reason why there is none; None if the module does not look like attention.

    `has_halves`: cosines and sines are equal in both halves of a head.
    """
    own: Any = type(module).forward
    inner: Any = inspect.unwrap(own)
    if not isinstance(inner, FunctionType):
        return None
    known, called = inner.__globals__, inner.__code__.co_names
    rotations = [name for name in called if _looks_like_rotation(known.get(name))]
    has_table = "ALL_ATTENTION_FUNCTIONS" in called and "sdpa" in known.get("ALL_ATTENTION_FUNCTIONS", ())
    if not rotations and not has_table:
        return None
    if inner is not own:
        return "its forward is wrapped in another function"
    good = [name for name in rotations if has_halves and is_rotation(known[name])]
    if not good and not has_table:
        return "its positions are turned in another way than the kernel's"
    return AttentionForward(_with_globals(own, tuple(good), has_table), bool(good), has_table)


@cache
def _with_globals(own: FunctionType, rotations: tuple[str, ...], has_table: bool) -> Callable[..., Any]:
    changed: dict[str, Any] = {name: _by_kernel(own.__globals__[name]) for name in rotations}
    if has_table:
        changed["ALL_ATTENTION_FUNCTIONS"] = _fastest_first(own.__globals__["ALL_ATTENTION_FUNCTIONS"])
    # Without `__name__`: a compiler would look up these globals in the module of that name, and find others.
    scope = {key: each for key, each in own.__globals__.items() if key != "__name__"}
    made = FunctionType(own.__code__, {**scope, **changed}, own.__name__, own.__defaults__, own.__closure__)
    made.__kwdefaults__, made.__module__ = own.__kwdefaults__, own.__module__
    return made


def _looks_like_rotation(function: Any) -> bool:
    if not callable(function) or isinstance(function, type):
        return False
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return len(names) >= 4 and names[2:4] == ["cos", "sin"]


@cache
def is_rotation(function: Callable[..., Any]) -> bool:
    """Whether a function rotates queries and keys with pairs half a head apart, as the kernel does."""
    generator = torch.Generator("cpu").manual_seed(4)
    query, key = (torch.randn((2, heads, 5, 8), generator=generator, device="cpu") for heads in (4, 2))
    angles = torch.randn((2, 5, 4), generator=generator, device="cpu")
    cosine, sine = angles.cos(), angles.sin()
    doubled = [torch.cat((each, each), -1) for each in (cosine, sine)]

    def theirs(query: Tensor, key: Tensor) -> Any:
        return function(query, key, *doubled)

    return computes(theirs, lambda query, key: rotary(query, key, cosine, sine, kernels=False), [query, key], [])


def _by_kernel(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def rotate(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not _takes_rotation(q, k, cos, sin):
            return plain(q, k, cos, sin, *args, **kwargs)
        half = cos.shape[-1] // 2
        return rotary(q, k, cos[..., :half], sin[..., :half])

    return rotate


def _takes_rotation(query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    if query.dim() != 4 or cosine.dim() != 3 or cosine.shape[-1] != query.shape[-1] or query.shape[-1] > 1024:
        return False
    if not query.dtype == key.dtype == cosine.dtype == sine.dtype or cosine.requires_grad or sine.requires_grad:
        return False
    if cosine.shape[1] != query.shape[2] or cosine.shape[0] not in (1, query.shape[0]):
        return False
    return takes_kernel("rotary", query, key, cosine, sine)


def halves_are_alike(module: nn.Module) -> bool:
    """Whether all modules that make cosines and sines of positions give both halves of a head the same values."""
    makers = [each for each in module.modules() if _makes_angles(each)]
    return bool(makers) and all(_gives_halves(each) for each in makers)


def _makes_angles(module: nn.Module) -> bool:
    names = list(inspect.signature(module.forward).parameters)
    return names[:2] == ["x", "position_ids"] and not any(True for _ in module.parameters())


def _gives_halves(module: nn.Module) -> bool:
    kinds = getattr(module, "layer_types", None)
    try:
        twin = small_copy(module)
        given = torch.zeros((1, 3, 2), device="cpu"), torch.arange(3, device="cpu")[None]
        calls = [partial(twin, *given, each) for each in set(kinds)] if kinds else [partial(twin, *given)]
        tables = [table for call in calls for table in call()]
    except Exception:  # A module may raise anything for inputs that it is not made for.
        return False
    return bool(tables) and all(
        isinstance(each, Tensor) and each.dim() == 3 and torch.equal(*each.chunk(2, dim=-1)) for each in tables
    )


def _fastest_first(table: Any) -> Any:
    """Return a copy of a table of attention functions, in which torch's tries its kernels by speed."""
    plain = table["sdpa"]

    @wraps(plain)
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if attention_mask is not None:
            return plain(module, query, key, value, attention_mask, *args, **kwargs)
        with fastest_first(query):
            return plain(module, query, key, value, attention_mask, *args, **kwargs)

    made = copy.deepcopy(table)  # With the functions that were added to this table only.
    made["sdpa"] = attend
    return made
