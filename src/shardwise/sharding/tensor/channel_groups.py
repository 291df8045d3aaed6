"""Channel-group analysis: a run on the meta device in which every channel has a label shows which stay independent.

Each output channel of a linear layer or an embedding gets its own label. Labels flow with the values: views move them,
an addition joins those of its operands, a softmax or a norm joins all that it normalises together, and a matmul joins
those that it sums over. Channels whose labels are still separate at the next linear layer can be on different ranks:

    gate  0 1 2 3 ──┐
                    * ── 0 1 2 3 ── down        four parts: channel i of gate, of up, and of down's input
    up    4 5 6 7 ──┘

    q  0 1 | 2 3 ── scores ──┐
    k  4 5 | 6 7 ────┘       @ ── 0 0 | 2 2 ── out      two parts: the heads
    v  8 9 | a b ────────────┘

Channels with joined labels form one group. The analysis knows nothing of attention, gates or names: it finds fused and
interleaved projections like separate ones. `channel_rules.py` has the effect of each operation on labels.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.errors import ShardwiseError
from shardwise.sharding.tensor.channel_labels import Labels, UnionFind, distinct
from shardwise.sharding.tensor.channel_rules import LabelFlow, Operation, ParameterChannels
from shardwise.stages.split.lines import line_of_error
from shardwise.stages.split.meta import run_or_guess, tensors_of
from shardwise.stages.split.without_gradients import without_gradients_explained
from shardwise.torch_private import EagerDispatchMode

#: Marks random numbers where an origin is otherwise the name of a parameter.
_DRAWN = ""


@dataclass(kw_only=True)
class TracedLayer:
    """A layer with output channels, as observed in the run."""

    module: nn.Module
    #: The label of its first channel, and how many there are.
    first: int
    width: int
    #: Its inputs: the tensor of each call, and for each labelled one the labels of input channels (-1 for none).
    inputs: list[Tensor] = field(default_factory=list)
    read: list[Labels] = field(default_factory=list)


@dataclass(kw_only=True)
class ChannelTrace:
    """The result of a run."""

    groups: UnionFind
    #: Which elements of parameters met which labels.
    parameters: ParameterChannels
    layers: dict[str, TracedLayer] = field(default_factory=dict)
    #: Parameters used on labelled values outside of layers: by name, the labels at each use.
    used_on: dict[str, list[Labels]] = field(default_factory=dict)
    #: Labels along the last dim of each tensor that the module returned, where there are any.
    returned: list[Labels] = field(default_factory=list)
    #: Labels of values at which random numbers were drawn.
    drawn_at: list[Labels] = field(default_factory=list)
    #: Labels of values with which a random number was combined that is the same for all of them: of a row, of a token.
    drawn_for_all: list[Labels] = field(default_factory=list)
    #: The first tensor argument of each module.
    given: dict[str, Tensor] = field(default_factory=dict)
    #: For each layer, the lists of blocks whose main stream (the first argument of blocks) reaches its input.
    streams: dict[str, frozenset[str]] = field(default_factory=dict)
    #: Tensors whose values are read by something other than layers.
    read: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    #: The module's output.
    output: Any = None
    #: Layers whose weights are read outside of them: by a second head, a penalty.
    used_outside: set[str] = field(default_factory=set)


def trace(
    twin: nn.Module, layers: Mapping[str, nn.Module], arguments: tuple[Any, ...], keywords: Mapping[str, Any],
    *, labelled: Mapping[str, int] | None = None,
) -> ChannelTrace:  # fmt: skip
    """Run a module on the meta device and follow the channels of some of its layers, or refuse it.

    `labelled`, if given, maps layers to how many of their first channels get labels. Other layers get none.
    """
    run = _LabelMode(twin, layers, labelled)
    attends = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    try:
        with without_gradients_explained(), torch.no_grad(), run.watching(), attends:
            returned = twin(*arguments, **keywords)
    except ShardwiseError:
        raise
    except Exception as error:
        raise ShardwiseError(
            f"{type(twin).__name__} does not run on the meta device, at {line_of_error(error)}, so it is not known what"
            f" can be split: {error}",
            remedy="a forward that does not read values of tensors there (padded sequences and a mask in place of"
            " packed ones, a loss of scores and labels outside of the module); or dp, pp or cp in place of tp",
        ) from error
    run.seen.output = returned
    # Hugging Face outputs are a subclass of OrderedDict.
    tensors = tensors_of(dict(returned) if isinstance(returned, dict) else returned)
    run.seen.returned += [each for each in map(run.along_last, tensors) if each is not None]
    return run.seen


class _Lists(TorchFunctionMode):
    """Turns `tensor[..., [-2], :]` into a slice. A list would reach the operations as a meta tensor without values."""

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


class _LabelMode(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Follows labels through every operation of a run, and fills a `ChannelTrace`."""

    def __init__(self, module: nn.Module, layers: Mapping[str, nn.Module], labelled: Mapping[str, int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flow = LabelFlow(module)
        self.seen = ChannelTrace(groups=self.flow.groups, parameters=self.flow.parameters)
        self._reached_by = WeakTensorKeyDictionary()
        self._root, self._modules, self._labelled = module, layers, labelled
        self._origins = WeakTensorKeyDictionary()
        self._depth = 0
        for name, parameter in module.named_parameters():
            self._origins[parameter] = frozenset([name])
        #: The layers that hold a parameter: several if it is tied.
        self._owners = WeakTensorKeyDictionary()
        for name, layer in layers.items():
            for parameter in layer.parameters(recurse=False):
                self._owners[parameter] = (*self._owners.get(parameter, ()), name)  # type: ignore[no-untyped-call]

    @contextmanager
    def watching(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in self._root.named_modules():
                stack.callback(
                    module.register_forward_pre_hook(partial(self._note_given, name), with_kwargs=True).remove
                )
            for name, module in self._modules.items():
                # Inside the user's own hooks, so that their operations count as outside of the layer.
                stack.callback(module.register_forward_pre_hook(partial(self._before, name), with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(partial(self._after, name), prepend=True).remove)
            stack.enter_context(_Lists())
            stack.enter_context(self)
            yield

    def _note_given(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if not tensors:
            return
        self.seen.given.setdefault(name, tensors[0])
        reached: frozenset[str] = self._reached_by.get(tensors[0], frozenset())  # type: ignore[no-untyped-call]
        if name in self._modules:
            self.seen.streams.setdefault(name, reached)
        parent, key = name.rpartition(".")[::2]
        if key.isdecimal():
            self._reached_by[tensors[0]] = reached | {parent}

    def _before(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._depth += 1
        args = args or tuple(kwargs.values())
        if name not in self.seen.layers:
            width = width_of(module)
            first = self.flow.groups.new(width)
            self.seen.layers[name] = TracedLayer(module=module, first=first, width=width)
        layer = self.seen.layers[name]
        labels = self.along_last(args[0]) if args[0].is_floating_point() else None
        layer.inputs.append(args[0])
        if labels is not None and layer.read:
            self.flow.groups.join(layer.read[0], labels)
        if labels is not None:
            layer.read.append(labels)

    def _after(self, name: str, _: nn.Module, args: tuple[Any, ...], returned: Tensor) -> None:
        del args
        self._depth -= 1
        layer = self.seen.layers[name]
        count = layer.width if self._labelled is None else self._labelled.get(name, 0)
        labels = torch.arange(layer.first, layer.first + layer.width)
        labels[count:] = -1
        self.flow.labels[returned] = labels.expand(returned.shape)

    def along_last(self, tensor: Tensor) -> Labels | None:
        """Return the label at each index of the last dim, joined over all other dims; None if there are no labels."""
        labels = self.flow.labels.get(tensor)  # type: ignore[no-untyped-call]
        if labels is None or not tensor.dim():
            return None
        return self.flow.joined(labels, list(range(tensor.dim() - 1))).flatten().numpy()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        # Guesses are made here, not in a second mode: that would also see the operations on labels, the majority.
        returned = run_or_guess(func, args, kwargs)
        operation, tensors = Operation(func, args, kwargs, returned), tensors_of((args, kwargs))
        self._pass_on(self._reached_by, tensors, returned)
        if self._depth:
            return returned  # Inside a layer, whose effect on labels is known.
        for each in tensors:
            self.seen.read[each] = True
            if not operation.makes_anew:
                self.seen.used_outside.update(self._owners.get(each, ()))  # type: ignore[no-untyped-call]
        if operation.makes_anew or not any(each in self.flow.labels for each in tensors):
            self._pass_on(self._origins, tensors, returned)
            self.flow.parameters.follow(operation)
            if operation.draws:
                self._origins[returned] = frozenset([_DRAWN])
            return returned
        self._note(operation, tensors)
        self.flow.follow(operation)
        return returned

    def _note(self, operation: Operation, tensors: list[Tensor]) -> None:
        origins = frozenset(chain.from_iterable(self._origins.get(each, ()) for each in tensors))  # type: ignore[no-untyped-call]
        is_drawn = operation.draws or _DRAWN in origins
        if not origins and not is_drawn:
            return
        touched = [self.flow.labels[each] for each in tensors if each in self.flow.labels]
        labels = np.unique(np.concatenate([distinct([each])[0].reshape(-1).numpy() for each in touched]))
        for name in origins - {_DRAWN}:
            self.seen.used_on.setdefault(name, []).append(labels[labels >= 0])
        if is_drawn:
            self.seen.drawn_at.append(labels[labels >= 0])
            drawn = [each for each in tensors if _DRAWN in self._origins.get(each, ())]  # type: ignore[no-untyped-call]
            if any(_is_for_all(each, one) for each in drawn for one in touched):
                # Ranks with some of these channels would each draw another.
                self.seen.drawn_for_all.append(labels[labels >= 0])
                self.seen.groups.join(labels, np.full_like(labels, labels.max()))

    def _pass_on(self, what: WeakTensorKeyDictionary, tensors: list[Tensor], returned: Any) -> None:
        """Give the results of an operation the union of its arguments' entries in `what`."""
        all_of_them = frozenset(chain.from_iterable(what.get(each, ()) for each in tensors))  # type: ignore[no-untyped-call]
        if all_of_them:
            for each in tensors_of(returned):
                what[each] = all_of_them


def width_of(module: nn.Module) -> int:
    """Return the number of output channels of a layer."""
    weight = module.weight
    assert isinstance(weight, Tensor), f"{type(module).__name__} has no weight"
    return weight.shape[0] if isinstance(module, nn.Linear) else weight.shape[1]


def _is_for_all(drawn: Tensor, labels: Tensor) -> bool:
    """Whether numbers are combined with values of several labels, and are the same for all of these."""
    behind = range(1, labels.dim() + 1)
    dims = [dim for dim in behind if labels.stride(-dim) and labels.shape[-dim] > 1]
    return bool(dims) and all(dim > drawn.dim() or drawn.shape[-dim] == 1 for dim in dims)
