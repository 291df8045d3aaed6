"""Detect at the next step that a module was changed after its engine was made, so it is not trained partly."""

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.engine.module_check import home_of_hook, parts_of
from shardwise.engine.parts import Parts
from shardwise.engine.unchanged_calls import UnchangedCalls
from shardwise.engine.unchanged_steps import UnchangedSteps
from shardwise.errors import ShardwiseError, some
from shardwise.stages.backward_trial import is_linear
from shardwise.stages.split.script_values import find_holders_of_hooks
from shardwise.stages.split.set_values import ValueKinds
from shardwise.states.optimizers.updates import Updates
from shardwise.torch_private import (
    accumulated_hooks,
    every_hook_of,
    gradient_hooks,
    parameter_slots,
    submodules,
)

_AGAIN = "state = engine.state_dict(), then sw.parallelize(module, ...) again and engine.load_state_dict(state)"


class Unchanged:
    """A snapshot of a module's parameters, and of which are trained."""

    def __init__(self, module: nn.Module) -> None:
        #: The holder of each parameter, its key there, its name in the module, the parameter, and whether it is
        #: trained.
        self._kept: list[tuple[Mapping[str, Any], str, str, nn.Parameter, bool]] = []
        self._sizes: list[tuple[str, Mapping[str, Any], int, Mapping[str, nn.Module], list[nn.Module]]] = []
        for prefix, owner in module.named_modules():
            slots, below = parameter_slots(owner), submodules(owner)
            self._sizes.append((prefix, slots, len(slots), below, list(below.values())))
            self._kept += [
                (slots, key, f"{prefix}.{key}" if prefix else key, each, each.requires_grad)
                for key, each in slots.items()
                if each is not None
            ]

    def check(self) -> None:
        """Refuse changes of the module that the engine would not train."""
        for slots, key, name, parameter, was_trained in self._kept:
            if slots.get(key) is not parameter:
                raise ShardwiseError(
                    f"{name} is another parameter than the engine was made with, which would go on with the old one",
                    remedy=f"module.get_parameter({name!r}).data.copy_(new), or engine.load_state_dict(state)",
                )
            if parameter.requires_grad and not was_trained:
                raise self._unfrozen()
        for prefix, slots, count, below, were in self._sizes:
            if len(slots) != count or len(below) != len(were):
                raise ShardwiseError(
                    f"{prefix or 'the module'} has {len(slots)} parameters and {len(below)} submodules, and had {count}"
                    f" and {len(were)} when the engine was made: what is new would never be trained",
                    remedy=_AGAIN,
                )
            if [*below.values()] != were:
                self._check_others(prefix, below, were)

    def _check_others(self, prefix: str, below: Mapping[str, nn.Module], were: list[nn.Module]) -> None:
        """Refuse submodules in the place of others. Those with the same parameters (compiled ones), and functions with
        none, compute what the module computes now."""
        for (key, one), other in zip(below.items(), were, strict=True):
            if one is not other and _state_of(one) != _state_of(other):
                raise ShardwiseError(
                    f"{prefix}.{key}".strip(".") + " is another module than the engine was made with, which"
                    " would go on with the parameters of the old one",
                    remedy=f"load_state_dict into the module that was there; or {_AGAIN}",
                )

    def _unfrozen(self) -> ShardwiseError:
        names = [name for _, _, name, each, was_trained in self._kept if each.requires_grad and not was_trained]
        return ShardwiseError(
            f"{len(names)} parameters require a gradient now and did not when the engine was made ({some(names)}): no"
            " optimizer has them, and they would never move",
            remedy=f"{_AGAIN}. Or requires_grad_() before the first sw.parallelize, and a group with lr=0.0 until it is"
            " their turn",
        )


def _state_of(module: nn.Module) -> set[int]:
    return {id(each) for each in (*module.parameters(), *module.buffers())}


class UnchangedHooks:
    """Detects hooks that a script registers, and forwards that it replaces, after the engine was made: loggers do so
    (`wandb.watch`). For earlier hooks, `parallelize` would have kept a layer whole, or tried them on parts of a
    gradient.

    All parameters are checked; of modules, only layers that are sharded over ranks. And what was compiled since
    (`unchanged_calls.py`). Hooks of parameters are tried again if a script has set what they read.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts_of_batch, self._calls = parts_of(parts.plan), UnchangedCalls(parts)
        self._parameters = list(parts.module.named_parameters())
        self._cut = {name: each for name, each in self._parameters if each.shape != parts.shapes.get(name, each.shape)}
        owners = dict.fromkeys(name.rpartition(".")[0] for name in self._cut)
        self._layers = [(name, parts.module.get_submodule(name)) for name in owners]
        #: By id, and kept alive: otherwise another object could get the id.
        self._known = {id(hook): hook for _, hook in self._hooks_of_parameters()}
        self._known.update({id(each): each for _, layer in self._layers for each in _calls_of(layer)})
        holders = find_holders_of_hooks(parts.module) if self._parts_of_batch else []
        self._read = [(each, each.values.read()) for each in holders]
        self._kinds, self._tried = ValueKinds(), set[Hashable]()

    def check(self) -> None:
        """Refuse what would see something else than it does without a plan."""
        self._calls.check()
        for name, hook in self._hooks_of_parameters():
            if self._is_new(hook):
                self._check_hook(name, hook)
                self._known[id(hook)] = hook
        self._check_again()
        for name, layer in self._layers:
            for each in _calls_of(layer):
                if self._is_new(each):
                    raise self._late(f"a hook of {name}, or a forward in its place,", "this rank's part of the layer")

    def _check_again(self) -> None:
        """Refuse hooks of parameters that are linear no more, as a value that they read was set. Each kind of value is
        tried once."""
        told = []
        for number, (holder, was) in enumerate(self._read):
            now = holder.values.read()
            for key, value in now.items() if now != was else ():
                if was.get(key) != value:
                    self._kinds.note(f"{holder.name}.{key}", was.get(key), value)
                    told.append(f"{holder.name}.{key}".strip("."))
            self._read[number] = (holder, now)
        if not told or not self._kinds.are_others or self._kinds.now in self._tried:
            return
        for name, parameter in self._parameters:
            hooks = list(gradient_hooks(parameter).values())
            if hooks and not is_linear(hooks, parameter):
                raise ShardwiseError(
                    f"{some(told)} was set since the engine was made, and with it a hook of {name} does not make of the"
                    f" sum of gradients what it makes of those of some rows, under {', '.join(self._parts_of_batch)}",
                    remedy="a hook that multiplies; clip= to clip gradients, or an optimizer that does it in step()",
                )
        self._tried.add(self._kinds.now)

    def _hooks_of_parameters(self) -> Iterator[tuple[str, Any]]:
        for name, each in self._parameters:
            yield from ((name, hook) for hook in gradient_hooks(each).values())
            yield from ((name, hook) for hook in accumulated_hooks(each).values())

    def _is_new(self, hook: Any) -> bool:
        return id(hook) not in self._known and not home_of_hook(hook).startswith("shardwise.")

    def _check_hook(self, name: str, hook: Any) -> None:
        if name in self._cut:
            raise self._late(f"a hook of {name}", "the gradient of a part of it")
        parameter = dict(self._parameters)[name]
        is_early = any(hook is each for each in gradient_hooks(parameter).values())
        if self._parts_of_batch and not (is_early and is_linear([hook], parameter)):
            raise self._late(
                f"a hook of {name}", f"the gradients of some rows, under {', '.join(self._parts_of_batch)},"
            )

    def _late(self, what: str, seen: str) -> ShardwiseError:
        return ShardwiseError(
            f"{what} was registered once the engine was there, and would see {seen} and not all of it",
            remedy="engine.gradients() and engine.gradient_norm after a step, to look; what changes gradients or"
            " activations before sw.parallelize, which says whether it can be kept",
        )


def _calls_of(layer: nn.Module) -> Iterator[Any]:
    """Yield what runs in a call of a layer besides its class's forward."""
    yield from every_hook_of(layer)
    if "forward" in vars(layer):
        yield vars(layer)["forward"]


class UnchangedGroups:
    """The groups of optimizers: a parameter that a script adds to one must be what its optimizer updates."""

    def __init__(self, held: Mapping[str, nn.Parameter], updates: Updates, *, is_all: bool) -> None:
        self._optimizers, self._steps = updates.optimizers, UnchangedSteps(updates)
        self._cut = [names_of_cut(held, each, updates) for each in updates.optimizers]
        self._seen = [_ids_of(each) for each in updates.optimizers]
        #: The lists of groups as the last step left them, which may not be those of the first.
        self._lists: list[dict[int, tuple[list[Any], list[int]]]] | None = None
        self._pieces = updates.pieces
        self._known = {id(each.weight) for each in updates.updated} | {id(each) for each in held.values()}
        #: Whether groups may hold nothing else. They may if they have parameters of other stages, or stand-ins for
        #: updates that run in the background.
        self._is_all = is_all and updates.states is None

    def check(self) -> None:
        """Refuse a whole parameter in the place of the pieces that are updated of it, what is none, and steps that
        depend now on parameters of other ranks."""
        self._steps.check()
        for number, (optimizer, cut) in enumerate(zip(self._optimizers, self._cut, strict=True)):
            if self._pieces is not None and self._lists is not None:
                self._check_lists(self._lists[number], optimizer, is_cut=bool(cut))
            if (ids := _ids_of(optimizer)) == self._seen[number]:
                continue
            if self._is_all and not self._known.issuperset(ids):
                raise ShardwiseError(
                    f"a tensor was put into a group of {type(optimizer).__name__} that is no parameter of the module"
                    " now, nor what the engine updates of one: it would never be trained",
                    remedy="the groups that it is to have in the function that makes the optimizer",
                )
            strangers = [cut[each] for each in ids if each in cut]
            if strangers:
                raise ShardwiseError(
                    f"{some(strangers)} was put into a group of {type(optimizer).__name__}, which updates something"
                    " else in its place on this rank (a piece, or a copy in full precision): its settings would change"
                    " nothing",
                    remedy="the groups that it is to have in the function that makes the optimizer, and their lr and"
                    " weight_decay set between steps",
                )
            self._seen[number] = ids

    def end(self) -> None:
        """Record the lists, and settings: a step may have replaced them."""
        self._steps.end()
        self._lists = [_lists_of(each) for each in self._optimizers]

    def _check_lists(
        self, known: dict[int, tuple[list[Any], list[int]]], optimizer: Optimizer, *, is_cut: bool
    ) -> None:
        """Refuse parameters taken out of a group by their place, or searched for where there are pieces of them."""
        for each, (_, ids) in _lists_of(optimizer).items():
            fewer = each in known and len(ids) < len(known[each][1])
            searched = is_cut and each not in known and ids in [old for _, old in known.values()]
            if ids and (fewer or searched):
                raise ShardwiseError(
                    f"parameters were taken out of a group of {type(optimizer).__name__} between steps, and on this"
                    f" rank it has {self._pieces}: others would be left out than were meant",
                    remedy="parameter.requires_grad_(False) between steps, and it is left as it is; or a group of its"
                    ' own in the function that makes the optimizer, and group["lr"] = 0.0',
                )


def names_of_cut(held: Mapping[str, nn.Parameter], optimizer: Optimizer, updates: Updates) -> dict[int, str]:
    """Return, by id, parameters of this rank for which this optimizer holds other tensors, or none."""
    own, names = {id(each.weight) for each in updates.updated}, updates.names[optimizer]
    return {id(each): name for name, each in held.items() if name in names and id(each) not in own}


def _ids_of(optimizer: Optimizer) -> list[int]:
    return [id(each) for group in optimizer.param_groups for each in group["params"]]


def _lists_of(optimizer: Optimizer) -> dict[int, tuple[list[Any], list[int]]]:
    """Return, by id, the list of parameters of each group, kept alive so that its id is not reused; and their ids."""
    lists = [group["params"] for group in optimizer.param_groups]
    return {id(each): (each, [id(one) for one in each]) for each in lists}
