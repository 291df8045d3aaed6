"""Optimizers made once, on whole parameters; afterwards their groups are known by parameter name.

A user's factory may depend on a parameter's shape, name, place in the list, attributes, or on the object itself. So it
gets the module's own parameters before any of them is cut, with values or on the meta device. Its groups are recorded
by name, and each group then gets this rank's part of its parameters:

    made      group 0: embed.weight, up.weight      group 1: up.bias
    a rank    group 0: a piece of up.weight         group 1: up.bias

A group without parameters on a rank is empty there, and keeps its number. The optimizer stays the same object, so
anything that a factory has attached to it, such as a scheduler, stays.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError, some
from shardwise.states.optimizer_copy import OWN_ATTRIBUTES, inner_optimizers
from shardwise.states.parameter_group import (
    ELEMENTWISE,
    MATRIXWISE,
    MakeOptimizer,
    Share,
    shares_of,
    sort_out,
)
from shardwise.torch_private import pytree, step_hooks, step_is_replaced

#: The user's argument: a factory of one optimizer, or several shares.
Optimizers = MakeOptimizer | Sequence[Share]

#: Source code of a `step(closure=None)` that requires a closure.
_ASKS_FOR_CLOSURE = re.compile(r"assert closure\b|if (closure is None|not closure):\s*raise\b")


class Weight(NamedTuple):
    """The part of a parameter that an optimizer of this rank updates: its elements from `start` on, flattened.

    `is_joined`: it is whole although tensor or expert parallel ranks hold parts of the parameter.
    """

    name: str
    start: int
    weight: nn.Parameter
    is_joined: bool


@dataclass(slots=True, kw_only=True, eq=False)
class MadeOptimizer:
    """An optimizer, and for each group the names of the parameters that it was made with.

    `whole`: whether it must see them whole; None if unknown. `first` is the state that its constructor has made.
    """

    optimizer: Optimizer
    groups: list[list[str]]
    whole: bool | None
    first: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {name for names in self.groups for name in names}

    def sees_whole(self) -> bool:
        """Whether it must see parameters whole, where ranks have pieces of them."""
        if self.whole is None:
            kind = type(self.optimizer).__name__
            raise ShardwiseError(
                f"parameters are in pieces under this plan, and whether {kind} can update a piece by itself is not"
                " known",
                remedy=f"optimizer=[sw.Share(make=..., whole=True)] if {kind} looks at whole matrices, whole=False if"
                " every number is treated by itself; or zero=0",
            )
        return self.whole

    def give(self, weights: Sequence[Weight], local: Callable[[str, Tensor], Tensor] | None, *, sort: bool) -> None:
        """Put this rank's weights into the groups. `local` cuts a whole tensor for this rank, if ranks have parts.

        With `sort` a group's weights are in the given order, otherwise in that of the parameters.
        """
        by_name: dict[str, list[Weight]] = {}
        for each in weights:
            by_name.setdefault(each.name, []).append(each)
        places = {each.weight: place for place, each in enumerate(weights)}
        for group, names in zip(self.optimizer.param_groups, self.groups, strict=True):
            found = [each for name in names for each in by_name.get(name, ())]
            if sort:
                found.sort(key=lambda each: places[each.weight])
            group["params"] = [each.weight for each in found]
            if "param_names" in group:
                group["param_names"] = [each.name for each in found]
            for each in found:
                if each.name in self.first:
                    self.optimizer.state[each.weight] = self._first_of(each, group, local)
        self.first = {}

    def _first_of(
        self, one: Weight, group: Mapping[str, Any], local: Callable[[str, Tensor], Tensor] | None
    ) -> dict[str, Any]:
        """Return the state that the constructor made for a parameter, cut to this rank's piece."""

        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if not value.dim():
                return value.clone()
            if value.is_meta:  # Adagrad's sums: no other optimizer has any state then.
                return torch.full_like(one.weight.detach(), group["initial_accumulator_value"])
            mine = value if local is None or one.is_joined else local(one.name, value)
            flat = mine.reshape(-1)[one.start : one.start + one.weight.numel()]
            return flat.view(one.weight.shape).to(one.weight.device, one.weight.dtype, copy=True)

        return {key: cut(value) for key, value in self.first[one.name].items()}


def make_optimizers(optimizer: Optimizers, parameters: Mapping[str, nn.Parameter]) -> list[MadeOptimizer]:
    """Make them on all parameters of a module, by name and in its order. Each that is trained must have one optimizer.

    A factory gets all parameters, as `module.parameters()` gives them; that of a share those that it takes.
    """
    shares = shares_of(optimizer)
    trained = {name: each for name, each in parameters.items() if each.requires_grad}
    taken = [list(parameters)] if callable(optimizer) else sort_out(shares, trained)
    names = {id(each): name for name, each in parameters.items()}
    made = [
        _made(share, [parameters[name] for name in mine], names)
        for share, mine in zip(shares, taken, strict=True)
        if mine
    ]
    _check_complete(made, trained)
    return made


def _made(share: Share, given: list[nn.Parameter], names: Mapping[int, str]) -> MadeOptimizer:
    optimizer: Any = share.make(given)
    _check_optimizer(optimizer)
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        strangers = [each for each in group["params"] if id(each) not in names]
        if strangers:
            raise ShardwiseError(
                f"group {number} of {type(optimizer).__name__} has {len(strangers)} of {len(group['params'])} tensors,"
                f" the first of shape {tuple(strangers[0].shape)}, that are no parameters of the module: they would"
                " never get its gradients",
                remedy="groups of the parameters that the function is given, or of module.named_parameters() of the"
                " same module; what else is trained belongs into the module",
            )
        groups.append([names[id(each)] for each in group["params"]])
    kind = type(optimizer)
    _check_attributes(optimizer, names)
    made = MadeOptimizer(
        optimizer=optimizer,
        groups=groups,
        whole=share.whole if share.whole is not None else _whole_of(kind),
        first={names[id(each)]: dict(state) for each, state in optimizer.state.items() if id(each) in names},
    )
    entries = [value for state in made.first.values() for value in state.values()]
    if kind is not optim.Adagrad and any(isinstance(each, Tensor) and each.is_meta and each.dim() for each in entries):
        raise ShardwiseError(
            f"{kind.__name__} makes its state when it is made, and the module is on the meta device: the state would"
            " have no numbers",
            remedy=f"make the state in the first {kind.__name__}.step, or a module with weights",
        )
    # So that the optimizer does not keep whole parameters alive while they are cut.
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["params"] = []
    return made


def _whole_of(kind: type[Optimizer]) -> bool | None:
    return True if kind in MATRIXWISE else False if kind in ELEMENTWISE else None


def _check_optimizer(made: Any) -> None:
    """Refuse what a factory returned that is no optimizer, or one that a step of an engine cannot serve."""
    if not isinstance(made, Optimizer):
        what = f"a {type(made).__name__} of {len(made)}" if isinstance(made, (tuple, list)) else type(made).__name__
        raise ShardwiseError(
            f"the function given as optimizer returned {what}, and not one torch.optim.Optimizer",
            remedy="lambda parameters: AdamW(parameters, lr=3e-4); make a scheduler on engine.optimizers[0]",
        )
    kind = type(made).__name__
    if isinstance(made, optim.LBFGS) or _needs_closure(type(made).step):
        raise ShardwiseError(
            f"{kind} computes the loss again within a step, by a closure, and an engine runs one forward and backward"
            " a step",
            remedy="an optimizer that steps without a closure: AdamW, SGD, Muon",
        )
    if isinstance(made, optim.SparseAdam):
        raise ShardwiseError(
            "SparseAdam takes sparse gradients alone, and gradients are summed over ranks as dense ones",
            remedy="AdamW(parameters, lr=...), and Embedding(..., sparse=False)",
        )


@lru_cache(maxsize=64)
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    if closure is None or closure.default is inspect.Parameter.empty:
        return closure is not None
    try:
        source = inspect.getsource(inspect.unwrap(step))
    except (OSError, TypeError):
        return False
    return _ASKS_FOR_CLOSURE.search(source) is not None


def _check_attributes(made: Optimizer, names: Mapping[int, str]) -> None:
    """Refuse one of the user's own that keeps parameters beside its groups: it would go on with those it was given."""
    groups = [id(each) for each in made.param_groups]
    for one in (made, *inner_optimizers(made)):
        held = {key: value for key, value in vars(one).items() if key not in OWN_ATTRIBUTES}
        held["param_groups"] = [each for each in one.param_groups if id(each) not in groups]
        for key, value in held.items():
            kept = [names[id(each)] for each in pytree.tree_leaves(value) if id(each) in names]
            if kept:
                raise ShardwiseError(
                    f"{type(one).__name__}.{key} keeps {len(kept)} parameters beside its groups, {some(kept)}: it would"
                    " go on with these when ranks have pieces of them",
                    remedy="read them from self.param_groups in step()",
                )


def _check_complete(made: Sequence[MadeOptimizer], trained: Mapping[str, nn.Parameter]) -> None:
    """Compare what factories returned with what is to be trained."""
    number_of: dict[str, int] = {}
    for number, each in enumerate(made):
        for name in each.names:
            if number_of.setdefault(name, number) != number and name in trained:
                kinds = [type(made[at].optimizer).__name__ for at in (number_of[name], number)]
                raise ShardwiseError(
                    f"{name} is in two optimizers, {kinds[0]} and {kinds[1]}: each would step on it",
                    remedy="in the function of a sw.Share, use the parameters that it is given",
                )
    left_out = [name for name in trained if name not in number_of]
    if left_out:
        module, _, _ = left_out[0].rpartition(".")
        owner = f"module.{left_out[0]}" if not module else f"module.get_parameter({left_out[0]!r})"
        raise ShardwiseError(
            f"{len(left_out)} of the {len(trained)} parameters that require a gradient are in no group of the optimizer"
            f" ({some(left_out)}): they would never be updated",
            remedy=f"{owner}.requires_grad_(False) before parallelize, or a group for them (lr=0.0 leaves them as they"
            " are)",
        )


def check_step_hooks(optimizers: Iterator[Optimizer] | Sequence[Optimizer], pieces: str) -> None:
    """Refuse hooks of steps, and a `step` put in the place of the class's own, where an optimizer has something else
    than all parameters, whole; `pieces` says what."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        is_replaced = step_is_replaced(optimizer)
        if is_replaced or step_hooks(optimizer):
            what = f"what stands in the place of {kind}.step" if is_replaced else f"a step hook of {kind}"
            raise ShardwiseError(
                f"{what} would see {pieces}, and not whole parameters and gradients",
                remedy="after engine.train_step(batch): engine.gradients() and engine.state_dict() are whole, and"
                " engine.gradient_norm is that of all with clip=float('inf'); or a plan of dp with zero=0",
            )


def check_kept_tensors(optimizers: Sequence[Optimizer], pieces: str) -> None:
    """Refuse one of the user's own that has made a tensor for each parameter it was given (slow weights, an average),
    where it has something else than these in its steps; `pieces` says what."""
    for optimizer in optimizers:
        for key, value in vars(optimizer).items():
            is_own = key in OWN_ATTRIBUTES or isinstance(value, Optimizer)
            by_parameter = list(value) if isinstance(value, dict) and not is_own else []
            leaves = [] if is_own else [*pytree.tree_leaves(value), *by_parameter]
            kept = [each for each in leaves if isinstance(each, Tensor) and each.numel() > 1]
            if kept:
                kind = type(optimizer).__name__
                raise ShardwiseError(
                    f"{kind}.{key} keeps {len(kept)} tensors that were made of the parameters it was given, and in its"
                    f" steps it would see {pieces}: which belongs to which is not told",
                    remedy=f"self.state[p] in step() for what {kind} keeps of a parameter; or a plan of dp with zero=0",
                )
