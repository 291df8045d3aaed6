"""Dropout masks that are the same under every plan: functions of seed, step, layer name and element position.

    place in the whole batch        which rank has it
    row                             dp, and the microbatch
    token                           cp, and sp between layers that are cut
    channel, head                   tp, inside of layers that are cut

The generator is counter-based: each element's random number is a hash of these values. So ranks need not draw in
step, and a forward recomputed for its backward drops the same elements. It serves `nn.Dropout` and these functions:

    nn.functional.dropout(hidden, 0.1, self.training)
    nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)

A dropout called several times in one forward (a reused layer, a net run twice on the same rows) gets a different mask
each time. Its calls are numbered, continuing from the earlier stages; a recomputed forward repeats the numbers of the
first one (`dropout_calls.py`).

`nn.Dropout` modules are found by type. Modules that call these functions, possibly several times, are found in one run
(`Finding`). `nn.MultiheadAttention`, which calls them inside of one of torch's functions, is found in both ways. The
position of an attention weight is its head, query and key. Attention with dropout materialises all of its weights,
because fused kernels draw their own masks.

Rows that a forward has selected, as those of one expert, have no place in the batch. Their masks are numbered as they
come: the same on ranks with the same tokens, and for a recomputed forward, but not under every plan.
"""

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from shardwise.sharding.dropout_calls import DropoutCalls
from shardwise.sharding.dropout_masks import Place, WeightDrop, factors_of, heads_of, num_tokens_of, places_of_elements
from shardwise.sharding.rng_tracker import Channels
from shardwise.sharding.wrap_forward import wrap_forward
from shardwise.stages.batch import length_of
from shardwise.stages.stage import Batch
from shardwise.torch_private import (
    SAFE_SOFTMAX,
    DropoutModule,
    attend_within_modes,
    backward_id,
    checkpoint_here,
)

__all__ = ["AttentionArguments", "Dropouts", "Finding", "Place", "WeightDrop", "num_tokens_of"]

_DROPOUT = (functional.dropout, torch.dropout)
_ATTENTION = functional.multi_head_attention_forward
_ATTENTION_ARGUMENTS = inspect.signature(_ATTENTION)
#: Modules that are known to drop by their type.
_KNOWN = (nn.Dropout, nn.MultiheadAttention)


class AttentionArguments(NamedTuple):
    """The arguments of `scaled_dot_product_attention`, in its order."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class Finding(TorchFunctionMode):
    """Finds the modules that apply dropout by calling a function, in one run of a module in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[tuple[nn.Module, Counter[nn.Module]]] = []
        self.found: list[nn.Module] = []
        #: For (outer, inner): the most calls of `inner` within one call of `outer`.
        self._within: dict[tuple[nn.Module, nn.Module], int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the run inside this context."""
        before = register_module_forward_pre_hook(lambda module, _: self._enter(module))
        after = register_module_forward_hook(lambda *_: self._leave(), always_call=True)
        try:
            with self:
                yield
        finally:
            before.remove()
            after.remove()
            self._inside.clear()

    def names(self, module: nn.Module) -> list[str]:
        """Return the names, within `module`, of the modules that were found."""
        found = {id(each) for each in self.found}
        return [name for name, each in module.named_modules() if id(each) in found]

    def callers(
        self, module: nn.Module, units: Sequence[Sequence[str]]
    ) -> tuple[tuple[str, ...], tuple[dict[str, int], ...]]:
        """Return the names of the modules found; and for each stage, given the unit calls of each stage in order, how
        often earlier stages called each dropout."""
        found: list[dict[str, int]] = []
        counts: Counter[str] = Counter()
        for calls in units:
            found.append(dict(counts))
            for unit in (each.partition("#")[0] for each in calls):
                around = module.get_submodule(unit)
                for name, each in around.named_modules(prefix=unit):
                    if isinstance(each, nn.Dropout) or any(each is one for one in self.found):
                        counts[name] += 1 if each is around else self._within.get((around, each), 0)
        return tuple(self.names(module)), tuple(found)

    def _enter(self, module: nn.Module) -> None:
        for _, counts in self._inside:
            counts[module] += 1
        self._inside.append((module, Counter()))

    def _leave(self) -> None:
        if self._inside:
            module, counts = self._inside.pop()
            for each, count in counts.items():
                self._within[module, each] = max(count, self._within.get((module, each), 0))

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self._inside and _drops(func, args, kwargs) and not isinstance(self._inside[-1][0], DropoutModule):
            self.found.append(self._inside[-1][0])
        return func(*args, **kwargs)


def _drops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func is functional.scaled_dot_product_attention:
        return bool(AttentionArguments(*args, **kwargs).dropout_p)
    if func in _DROPOUT:
        _, probability, is_training, _ = _dropout_arguments(*args, **kwargs)
        return bool(probability) and is_training
    if func is _ATTENTION:
        given = _ATTENTION_ARGUMENTS.bind(*args, **kwargs).arguments
        return bool(given["dropout_p"]) and bool(given.get("training", True))
    return False


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> tuple[Tensor, float, bool, bool]:
    """Return the arguments of `functional.dropout` or `torch.dropout`, whose names differ."""
    return input, p, training if train is None else train, inplace


def _probability_of(known: nn.Module) -> float:
    return float(known.p) if isinstance(known, nn.Dropout) else float(cast(nn.MultiheadAttention, known).dropout)


@dataclass(slots=True)
class Dropouts:
    """The dropouts of one module. `channels` returns this rank's channels while it is inside a layer that is cut.

    `attends`: attention with dropout is computed here. If False, the code that computes it calls `weight_drop`.
    """

    seed: int
    channels: Callable[[], Channels | None] = lambda: None
    attends: bool = True
    #: For each stage, how often earlier stages called each dropout.
    before: Sequence[Mapping[str, int]] = ()
    #: Called with everything that is dropped from.
    watch: Callable[[Tensor], None] | None = None
    #: Dropouts that drop nothing so far, by name: a script may set their probability later.
    resting: dict[str, nn.Module] = field(default_factory=dict)
    _places: dict[int, Place] = field(default_factory=dict)
    _now: Place | None = None
    _callers: "list[_Caller]" = field(default_factory=list)
    _calls: DropoutCalls = field(default_factory=DropoutCalls)
    #: The channels of each dropout in its last forward. A checkpoint of the module's own may begin after a column
    #: layer; its recomputation then never enters the region, so the channels must be remembered.
    _were: dict[str, Channels | None] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, object]) -> "Dropouts":
        return self  # A copy of the module, for its shapes alone, draws nothing.

    def attach(self, module: nn.Module, callers: Collection[str] = ()) -> bool:
        """Attach to every dropout of a module and to modules that call dropout functions; return whether any exist.

        `callers` are the names of the latter: see `Finding`.
        """
        every: dict[str, nn.Module] = {n: each for n, each in module.named_modules() if isinstance(each, _KNOWN)}
        for name in callers:
            wrap_forward(module.get_submodule(name), partial(self._answer, name))
            every.pop(name, None)
        self.resting = every
        return self._wake() or bool(callers)

    def _wake(self) -> bool:
        """Attach to what has come to drop; return whether there is any."""
        found = [name for name, each in self.resting.items() if _probability_of(each) > 0]
        for name in found:
            each = self.resting.pop(name)
            wrap_forward(each, partial(self._drop if isinstance(each, nn.Dropout) else self._answer, name))
        return bool(found)

    def take(self, microbatches: Sequence[Batch], first: Place) -> None:
        """Set the places of the microbatches of a step: consecutive rows, beginning at `first`."""
        self._wake()
        self._places = {key: place for key, place in self._places.items() if place.step >= first.step - 1}
        row = first.first_row
        for microbatch in microbatches:
            rows = length_of(microbatch)
            self._places[id(microbatch)] = replace(first, first_row=row, num_rows=rows)
            row += rows

    def select(self, microbatch: Batch, stage: int = 0) -> None:
        """Prepare for the forward of a microbatch on a stage, whether the first or a recomputation."""
        self.stand(self._places.get(id(microbatch)), stage)

    def stand(self, place: Place | None, stage: int = 0) -> None:
        """Set the place of the forward that follows. With None, dropout draws from torch's generators."""
        self._now = place
        self._calls.begin(self.before[stage] if self.before else {})

    def keep_calls(self) -> Callable[[], None]:
        """Return a function that resets the call counts to their present values, for the recomputation of a layer."""
        return self._calls.keep()

    def weight_drop(self, query: Tensor, probability: float) -> WeightDrop | None:
        """Return the weight dropout for these queries in the running module; None if their place is unknown."""
        return self._callers[-1].weight_drop(query, probability) if self._callers else None

    def _answer(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._callers.append(_Caller(self, self._calls.name_next(name)))
        try:
            with self._callers[-1]:
                return call(*args, **kwargs)
        finally:
            self._callers.pop()

    def _drop(self, name: str, call: Callable[..., Tensor], *args: Tensor) -> Tensor:
        (given,) = args
        module: nn.Dropout = call.args[0]  # type: ignore[attr-defined]
        factors = self.factors(self._calls.name_next(name), module.p, given) if module.training else None
        return call(given) if factors is None else given * factors

    def place_of(self, given: Tensor) -> Place | None:
        """Return the place of a tensor's rows; None if nothing is known of them. Rows that the forward has selected,
        as those of one expert, are `strange`: perhaps none, and which of the batch is not known."""
        now = self._now
        if self.watch is not None:
            self.watch(given)
        if given.is_meta or now is None or not given.dim():
            return None
        return now if len(given) and not len(given) % now.num_rows else now.strange(len(given))

    def factors(self, name: str, probability: float, given: Tensor) -> Tensor | None:
        """Return the factors by which to multiply a tensor; None if nothing is known of its place."""
        place = self.place_of(given)
        if place is None:
            return None
        drawn = places_of_elements(given, place, self.channels_of(name), self.key_of(name, place))
        return factors_of(drawn, probability).view(given.shape).to(given.dtype)

    def channels_of(self, name: str) -> Channels | None:
        """Return this rank's channels at a dropout; in a recomputation during backward, those of its last forward."""
        if backward_id() < 0:
            self._were[name] = self.channels()
        return self._were.get(name)

    def key_of(self, name: str, place: Place) -> int:
        text = f"{self.seed}/{place.step}/{name}" + place.mark
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


class _Caller(TorchFunctionMode):
    """Answers the dropout functions during one forward of a module that calls them. Calls are numbered from 1."""

    def __init__(self, dropouts: Dropouts, name: str) -> None:
        super().__init__()
        self._dropouts, self._name, self._count = dropouts, name, 0
        self._checkpoint = checkpoint_here()

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        answer: Tensor | None = None
        if checkpoint_here() is not self._checkpoint:
            # A checkpoint inside this forward reruns part of it in the backward, where this mode is not active. The
            # checkpoint restores torch's own generators, so torch's dropout repeats correctly.
            return func(*args, **kwargs)
        if func is _ATTENTION and _drops(func, args, kwargs):
            with self:
                return attend_within_modes(*args, **kwargs)
        if func in _DROPOUT and _drops(func, args, kwargs):
            answer = self._drop(*_dropout_arguments(*args, **kwargs))
        elif self._dropouts.attends and _drops(func, args, kwargs):
            answer = self._attend(AttentionArguments(*args, **kwargs))
        return func(*args, **kwargs) if answer is None else answer

    def _drop(self, given: Tensor, probability: float, _: bool, is_in_place: bool) -> Tensor | None:
        factors = self._dropouts.factors(self._next(), probability, given)
        if factors is None:
            return None
        return given.mul_(factors) if is_in_place else given * factors

    def _attend(self, given: AttentionArguments) -> Tensor | None:
        query, key, value, mask, probability, is_causal, scale, enable_gqa = given
        if query.dim() == 3:
            mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
            query, key, value = (each.unsqueeze(1) for each in (query, key, value))
            each_head = given._replace(query=query, key=key, value=value, attn_mask=mask)
            joined = None if enable_gqa else self._attend(each_head)
            return None if joined is None else joined.squeeze(1)
        drop = self.weight_drop(query, probability)
        if drop is None:
            return None
        if enable_gqa:
            sharing = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(sharing, -3), value.repeat_interleave(sharing, -3)
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        queries, keys = (torch.arange(each.shape[-2], device=query.device) for each in (query, key))
        if is_causal:
            scores = scores.masked_fill(keys > queries[:, None], float("-inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype is torch.bool else scores + mask
        # A fully masked query has weights of 0, as in torch's own attention.
        weights = SAFE_SOFTMAX(scores.float() if scores.dtype.itemsize < 4 else scores, -1)
        made: Tensor = (weights * drop.factors(queries, keys)).to(value.dtype) @ value
        return made

    def weight_drop(self, query: Tensor, probability: float) -> WeightDrop | None:
        place = self._dropouts.place_of(query)
        if place is None or query.dim() != 4:
            return None
        if len(query) != place.num_rows:
            place = place.strange(len(query))  # Windows of rows, or queries joined along them.
        return WeightDrop(
            key=self._dropouts.key_of(name := self._next(), place),
            probability=probability,
            rows=place.all_rows(query.device),
            heads=heads_of(query.shape[1], self._dropouts.channels_of(name), query.device),
        )

    def _next(self) -> str:
        self._count += 1
        return f"{self._name}#{self._count}"
