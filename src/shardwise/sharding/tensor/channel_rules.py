"""Channel-group analysis: the effect of each aten operation on labels, as a table.

    moves           view, cat, slice ...       labels move with the values
    casts           to, dropout ...            labels stay
    reductions      softmax, sum, max ...      labels that are reduced together are joined
    norms           layer_norm, rms_norm       labels that are normalised together are joined
    matmuls         mm, bmm, addmm ...         labels that are summed over are joined
    pointwise       mul, where ...             labels of elements that are combined are joined
    anything else                              all labels are joined

Joining too much is safe: at worst a layer stays whole. Joining too little would separate dependent channels.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.sharding.tensor.channel_labels import MOVES, Labels, UnionFind, distinct, is_expanded, moved
from shardwise.stages.split.meta import tensors_of
from shardwise.torch_private import pytree, schema_of


class Operation(NamedTuple):
    """One call of an aten operator, and its result."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    returned: Any

    @property
    def name(self) -> str:
        name: str = schema_of(self.func).name.removeprefix("aten::")
        return name

    @property
    def is_in_place(self) -> bool:
        return bool(schema_of(self.func).is_mutable)

    @property
    def makes_anew(self) -> bool:
        """Whether it uses only the shape of its argument: zeros_like, new_empty."""
        name = self.name
        return name.endswith("_like") or name.startswith("new_")

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return torch.Tag.nondeterministic_seeded in self.func.tags

    @property
    def made(self) -> list[Tensor]:
        """The tensors that it returned."""
        return tensors_of(self.returned)


#: A parameter with more elements is a matrix, without one number per channel.
_MOST_NUMBERS = 2**18


class ParameterChannels:
    """Parameters between layers: which of their elements meets which channel or head.

        hidden = up(x) * self.scale            scale[i] meets channel i, and goes where channel i goes
        scores = q @ k.mT * self.temperature   temperature[h] meets all values of head h

    Elements are followed through a run to the point where they meet labelled values. A parameter whose every element
    meets channels of all ranks (a scale over one head's channels, used by all heads) cannot be cut.
    """

    def __init__(self, module: nn.Module) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        #: For each parameter, pairs of arrays: flat indices of its elements, and the labels that they met.
        self.met: dict[str, list[tuple[Labels, Labels]]] = {}
        self._places = WeakTensorKeyDictionary()
        for name, parameter in module.named_parameters():
            self.shapes[name] = tuple(parameter.shape)
            if parameter.numel() <= _MOST_NUMBERS:
                self._places[parameter] = name, torch.arange(parameter.numel()).view(parameter.shape)

    def follow(self, operation: Operation) -> None:
        """Follow the elements of a parameter through an operation without labels, if it moves or casts them."""
        func, args, kwargs, returned = operation
        known = self._find(args[0]) if args else None
        if known is None or tensors_of((args[1:], kwargs)):
            return
        name, places = known
        if operation.name in MOVES:
            made = moved(func, operation.name, (places, *args[1:]), kwargs, returned)
        elif isinstance(returned, Tensor) and returned.shape == places.shape:
            made = [places]
        else:
            return
        for tensor, each in zip(operation.made, made, strict=True):
            self._places[tensor] = name, each

    def meet(self, args: tuple[Any, ...], labels: Tensor) -> None:
        """Record that parameters among `args` of a pointwise operation meet the labels of its result."""
        for each in args:
            known = self._find(each)
            if known is not None:
                name, places = known
                here, met = distinct([places.expand(labels.shape), labels])
                self.met.setdefault(name, []).append((here.reshape(-1).numpy(), met.reshape(-1).numpy()))

    def _find(self, each: Any) -> tuple[str, Tensor] | None:
        return self._places.get(each) if isinstance(each, Tensor) else None  # type: ignore[no-untyped-call]


class LabelFlow:
    """The labels of every tensor of a run so far, and the groups into which they are joined."""

    def __init__(self, module: nn.Module) -> None:
        self.groups = UnionFind()
        self.parameters = ParameterChannels(module)
        self.labels = WeakTensorKeyDictionary()

    def of(self, each: Any) -> Any:
        """Return the labels of a tensor, -1 where it has none. Return anything else unchanged."""
        if not isinstance(each, Tensor):
            return each
        labels = self.labels.get(each)  # type: ignore[no-untyped-call]
        return torch.full((1,) * each.dim(), -1).expand(each.shape) if labels is None else labels

    def follow(self, operation: Operation) -> None:
        """Label the results of an operation."""
        labels = rule_for(operation)(self, operation)
        for tensor, each in zip(operation.made, labels, strict=False):
            self.labels[tensor] = each

    def joined(self, labels: Tensor, dims: list[int]) -> Tensor:
        """Join all labels along some dims, which then have length 1."""
        if not dims:
            return labels
        (small,) = distinct([labels])
        highest = small.amax(dims, keepdim=True)
        self.groups.join(small.reshape(-1).numpy(), highest.expand(small.shape).reshape(-1).numpy())
        shape = list(labels.shape)
        for dim in dims:
            shape[dim] = 1
        return highest.expand(shape)

    def together(self, several: list[Tensor], returned: Tensor) -> Tensor:
        """Join labels elementwise, after broadcasting to the shape of the result."""
        result, *others = distinct([each.expand(returned.shape) for each in several])
        for other in others:
            self.groups.join(result.reshape(-1).numpy(), other.reshape(-1).numpy())
            result = torch.maximum(result, other)
        return result.expand(returned.shape)


#: Returns the labels of the results of an operation.
Rule = Callable[[LabelFlow, Operation], list[Tensor]]


def _move(flow: LabelFlow, operation: Operation) -> list[Tensor]:
    func, args, kwargs, returned = operation
    if operation.name == "cat":
        _meet_beside(flow, args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))
    return moved(func, operation.name, pytree.tree_map(flow.of, args), kwargs, returned)


def _meet_beside(flow: LabelFlow, tensors: list[Tensor], dim: int) -> None:
    """Let parameters that are concatenated to labelled values (the sink score of each head) meet their labels."""
    labelled = [flow.labels[each] for each in tensors if each in flow.labels and each.numel()]
    for each in tensors:
        if labelled and each.dim() == labelled[0].dim():
            flow.parameters.meet((each,), labelled[0].narrow(dim, 0, 1).expand(each.shape))


def _cast(flow: LabelFlow, operation: Operation) -> list[Tensor]:
    labels = flow.of(operation.args[0])
    return [labels, labels]


def _reduce(flow: LabelFlow, operation: Operation) -> list[Tensor]:
    """Join along the reduced dims. These are the second argument of reductions and the third of norms."""
    if any(isinstance(each, Tensor) for each in operation.args[1:]):
        return _untabled(operation)(flow, operation)  # `max` of two tensors has the same name.
    given = operation.args[2 if operation.name in ("linalg_vector_norm", "norm") else 1 :]
    labels = flow.of(operation.args[0])
    joined = flow.joined(labels, _dims(given[0] if given else operation.kwargs.get("dim"), labels.dim()))
    return [_fit(joined, each) for each in pytree.tree_leaves(operation.returned)]


def _normalise(flow: LabelFlow, operation: Operation) -> list[Tensor]:
    labels = flow.of(operation.args[0])
    joined = flow.joined(labels, list(range(labels.dim() - len(operation.args[1]), labels.dim())))
    return [_fit(joined, each) for each in operation.made]


def _multiply(flow: LabelFlow, operation: Operation) -> list[Tensor]:
    """Keep labels of the left factor's rows and the right one's columns. addmm and the like take the addend first."""
    added = [flow.of(operation.args[0])] if "add" in operation.name else []
    left, right = (flow.of(each) for each in operation.args[len(added) : len(added) + 2])
    rows, columns = flow.joined(left, [left.dim() - 1]), flow.joined(right, [right.dim() - 2])
    return [flow.together([rows, columns, *added], operation.returned)]


def _pointwise(flow: LabelFlow, operation: Operation) -> list[Tensor]:
    args, returned = operation.args, operation.returned
    labels = flow.together([flow.of(each) for each in args if isinstance(each, Tensor)], returned)
    flow.parameters.meet(args, labels)
    if operation.is_in_place:
        first = flow.of(args[0])
        if is_expanded(first):
            flow.labels[args[0]] = labels
        else:
            first.copy_(labels)
    return [labels]


def _join_all(flow: LabelFlow, operation: Operation) -> list[Tensor]:
    """Join all labels of the arguments: the operation is unknown."""
    given = tensors_of((operation.args, operation.kwargs))
    touched = [flow.labels[each] for each in given if each in flow.labels]
    labels = np.concatenate([distinct([each])[0].reshape(-1).numpy() for each in touched])
    labels = labels[labels >= 0]
    one = int(labels[0]) if len(labels) else -1
    flow.groups.join(labels, np.full_like(labels, one))
    return [torch.full((1,) * each.dim(), one).expand(each.shape) for each in operation.made]


def _table(rows: Iterable[tuple[Rule, str]]) -> dict[str, Rule]:
    return {name: rule for rule, names in rows for name in names.split()}


#: By the name of the operator, without the trailing underscore of in-place variants.
RULES = _table(
    [
        (_cast, "_to_copy to type_as contiguous native_dropout bernoulli dropout"),
        (_reduce, "_softmax _log_softmax _safe_softmax mean sum amax amin var std logsumexp cumsum prod max min"),
        (_reduce, "linalg_vector_norm norm var_mean argmax any all"),
        (_normalise, "native_layer_norm _fused_rms_norm rms_norm layer_norm"),
        (_multiply, "mm bmm addmm baddbmm matmul"),
        (_pointwise, "copy masked_fill where"),
    ]
)


def rule_for(operation: Operation) -> Rule:
    """Return the rule of an operation. An in-place move is not in `MOVES`, so the last resorts apply to it."""
    name = operation.name
    if name in MOVES:
        return _move
    base = name.rstrip("_") if operation.is_in_place else name
    return RULES.get(base) or _untabled(operation)


def _untabled(operation: Operation) -> Rule:
    return _pointwise if torch.Tag.pointwise in operation.func.tags else _join_all


def _fit(joined: Tensor, returned: Tensor) -> Tensor:
    """Fit labels whose joined dims have length 1 to the shape of a result that keeps or drops these dims."""
    if joined.dim() != returned.dim():
        return joined.reshape(returned.shape)
    return joined.expand(returned.shape)


def _dims(given: Any, count: int) -> list[int]:
    """Return the dims in an argument as a list: one dim, several, or all if there is none."""
    if given is None or given == []:
        return list(range(count))
    return [given] if isinstance(given, int) else list(given)
