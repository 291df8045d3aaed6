"""One stage of a split module: the module's own forward, in which only the stage's units are really called."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.stages.activation_bytes import Kept
from shardwise.stages.batch import home_of
from shardwise.stages.checkpoints import in_the_newer_way
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.filled_containers import check_filled, containers_in, joined, opened, taken_apart
from shardwise.stages.split.forecast import Forecast
from shardwise.stages.split.outline import NumberOutline, leaves_of, ordinary, signature_of
from shardwise.stages.split.parts import StagePart
from shardwise.stages.split.route import Route
from shardwise.stages.split.sources import Made
from shardwise.stages.split.switch import Inner, Switch, Visitor
from shardwise.stages.split.unit_flow import UnitCall, UnitFlow
from shardwise.stages.stage import Batch, Values
from shardwise.torch_private import checkpoint_here, pytree

#: A factory of the context in which a layer is recomputed; and the counter of the bytes kept from its first run.
Moment = tuple[Callable[[], AbstractContextManager[Any]], Kept | None]


class _Finished(BaseException):
    """A stage has run its last unit: other stages run the rest of the module's forward."""


class ModuleStage:
    """A stage: parameters, buffers, and `run`. `shardwise.stages.stage.Stage` defines each."""

    def __init__(self, module: nn.Module, switch: Switch, flow: UnitFlow, part: StagePart, forecast: Forecast) -> None:
        self.parameters: Mapping[str, nn.Parameter] = {
            name: each for name, each in module.named_parameters() if name in part.holds
        }
        self.buffers: Mapping[str, Tensor] = {name: each for name, each in module.named_buffers() if name in part.holds}
        self.flow, self.part, self.forecast = flow, part, forecast
        #: The wrapped call of each unit.
        self.wrapped: dict[str, Inner] = {}
        #: Wraps the visitor that decides about calls of units: a trial records its decisions.
        self.visited_by: Callable[[Visitor], Visitor] = lambda visit: visit
        #: The context in which a microbatch is run: with context parallelism, attention sees other ranks' tokens there.
        self.running: Callable[[Batch], AbstractContextManager[Any]] = nullcontext
        #: Which units forwards call, if this stage has all of them. `in_order` is the reason why they must be called as
        #: on the example: empty if other stages run the others, and None if any order will do.
        self.route = Route([call.unit for call in flow.calls])
        self.in_order: str | None = "" if len(part.calls) < len(flow.calls) else None
        #: Captures the current state for a layer that will be recomputed; None if none will be.
        self.moment: Callable[[nn.Module], Moment] | None = None
        self._module, self._switch, self._signature = module, switch, Signature(module)

    def run(self, values: Values, batch: Batch) -> tuple[Values, Any]:
        """Compute on one microbatch: see `Stage.run`."""
        args, kwargs = self._signature.arguments(batch)
        visit = _Visit(self, values, batch)
        output: Any = None
        leaves = [each for each in values.values() if each.requires_grad and each.is_leaf]
        try:
            with self.running(batch), in_the_newer_way(), self._switch.visited_by(self.visited_by(visit)):
                output = self._module(*args, **kwargs)
        except _Finished:
            pass
        except Exception as error:
            # After its last unit a stage runs glue on placeholders, up to the next unit: errors there are ignored.
            if not visit.is_done or self.part.is_last:
                self._explain(error)
                raise
        visit.check_complete()
        if not all(each.is_leaf for each in leaves):
            # A received value went through such a function around units of another stage, and became its output.
            raise ShardwiseError(
                "units are called inside of an autograd.Function of the module's own, as older checkpoints are, and"
                " gradients of stages before them would be lost",
                remedy="torch.utils.checkpoint.checkpoint in its place",
            )
        return visit.made, output if self.part.is_last else None

    def _explain(self, error: Exception) -> None:
        """Raise a clearer error than torch's if the forward computes gradients itself."""
        codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
        if not isinstance(error, ShardwiseError) and any("_functorch" in code.co_filename for code in codes):
            raise ShardwiseError(
                "the forward calls units inside of torch.func (grad, vjp, vmap), which takes no part in what this plan"
                f" does around them: {str(error).partition('. ')[0]}",
                remedy="torch.autograd.grad(..., create_graph=True); or a plan without zero=3 and recompute",
            ) from error
        asks = torch.autograd.grad.__code__ in codes
        if asks and not isinstance(error, ShardwiseError) and len(self.part.calls) < len(self.flow.calls):
            raise ShardwiseError(
                "the forward asks for gradients (torch.autograd.grad) of what several stages compute, and a stage has"
                f" the graph of its own units alone: {str(error).partition('. ')[0]}",
                remedy="torch.autograd.grad inside of one unit; or a plan without pp",
            ) from error

    @property
    def unit_names(self) -> list[str]:
        """The units of this stage, in the order of their first calls."""
        return list(dict.fromkeys(self.flow.calls[call].unit for call in self.part.calls))

    def unit(self, name: str) -> nn.Module:
        """Return a unit of the module, of this stage or of another."""
        return self._module.get_submodule(name)

    def wrap(self, around: Callable[[str, Inner], Inner]) -> None:
        """Wrap the calls of this stage's units, for recomputation or compilation.

        `around(unit, call)` gets each unit's name and its call, once, and returns what to call instead.
        """
        for unit in self.unit_names:
            gate = self._switch.gates[unit]
            gate.again = self.wrapped[unit] = around(unit, self.wrapped.get(unit, gate.inner))


class _Visit:
    """One run of one stage: the visitor that answers each call of a unit."""

    def __init__(self, stage: ModuleStage, values: Values, batch: Batch) -> None:
        self._stage, self._flow, self._part = stage, stage.flow, stage.part
        self._values, self._home, self._shapes = values, home_of(batch), signature_of(list(batch.values()))
        self._next = 0
        self._called: list[str] = []
        #: The innermost checkpoint around the last call, whether that was a call of this stage, and its unit.
        self._checkpoint: tuple[Any, bool, str] = (None, False, "")
        self.made: Values = {}

    @property
    def is_done(self) -> bool:
        return self._next >= self._part.calls.stop

    def call(self, unit: str, inner: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit of this stage; for a unit of another stage return received values or placeholders."""
        index = self._next
        if len(self._part.calls) < len(self._flow.calls):
            self._check_checkpoint(unit, is_mine=index in self._part.calls)
        if index >= self._part.calls.stop and not self._part.is_last:
            raise _Finished
        if self._stage.in_order is None:
            self._called.append(unit)
            return self._stage.wrapped.get(unit, inner)(*args, **kwargs)
        if index >= len(self._flow.calls) or self._flow.calls[index].unit != unit:
            raise self._astray(unit)
        call = self._flow.calls[index]
        if index not in self._part.calls:
            self._next = index + 1
            return self._stand_in(index, call, args, kwargs)
        held = containers_in(args, kwargs) if call.filled else []
        known: Mapping[int, Any] = {}
        if call.outline.constants and not self._part.is_last:
            # Before the call, which may write into its arguments.
            stand_in = self._stage.forecast.stand_in(call, args, kwargs, self._home, self._shapes)
            known = stand_in.outline.constants
        returned = joined(self._stage.wrapped.get(unit, inner)(*args, **kwargs), held, call.filled)
        kept = self._keep(index, call, returned)
        _check_constants(call, known, returned)
        self._next = index + 1
        return taken_apart(kept, held, call.filled)

    def _check_checkpoint(self, unit: str, *, is_mine: bool) -> None:
        """Refuse a checkpoint around units of this stage and of those before it.

        Its backward would run all of them again. It ends after the last one of this stage.
        """
        here = checkpoint_here()
        if here is None:
            return
        around, was_mine, other = self._checkpoint
        if here is not around:
            self._checkpoint = here, is_mine, unit
        elif is_mine and not was_mine:
            raise ShardwiseError(
                f"one checkpoint (torch.utils.checkpoint) is around units of several stages, {other} and {unit}, and"
                " its backward runs all of them again",
                remedy="a checkpoint around each layer; or recompute=full, and none in the module",
            )

    def _keep(self, index: int, call: UnitCall, returned: Any) -> Any:
        """Keep the values that other stages read, and return what glue is to have.

        Glue may register a hook on such a value, on every stage that has it. The gradient that comes from another stage
        has been through its hook there, so glue has another tensor here.
        """
        leaves: list[Any] | None = None
        if call.filled and len(self._part.calls) < len(self._flow.calls):
            check_filled(call.name, pytree.tree_leaves(returned), call.outline)
        for made, name in self._part.writes.items():
            if made.call == index:
                leaves = pytree.tree_leaves(returned) if leaves is None else leaves
                value = leaves[made.leaf] = ordinary(leaves[made.leaf])
                outline = call.outline.tensors[made.leaf]
                if isinstance(outline, NumberOutline):
                    value = torch.tensor(value, dtype=outline.dtype, device=self._home)
                # Cloned if glue writes to it later: other stages need the current values.
                self.made[name] = value.clone() if made.leaf in call.overwritten else value
                if type(value) is Tensor and value.requires_grad and made.leaf not in call.overwritten:
                    leaves[made.leaf] = value.view_as(value)
        if leaves is None:
            return returned
        return leaves[0] if call.outline.tree.is_leaf() else pytree.tree_unflatten(leaves, call.outline.tree)

    def _stand_in(self, index: int, call: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return received values, or placeholders where they are not needed, for a call of another stage."""
        outline, reads = call.outline, self._part.reads
        tensors = {leaf: self._received(index, leaf, call) for leaf in outline.tensors if Made(index, leaf) in reads}
        if len(tensors) < len(outline.tensors):
            known = self._stage.forecast.stand_in(call, args, kwargs, self._home, self._shapes)
            outline, tensors = known.outline, {**known.tensors, **tensors}
            for leaf in call.overwritten.difference(tensors):
                tensors[leaf] = outline.tensors[leaf].placeholder(self._home, writable=True)
        arguments = leaves_of(opened(args, kwargs)) if outline.passes else []
        made = outline.filled(tensors, arguments)
        if call.filled:
            made = taken_apart(made, containers_in(args, kwargs), call.filled)
        return self._stage.forecast.hooked(call.unit, args, kwargs, made, tensors.values())

    def _received(self, index: int, leaf: int, call: UnitCall) -> Tensor:
        name = self._part.reads[Made(index, leaf)]
        assert name in self._values, f"stage {self._part.stage} reads {name}, and was not given it"
        # A received value is a leaf of this stage's graph, which must not be written to in place.
        return self._values[name].clone() if leaf in call.overwritten else self._values[name]

    def check_complete(self) -> None:
        """Raise if the module did not call all units of the stage."""
        if self._stage.in_order is None:
            self._stage.route.end(self._called)
        elif self._next < self._part.calls.stop:
            raise self._astray(None)

    def _astray(self, unit: str | None) -> ShardwiseError:
        calls = self._flow.calls
        expected = calls[self._next].name if self._next < len(calls) else None
        came = "returned" if unit is None else f"called {unit}"
        was = "returned" if expected is None else f"called {expected}"
        why = f", and {self._stage.in_order}" if self._stage.in_order else ""
        return ShardwiseError(
            f"the module {came} where on the example it {was} (unit {self._next + 1} of {len(calls)}): which units run"
            f" depends on the data{why}",
            remedy="dp with zero=2 or less takes it"
            if why
            else "decide inside a unit what to compute, or make each alternative one unit of the same stage",
        )


def _check_constants(call: UnitCall, known: Mapping[int, Any], returned: Any) -> None:
    """Raise if a call returns another number or string than later stages assume."""
    leaves = pytree.tree_leaves(returned) if known else []
    for leaf, each in known.items():
        now = leaves[leaf] if leaf < len(leaves) else None
        if type(now) is not type(each) or now != each:
            raise ShardwiseError(
                f"{call.name} returns {now!r} (number {leaf + 1} of what it returns), and for the example"
                f" {each!r}: stages behind it go on with that of the example",
                remedy="return it as a tensor: torch.tensor(...), or torch.as_tensor(...)",
            )
