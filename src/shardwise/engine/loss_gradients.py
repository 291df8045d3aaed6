"""Gradients that a loss asks for itself (`torch.autograd.grad`), of what its rank has only a part of.

A loss may weigh its terms by the gradients of a layer (VQGAN's adaptive weight, GradNorm), or penalise gradients. On
the rank that computes it, the gradient of a layer may be a part: of its channels (tp), of the tokens (cp), or of the
stages that use it (pp). No trial shows that, since the loss reads the user's own module and not its copies.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.engine.sharded import Sharded
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.stages.losses import WeighedLoss
from shardwise.stages.rows import nodes
from shardwise.stages.split.names_reached import names_reached
from shardwise.stages.stage import Batch, Split

_ASKS = "grad"


def guard_loss(module: nn.Module, weighed: WeighedLoss, plan: Plan, split: Split, sharded: Sharded) -> None:
    """Refuse such gradients wherever the loss is computed, if it names what asks for them."""
    if max(plan.pp, plan.tp, plan.cp, plan.ep) > 1 and _ASKS in names_reached(weighed):
        weighed.around = partial(_Guard, _Here(module, plan, split, sharded))


class _Here:
    """What the rank of a loss has, or has only a part of."""

    def __init__(self, module: nn.Module, plan: Plan, split: Split, sharded: Sharded) -> None:
        self._module, self._plan, self._split, self._sharded = module, plan, split, sharded

    def why(self, name: str) -> str | None:
        """Return why the gradient of a parameter is not whole here; None if it is."""
        plan, stages = self._plan, self._split
        shards = None if self._sharded.tensor is None else self._sharded.tensor.shards.get(name)
        experts = self._sharded.experts
        if plan.cp > 1:
            return f"each rank of cp={plan.cp} has that of its own tokens"
        if shards is not None and (shards.dim is not None or shards.is_partial):
            return f"each rank of tp={plan.tp} has a part of it"
        if experts is not None and name in experts.parameters:
            return f"each rank of ep={plan.ep} has other experts"
        last = stages.stages[-1]
        if plan.pp > 1 and (last is None or name not in last.parameters or name in stages.ties):
            return f"the last of {plan.pp} stages has that of its own units"
        return None

    def names(self) -> dict[int, str]:
        return {id(each): name for name, each in self._module.named_parameters(remove_duplicate=False)}

    def find(self, asked: Iterable[Any], batch: Batch) -> tuple[str, str] | None:
        """Return the first that the gradient is not whole of, and why."""
        names, entries = self.names(), {id(each): path for path, each in nodes(batch) if isinstance(each, Tensor)}
        for each in asked:
            if id(each) in entries and self._plan.pp > 1:
                return f"batch[{entries[id(each)]!r}]", f"the last of {self._plan.pp} stages has that of its own units"
            if isinstance(each, nn.Parameter):
                name = names.get(id(each))
                # One that the module does not have any more: this rank has a part of it in its place.
                why = "the engine has another in its place" if name is None else self.why(name)
                if why is not None:
                    return name or f"a parameter of shape {list(each.shape)}", why
        return None


class _Guard(TorchFunctionMode):
    """Refuses gradients of what a rank has a part of."""

    def __init__(self, here: _Here, batch: Batch) -> None:
        super().__init__()
        self._here, self._batch = here, batch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            found = self._here.find(args[1] if len(args) > 1 else kwargs["inputs"], self._batch)
            if found is not None:
                name, why = found
                raise ShardwiseError(
                    f"the loss asks for the gradient of {name} (torch.autograd.grad), and {why}",
                    remedy="gradients of the module's output; weights of terms that the script sets between steps,"
                    " from engine.gradients(); or a plan of dp alone",
                )
        return func(*args, **kwargs)
