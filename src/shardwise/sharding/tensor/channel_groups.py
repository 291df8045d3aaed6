"""Which channels of a module's layers stay apart: one run without numbers, in which every channel has a label.

Each output channel of a linear layer or an embedding gets a label of its own. Labels flow with the values: views move
them, an addition joins those that it adds, a softmax or a norm joins all that it normalises, and a matmul joins what it
sums over. Where another linear layer reads channels whose labels were never joined, these can be on different ranks:

    gate  0 1 2 3 ──┐
                    * ── 0 1 2 3 ── down        four parts: channel i of gate, of up, and of down's input
    up    4 5 6 7 ──┘

    q  0 1 | 2 3 ── scores ──┐
    k  4 5 | 6 7 ────┘       @ ── 0 0 | 2 2 ── out      two parts: the heads
    v  8 9 | a b ────────────┘

Nothing is known here of attention, gates or names: fused and interleaved projections are found like separate ones. An
operation that is not understood joins all that it touches, which at worst leaves a layer whole.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.sharding.tensor.channel_labels import MOVES, distinct, is_expanded, moved
from shardwise.sharding.tensor.channel_parameters import Labels, ParameterChannels
from shardwise.stages.split.meta import Guesses
from shardwise.torch_private import EagerDispatchMode, pytree, schema_of

aten = torch.ops.aten

#: They join values along a dim, which is the second argument.
_JOINS_ALONG = {
    "_softmax", "_log_softmax", "_safe_softmax", "mean", "sum", "amax", "amin", "var", "std", "logsumexp", "cumsum",
    "linalg_vector_norm", "prod", "max", "min", "var_mean", "norm", "argmax", "any", "all",
}  # fmt: skip
_NORMS = {"native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm"}
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "matmul": 0}
#: In the place of a parameter's name: random numbers.
_DRAWN = ""
_CASTS = {"_to_copy", "to", "type_as", "contiguous", "native_dropout", "bernoulli", "dropout"}


@dataclass(kw_only=True)
class TracedLayer:
    """A layer with output channels, as it was seen in the run."""

    name: str
    module: nn.Module
    #: The label of its first channel, and how many there are.
    first: int
    width: int
    #: What it read: each call's tensor, and the label of each input channel (-1 for none), by the first call.
    inputs: list[Tensor] = field(default_factory=list)
    read: list[Labels] = field(default_factory=list)


class UnionFind:
    """Labels, joined into parts."""

    def __init__(self) -> None:
        self._parent: list[int] = []

    def new(self, count: int) -> int:
        """Make labels, each a part of its own, and return the first."""
        first = len(self._parent)
        self._parent += range(first, first + count)
        return first

    def find(self, label: int) -> int:
        parent = self._parent
        while parent[label] != label:
            parent[label] = label = parent[parent[label]]
        return label

    def join(self, some: Labels, others: Labels) -> None:
        """Join labels pairwise. -1 is none."""
        both = (some >= 0) & (others >= 0) & (some != others)
        if both.any():
            # Each pair as one number, in the order of pairs: sorting rows of two takes far longer.
            count = len(self._parent)
            pairs = np.unique(some[both] * count + others[both])
            for one, other in zip(*(each.tolist() for each in np.divmod(pairs, count)), strict=True):
                self._parent[self.find(one)] = self.find(other)

    def roots(self, labels: Labels) -> Labels:
        """The part of each label; -1 stays -1."""
        values, where = np.unique(labels, return_inverse=True)
        found = np.array([self.find(int(value)) if value >= 0 else -1 for value in values], dtype=np.int64)
        return found[where].reshape(labels.shape)


@dataclass(kw_only=True)
class ChannelTrace:
    """What came of a run."""

    partition: UnionFind
    layers: dict[str, TracedLayer]
    #: Parameters, outside of layers, that were used on labelled values: their names, and some of the labels.
    used_on: dict[str, Labels]
    #: Labels of the last dim of each tensor that the module returned, where it has any.
    returned: list[Labels]
    #: Labels of values at which random numbers were drawn.
    drawn_at: list[Labels]
    #: The first tensor that each module was given.
    given: dict[str, Tensor]
    #: For each layer, of which lists of blocks the main stream (what blocks are given first) reached its input.
    streams: dict[str, frozenset[str]]
    #: Tensors of which something else than layers read the numbers.
    read: WeakTensorKeyDictionary
    #: Which numbers of parameters met which labels.
    elements: ParameterChannels


def trace(
    twin: nn.Module, layers: Mapping[str, nn.Module], arguments: tuple[Any, ...], keywords: Mapping[str, Any],
    *, labelled: Mapping[str, int] | None = None,
) -> ChannelTrace:  # fmt: skip
    """Run a module on the meta device and follow the channels of some of its layers.

    `labelled`, where given, says how many of the first channels of which layers get labels; others get none.
    """
    run = _Run(twin, layers, labelled)
    with torch.no_grad(), run.watching(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        returned = twin(*arguments, **keywords)
    tensors = [each for each in pytree.tree_leaves(_plain(returned)) if isinstance(each, Tensor)]
    found = [run.along_last(each) for each in tensors]
    return ChannelTrace(
        partition=run.partition,
        layers=run.layers,
        used_on={name: np.unique(np.concatenate(labels)) for name, labels in run.used_on.items()},
        returned=[each for each in found if each is not None],
        drawn_at=run.drawn_at,
        given=run.given,
        streams=run.streams,
        read=run.read,
        elements=run.elements,
    )


def _plain(returned: Any) -> Any:
    """Outputs of Hugging Face are ordered dictionaries of a type of their own."""
    return dict(returned) if isinstance(returned, dict) else returned


class _Lists(TorchFunctionMode):
    """Makes `tensor[..., [-2], :]` a slice. As a list it would reach the operations as a tensor without numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            args = (args[0], tuple(map(_as_slice, args[1])))
        return func(*args, **(kwargs or {}))


def _as_slice(index: Any) -> Any:
    if isinstance(index, list) and len(index) == 1 and type(index[0]) is int:
        return slice(index[0], index[0] + 1 or None)
    return index


class _Run(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Follows labels through every operation."""

    def __init__(self, module: nn.Module, layers: Mapping[str, nn.Module], labelled: Mapping[str, int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.partition = UnionFind()
        self.layers: dict[str, TracedLayer] = {}
        self.used_on: dict[str, list[Labels]] = {}
        self.drawn_at: list[Labels] = []
        self.given: dict[str, Tensor] = {}
        self.streams: dict[str, frozenset[str]] = {}
        self.read = WeakTensorKeyDictionary()
        self.elements = ParameterChannels(module)
        self._reached_by = WeakTensorKeyDictionary()
        self._root, self._modules, self._labelled = module, layers, labelled
        self._labels = WeakTensorKeyDictionary()
        self._origins = WeakTensorKeyDictionary()
        self._depth = 0
        for name, parameter in module.named_parameters():
            self._origins[parameter] = frozenset([name])

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._root.named_modules():
                stack.callback(module.register_forward_pre_hook(self._note_given(name), with_kwargs=True).remove)
            for name, module in self._modules.items():
                stack.callback(module.register_forward_pre_hook(self._before(name)).remove)
                stack.callback(module.register_forward_hook(self._after(name)).remove)
            stack.enter_context(_Lists())
            stack.enter_context(Guesses())  # type: ignore[no-untyped-call]
            stack.enter_context(self)
            yield

    def _note_given(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del module
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
            if not tensors:
                return
            self.given.setdefault(name, tensors[0])
            reached: frozenset[str] = self._reached_by.get(tensors[0], frozenset())  # type: ignore[no-untyped-call]
            if name in self._modules:
                self.streams.setdefault(name, reached)
            parent, _, key = name.rpartition(".")
            if key.isdecimal():
                self._reached_by[tensors[0]] = reached | {parent}

        return hook

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._depth += 1
            if name not in self.layers:
                width = width_of(module)
                first = self.partition.new(width)
                self.layers[name] = TracedLayer(name=name, module=module, first=first, width=width)
            layer = self.layers[name]
            labels = self.along_last(args[0]) if args[0].is_floating_point() else None
            layer.inputs.append(args[0])
            if labels is not None and layer.read:
                self.partition.join(layer.read[0], labels)
            if labels is not None:
                layer.read.append(labels)

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], returned: Tensor) -> None:
            del module, args
            self._depth -= 1
            layer = self.layers[name]
            count = layer.width if self._labelled is None else self._labelled.get(name, 0)
            labels = torch.arange(layer.first, layer.first + layer.width)
            labels[count:] = -1
            self._labels[returned] = labels.expand(returned.shape)

        return hook

    def along_last(self, tensor: Tensor) -> Labels | None:
        """The label of each place along the last dim, joined over all others; None if there are no labels."""
        shadow = self._labels.get(tensor)  # type: ignore[no-untyped-call]
        if shadow is None or not tensor.dim():
            return None
        return self._joined(shadow, list(range(tensor.dim() - 1))).flatten().numpy()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self._pass_on(self._reached_by, tensors, returned)
        if self._depth:
            return returned  # Inside a layer: what it makes of its input is known.
        for each in tensors:
            self.read[each] = True
        if _makes_anew(func) or not any(each in self._labels for each in tensors):
            self._pass_on(self._origins, tensors, returned)
            self.elements.follow(func, args, kwargs, returned)
            if torch.Tag.nondeterministic_seeded in func.tags:
                self._origins[returned] = frozenset([_DRAWN])
            return returned
        self._note(func, tensors)
        shadows = self._propagate(func, args, kwargs, returned)
        made = [each for each in pytree.tree_leaves(returned) if isinstance(each, Tensor)]
        for tensor, shadow in zip(made, shadows, strict=False):
            self._labels[tensor] = shadow
        return returned

    def _note(self, func: Any, tensors: list[Tensor]) -> None:
        origins = frozenset(chain.from_iterable(self._origins.get(each, ()) for each in tensors))  # type: ignore[no-untyped-call]
        touched = [self._labels[each] for each in tensors if each in self._labels]
        labels = np.unique(np.concatenate([distinct([each])[0].reshape(-1).numpy() for each in touched]))
        for name in origins - {_DRAWN}:
            self.used_on.setdefault(name, []).append(labels[labels >= 0])
        if torch.Tag.nondeterministic_seeded in func.tags or _DRAWN in origins:
            self.drawn_at.append(labels[labels >= 0])

    def _pass_on(self, what: WeakTensorKeyDictionary, tensors: list[Tensor], returned: Any) -> None:
        """Give what an operation returns all that its arguments have."""
        all_of_them = frozenset(chain.from_iterable(what.get(each, ()) for each in tensors))  # type: ignore[no-untyped-call]
        if all_of_them:
            for each in pytree.tree_leaves(returned):
                if isinstance(each, Tensor):
                    what[each] = all_of_them

    def _shadow(self, each: Any) -> Any:
        """The labels of a tensor; -1 where it has none."""
        if not isinstance(each, Tensor):
            return each
        shadow = self._labels.get(each)  # type: ignore[no-untyped-call]
        return torch.full((1,) * each.dim(), -1).expand(each.shape) if shadow is None else shadow

    def _propagate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> list[Tensor]:
        """The labels of what an operation returns."""
        name = schema_of(func).name.removeprefix("aten::")
        base = name.rstrip("_") if schema_of(func).is_mutable else name
        if name == "cat":
            self._meet_beside(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
        if name in MOVES:
            return moved(func, name, pytree.tree_map(self._shadow, args), kwargs, returned)
        first = self._shadow(args[0])
        if base in _CASTS:
            return [first, first]
        if base in _JOINS_ALONG and not any(isinstance(each, Tensor) for each in args[1:]):
            # Norms are given their order first.
            given = args[2:] if base in ("linalg_vector_norm", "norm") else args[1:]
            dims = _dims(given[0] if given else kwargs.get("dim"), first.dim())
            return [self._fit(self._joined(first, dims), each) for each in pytree.tree_leaves(returned)]
        if base in _NORMS:
            dims = list(range(first.dim() - len(args[1]), first.dim()))
            joined = self._joined(first, dims)
            return [self._fit(joined, each) for each in pytree.tree_leaves(returned) if isinstance(each, Tensor)]
        if base in _PRODUCTS:
            return [self._product(args, _PRODUCTS[base], returned)]
        if torch.Tag.pointwise in func.tags or base in ("copy", "masked_fill", "where"):
            shadow = self._together([self._shadow(each) for each in args if isinstance(each, Tensor)], returned)
            self.elements.meet(args, shadow)
            if schema_of(func).is_mutable:
                first.copy_(shadow) if not is_expanded(first) else self._labels.__setitem__(args[0], shadow)
            return [shadow]
        return self._not_understood(args, kwargs, returned)

    def _meet_beside(self, tensors: list[Tensor], dim: int) -> None:
        """Parameters that are put beside labelled values (a score that each head has for nothing) meet those."""
        labelled = [self._labels[each] for each in tensors if each in self._labels and each.numel()]
        for each in tensors:
            if labelled and each.dim() == labelled[0].dim():
                self.elements.meet((each,), labelled[0].narrow(dim, 0, 1).expand(each.shape))

    def _fit(self, joined: Tensor, returned: Tensor) -> Tensor:
        """Labels with their joined dims of length 1, in the shape of what was returned, with or without these dims."""
        if joined.dim() != returned.dim():
            return joined.reshape(returned.shape)
        return joined.expand(returned.shape)

    def _joined(self, shadow: Tensor, dims: list[int]) -> Tensor:
        """Join all labels along some dims, which are left with length 1."""
        if not dims:
            return shadow
        (small,) = distinct([shadow])
        highest = small.amax(dims, keepdim=True)
        self.partition.join(small.reshape(-1).numpy(), highest.expand(small.shape).reshape(-1).numpy())
        shape = list(shadow.shape)
        for dim in dims:
            shape[dim] = 1
        return highest.expand(shape)

    def _together(self, shadows: list[Tensor], returned: Tensor) -> Tensor:
        """Join labels that meet, place by place."""
        result, *others = distinct([each.expand(returned.shape) for each in shadows])
        for other in others:
            self.partition.join(result.reshape(-1).numpy(), other.reshape(-1).numpy())
            result = torch.maximum(result, other)
        return result.expand(returned.shape)

    def _product(self, args: tuple[Any, ...], skip: int, returned: Tensor) -> Tensor:
        left, right = self._shadow(args[skip]), self._shadow(args[skip + 1])
        rows, columns = self._joined(left, [left.dim() - 1]), self._joined(right, [right.dim() - 2])
        together = [rows, columns, *([self._shadow(args[0])] if skip else [])]
        return self._together(together, returned)

    def _not_understood(self, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> list[Tensor]:
        """Join everything."""
        touched = [self._labels[each] for each in pytree.tree_leaves((args, kwargs))
                   if isinstance(each, Tensor) and each in self._labels]  # fmt: skip
        labels = np.concatenate([distinct([each])[0].reshape(-1).numpy() for each in touched])
        labels = labels[labels >= 0]
        one = int(labels[0]) if len(labels) else -1
        self.partition.join(labels, np.full_like(labels, one))
        return [
            torch.full((1,) * each.dim(), one).expand(each.shape)
            for each in pytree.tree_leaves(returned) if isinstance(each, Tensor)
        ]  # fmt: skip


def _dims(given: Any, count: int) -> list[int]:
    """The dims that an operation is given: one, some, or (none) all."""
    if given is None or given == []:
        return list(range(count))
    return [given] if isinstance(given, int) else list(given)


def _makes_anew(func: Any) -> bool:
    """Whether an operation takes only the shape of what it is given: zeros_like, new_empty."""
    name: str = schema_of(func).name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")


def width_of(module: nn.Module) -> int:
    """How many output channels a layer has."""
    weight = module.weight
    assert isinstance(weight, Tensor), f"{type(module).__name__} has no weight"
    return weight.shape[0] if isinstance(module, nn.Linear) else weight.shape[1]
