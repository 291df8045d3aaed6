"""Dropout whose masks no plan changes: they come from the seed, the step, the layer's name and a number's place.

    place in the whole batch        which rank has it
    row                             dp, and the microbatch
    token                           cp, and sp between layers that are cut
    channel, head                   tp, inside of layers that are cut

It is a counter-based generator: a number is hashed from these, so that no rank draws what others use, and a forward
that is recomputed for its backward drops the same. It is for `nn.Dropout`, and for functions that drop:

    nn.functional.dropout(hidden, 0.1, self.training)
    nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.1)

One that is called several times in a forward (a layer that is used again, a net that is run twice on the same rows)
drops something else each time: its calls are counted, from those of stages before on, and a second run for a backward
counts as the first did (`dropout_calls.py`).

An `nn.Dropout` is seen in the module. Who calls such a function is seen in one run of it (`Finding`); of those a module
may call several, and weights of attention have a place by their head, their query and their key. Attention that drops
computes all of its weights: kernels that do not, draw their own.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from shardwise.ranks.collectives import longest_piece
from shardwise.sharding.dropout_calls import DropoutCalls
from shardwise.sharding.rng_tracker import Channels
from shardwise.sharding.wrap_forward import wrap_forward
from shardwise.stages.batch import length_of
from shardwise.stages.rows import tensors_in
from shardwise.stages.stage import Batch
from shardwise.torch_private import SAFE_SOFTMAX, DropoutModule, backward_id, checkpoint_here

# The increment and multipliers of splitmix64 (Steele et al. 2014), as signed numbers.
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
#: A mask is drawn with so many bits.
_BITS = 24
_DROPOUT = (functional.dropout, torch.dropout)


class AttentionArguments(NamedTuple):
    """Those of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class Finding(TorchFunctionMode):
    """Sees which modules drop at random by calling a function, in a run of a module in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[tuple[nn.Module, Counter[nn.Module]]] = []
        self.found: list[nn.Module] = []
        #: How often a module is called in one call of another that is around it.
        self._within: dict[tuple[nn.Module, nn.Module], int] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Where the run is."""
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
        """Those of the module's that do."""
        found = {id(each) for each in self.found}
        return [name for name, each in module.named_modules() if id(each) in found]

    def callers(
        self, module: nn.Module, units: Sequence[Sequence[str]]
    ) -> tuple[tuple[str, ...], tuple[dict[str, int], ...]]:
        """Those of the module's that do; and for each stage, by the calls of its units in order, how often what drops
        was called before it."""
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
    return False


def _dropout_arguments(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> tuple[Tensor, float, bool, bool]:
    """The arguments of both, whose names differ."""
    return input, p, training if train is None else train, inplace


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the numbers of a microbatch stand: its rows in the batch of a step, and its tokens in their sequences.

    `rows` None: they are one after the other. `tokens` None: all of them, in order. `num_pieces` and `piece`: where a
    sequence may be cut again, this rank's part.
    """

    step: int
    first_row: int
    num_rows: int = 1
    rows: Tensor | None = None
    num_tokens: int | None = None
    tokens: Tensor | None = None
    piece: int = 0
    num_pieces: int = 1

    def all_rows(self, device: torch.device) -> Tensor:
        if self.rows is not None:
            return self.rows.to(device, non_blocking=True)
        return torch.arange(self.first_row, self.first_row + self.num_rows, device=device)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightDrop:
    """Drops weights of one attention. `rows` and `heads` are the places of those that are here."""

    key: int
    probability: float
    rows: Tensor
    heads: Tensor

    def factors(self, queries: Tensor, keys: Tensor) -> Tensor:
        """What weights are multiplied by, [rows, heads, queries, keys], for the places of queries and of keys."""
        drawn = _mixed(self.rows * _GOLDEN + self.key)
        for places in (self.heads, queries, keys):
            drawn = _mixed(drawn.unsqueeze(-1) + places * _GOLDEN)
        return _factors(drawn, self.probability)

    def of_heads(self, some: range) -> "WeightDrop":
        """The same for a run of the heads that are here."""
        return replace(self, heads=self.heads[some.start : some.stop])


@dataclass(slots=True)
class Dropouts:
    """The dropouts of one module. `channels` says which channels this rank is at, inside of layers that are cut.

    `attends`: attention that drops is computed here; else whoever computes it asks for `weight_drop`.
    """

    seed: int
    channels: Callable[[], Channels | None] = lambda: None
    attends: bool = True
    #: For each stage, how often what drops was called by stages before.
    before: Sequence[Mapping[str, int]] = ()
    _places: dict[int, Place] = field(default_factory=dict)
    _now: Place | None = None
    _callers: "list[_Caller]" = field(default_factory=list)
    _calls: DropoutCalls = field(default_factory=DropoutCalls)
    #: Where each that drops was when it was last run: a checkpoint of the module's own may begin behind a layer that is
    #: cut, and then nobody is seen to enter what is between it and the next.
    _were: dict[str, Channels | None] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, object]) -> "Dropouts":
        return self  # A copy of the module, for its shapes alone, draws nothing.

    def attach(self, module: nn.Module, callers: Collection[str] = ()) -> bool:
        """Let every dropout of a module draw from here, and the modules that drop by functions; whether there is one.

        `callers` are these by name: see `Finding`.
        """
        found = {name: each for name, each in module.named_modules() if isinstance(each, nn.Dropout) and each.p > 0}
        for name, each in found.items():
            wrap_forward(each, partial(self._drop, name))
        for name in callers:
            wrap_forward(module.get_submodule(name), partial(self._answer, name))
        return bool(found or callers)

    def take(self, microbatches: Sequence[Batch], first: Place) -> None:
        """Say where the microbatches of a step stand, which come one after the other from a first place on."""
        self._places = {key: place for key, place in self._places.items() if place.step >= first.step - 1}
        row = first.first_row
        for microbatch in microbatches:
            rows = length_of(microbatch)
            self._places[id(microbatch)] = replace(first, first_row=row, num_rows=rows)
            row += rows

    def select(self, microbatch: Batch, stage: int = 0) -> None:
        """A forward of a microbatch on a stage is about to be run, for the first time or again."""
        self.stand(self._places.get(id(microbatch)), stage)

    def stand(self, place: Place | None, stage: int = 0) -> None:
        """What is run from now on is here; None: it draws as torch does."""
        self._now = place
        self._calls.begin(self.before[stage] if self.before else {})

    def keep_calls(self) -> Callable[[], None]:
        """What has calls counted on from here, when a layer is run again."""
        return self._calls.keep()

    def weight_drop(self, query: Tensor, probability: float) -> WeightDrop | None:
        """What drops the weights of an attention by these queries, in the module that is running; None if unknown."""
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
        """Where the rows of a tensor stand, if that is known."""
        now = self._now
        return None if given.is_meta or now is None or given.shape[0] % now.num_rows else now

    def factors(self, name: str, probability: float, given: Tensor) -> Tensor | None:
        """What a tensor is multiplied by; None if its place is not known."""
        place = self.place_of(given)
        if place is None:
            return None
        rows = place.all_rows(given.device)
        inner = _inner_places(given, place, self.channels_of(name))
        key = self.key_of(name, place)
        drawn = _mixed(_mixed(rows * _GOLDEN + key).unsqueeze(1) + inner * _GOLDEN)
        return _factors(drawn, probability).view(given.shape).to(given.dtype)

    def channels_of(self, name: str) -> Channels | None:
        """Which channels are there where this one drops; in a backward, which runs it again, as before."""
        if backward_id() < 0:
            self._were[name] = self.channels()
        return self._were.get(name)

    def key_of(self, name: str, place: Place) -> int:
        text = f"{self.seed}/{place.step}/{name}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


class _Caller(TorchFunctionMode):
    """One forward of a module that drops by functions, which are answered meanwhile. Each of its calls has a number."""

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
            # A checkpoint inside of this forward runs a part of it again in the backward, where nobody answers. It puts
            # torch's own generators back.
            return func(*args, **kwargs)
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
        # A query that sees nothing has weights of 0, as in torch's own.
        weights = SAFE_SOFTMAX(scores.float() if scores.dtype.itemsize < 4 else scores, -1)
        made: Tensor = (weights * drop.factors(queries, keys)).to(value.dtype) @ value
        return made

    def weight_drop(self, query: Tensor, probability: float) -> WeightDrop | None:
        place = self._dropouts.place_of(query)
        if place is None or query.dim() != 4 or query.shape[0] != place.num_rows:
            return None
        return WeightDrop(
            key=self._dropouts.key_of(name := self._next(), place),
            probability=probability,
            rows=place.all_rows(query.device),
            heads=_heads_of(query.shape[1], self._dropouts.channels_of(name), query.device),
        )

    def _next(self) -> str:
        self._count += 1
        return f"{self._name}#{self._count}"


def num_tokens_of(batch: Batch) -> int | None:
    """How many tokens a sequence of a batch has, as far as one can see."""
    return next((each.shape[1] for each in tensors_in(batch) if each.dim() > 1), None)


def _inner_places(given: Tensor, place: Place, channels: Channels | None) -> Tensor:
    """For each number of a row, in order, its place in the row of one device."""
    several = given.shape[0] // place.num_rows
    wholes = [*([several] if several > 1 else []), *given.shape[1:]]
    axes = [torch.arange(size, device=given.device) for size in wholes]
    offset = _place_channels(axes, wholes, channels)
    _place_tokens(axes, wholes, place)
    found = torch.full((1,), offset, dtype=torch.int64, device=given.device)
    for axis, whole in zip(axes, wholes, strict=True):
        found = (found.unsqueeze(1) * whole + axis).flatten()
    return found


def _place_channels(axes: list[Tensor], wholes: list[int], channels: Channels | None) -> int:
    """Inside of layers that are cut: the last dim is channels, or the first of three is heads.

    Of another form it is not known which numbers these are: then ranks differ by what is returned.
    """
    if channels is None:
        return 0
    mine = torch.tensor(channels.places)
    if axes and len(axes[-1]) == len(mine):
        axes[-1], wholes[-1] = mine.to(axes[-1].device), channels.whole
        return 0
    if len(axes) == 3 and len(mine) % len(axes[0]) == 0:
        size = len(mine) // len(axes[0])
        axes[0], wholes[0] = _heads_of(len(axes[0]), channels, axes[0].device), channels.whole // size
        return 0
    return 1 + channels.places[0] if channels.places else 0


def _heads_of(num_heads: int, channels: Channels | None, device: torch.device) -> Tensor:
    """The places of so many heads: all of them, or inside of layers that are cut those whose channels are here."""
    if channels is None or len(channels.places) % num_heads:
        return torch.arange(num_heads, device=device)
    size = len(channels.places) // num_heads
    # A host that waited for the copy would wait for all that its GPU has to do before.
    return (torch.tensor(channels.places[::size]) // size).to(device, non_blocking=True)


def _place_tokens(axes: list[Tensor], wholes: list[int], place: Place) -> None:
    """The first dim that has as many numbers as this rank has tokens, or a piece of them, is that of tokens."""
    if place.num_tokens is None:
        return
    tokens = torch.arange(place.num_tokens) if place.tokens is None else place.tokens
    size = longest_piece(place.num_tokens, place.num_pieces)
    piece = tokens[place.piece * size : (place.piece + 1) * size]
    # Behind tokens come channels, and before queries and keys come heads: there may be as many of either.
    first = 1 if len(axes) == 3 and len(axes[1]) == len(axes[2]) else 0
    for number, axis in list(enumerate(axes))[first : max(1, len(axes) - 1)]:
        if len(axis) not in (len(tokens), len(piece)):
            continue
        # Tokens come first in a row, so that how many there are changes no number's place.
        axes[number] = (tokens if len(axis) == len(tokens) else piece).to(axis.device, non_blocking=True)
        wholes[number] = 2**31
        return


def _factors(drawn: Tensor, probability: float) -> Tensor:
    """What is kept is multiplied so that the mean stays; what is dropped is 0."""
    if probability >= 1:
        return torch.zeros_like(drawn, dtype=torch.float32)
    keeps: Tensor = _shifted(drawn, 64 - _BITS) >= int(probability * 2**_BITS)
    return keeps.to(torch.float32).mul_(1 / (1 - probability))


def _mixed(numbers: Tensor) -> Tensor:
    """Numbers of 64 bits, each hashed to another."""
    numbers = (numbers ^ _shifted(numbers, 30)) * _FIRST
    numbers = (numbers ^ _shifted(numbers, 27)) * _SECOND
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in."""
    shifted: Tensor = (numbers >> by) & (2 ** (64 - by) - 1)
    return shifted
