"""Observe a run on the example in addition to its data flow: buffers that are written, and what the loss reads."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardwise.engine.loss_gradients import guard_loss
from shardwise.engine.rewritten_check import check_forward
from shardwise.engine.sharded import Sharded
from shardwise.engine.shown import HARMLESS
from shardwise.errors import ShardwiseError, some
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import Wires
from shardwise.stages.losses import WeighedLoss, trial_of
from shardwise.stages.rows import changed
from shardwise.stages.split.names_reached import names_reached
from shardwise.stages.split.python_state import PythonState
from shardwise.stages.split.second_batch import second_batch
from shardwise.stages.stage import Batch, Loss, Second, Split
from shardwise.states.shared_buffers import WriteWatch, Written, check_norms, check_owners
from shardwise.torch_private import pytree


class Trial:
    """A module that is run on the example. `probe` gets its output, in each run."""

    def __init__(self, module: nn.Module, loss: Loss, microbatch: Batch) -> None:
        self._writes, self._loss = WriteWatch(module), trial_of(loss, microbatch)
        self._module, self._reads, self._reads_later = module, _Reads(module), _Reads(module)
        self._loss_itself, self._microbatch = loss, microbatch
        #: The buffers that a forward writes.
        self.written: Written = {}
        #: Whether the loss also returns metrics.
        self.has_metrics = False

    def probe(self, output: Any) -> None:
        """Record what was written, and try the loss."""
        self.written = {**self.written, **self._writes.found()}
        before = PythonState(self._loss_itself, with_buffers=True)
        with self._reads:
            self.has_metrics = self._loss(output)
        if "is_grad_enabled" in names_reached(self._loss_itself):
            # It may read more in training. What it raises there, training will report.
            with torch.enable_grad(), self._reads_later, suppress(Exception):
                self._loss_itself(changed({"": output}, _with_graph)[""], copy(self._microbatch))
        before.restore()

    @property
    def asked(self) -> Mapping[str, Any]:
        """What `split` is to tell and to ask of the run."""
        return {"probe": self.probe, "read_by_loss": self._read_by_loss}

    def _read_by_loss(self) -> list[str]:
        return [names[0] for names, _ in (*self._reads.found, *self._reads_later.found)]

    def second(self, plan: Plan, others: Sequence[Batch]) -> Second:
        """Return what the stages of a plan are tried on; `others` are the microbatches other than that of the trial."""
        replicas = [f"{axis}={getattr(plan, axis)}" for axis in ("dp", "cp") if getattr(plan, axis) > 1]
        replicas += ["sp=true"] if plan.sp else []  # Between layers each rank has its own tokens.
        return Second(
            batch=second_batch(self._microbatch, others),
            loss=self._loss_itself,
            replicas=", ".join(replicas) or None,
            microbatches=f"microbatches={plan.microbatches}" if plan.microbatches > 1 else None,
            reruns=f"recompute={plan.recompute}" if plan.recompute != "none" else None,
        )

    def check(self, plan: Plan, shapes: Mapping[str, torch.Size], split: Split, wires: Wires) -> None:
        """Refuse what stages of a plan cannot do; `shapes` are those of the whole parameters. All ranks call this."""
        self._check_reads(plan, shapes, split)
        check_forward(split, plan, wires)

    def guard(self, weighed: WeighedLoss, plan: Plan, split: Split, sharded: Sharded) -> None:
        """Refuse gradients that the loss asks for itself, where a rank has a part of them."""
        guard_loss(self._module, weighed, plan, split, sharded)

    def _check_reads(self, plan: Plan, shapes: Mapping[str, torch.Size], split: Split) -> None:
        units = split.units
        check_owners(self.written, units)
        check_norms(self._module, units)
        check_buffers_of_loss(self._reads.buffers, units)
        away = [f"zero={plan.zero}"] if plan.zero == 3 else []
        away += ["offload.parameters"] if plan.offload.parameters else []
        read = dict(self._reads.found)
        if away or plan.pp > 1:
            read.update(self._reads_later.found)
        gone = [names[0] for names, parameter in read.items() if away or _is_gone(names, parameter, shapes, split)]
        axes = away or [f"{axis}={getattr(plan, axis)}" for axis in ("tp", "pp", "ep") if getattr(plan, axis) > 1]
        if gone:
            raise ShardwiseError(
                f"the loss reads {len(gone)} parameters ({some(gone)}), and under {', '.join(axes)} the rank that"
                " computes it does not have them then",
                remedy="weight_decay of the optimizer for a penalty of weights; or compute it in the forward of the"
                " module that has them, and return the result (for a parameter itself: return it.clone())",
            )


def _is_gone(names: Sequence[str], parameter: Tensor, shapes: Mapping[str, torch.Size], split: Split) -> bool:
    """Whether the rank of the loss has a part of a parameter, or nothing of it."""
    if parameter.shape != shapes.get(names[0], parameter.shape):
        return True
    return split.num_stages > 1 and split.held_last.isdisjoint(names)


def _with_graph(_: str, each: Any) -> Any:
    return each.detach().requires_grad_() if type(each) is Tensor and each.is_floating_point() else None


def check_buffers_of_loss(buffers: Sequence[str], units: Sequence[Sequence[str]]) -> None:
    """Refuse a loss that reads buffers of a stage before the last, which are not there where it is computed."""
    stages = [{call.partition("#")[0] for call in calls} for calls in units]
    before = set().union(*stages[:-1]) - stages[-1]
    gone = [name for name in buffers if any(name.startswith(f"{unit}.") for unit in before)]
    if gone:
        raise ShardwiseError(
            f"the loss reads {len(gone)} buffers ({some(gone)}), and under pp={len(units)} the rank that computes it"
            " does not have them",
            remedy="return them beside the outputs; or a buffer of the module itself, or of its last layer",
        )


class _Reads(TorchFunctionMode):
    """Records which parameters and buffers of a module are used."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._names: dict[int, list[str]] = {}
        for name, each in module.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(each), []).append(name)
        self._found: dict[int, Tensor] = {}
        self._buffers = {id(each): name for name, each in module.named_buffers()}
        #: The names of buffers.
        self.buffers: list[str] = []

    @property
    def found(self) -> list[tuple[tuple[str, ...], Tensor]]:
        """Return each of them with all of its names."""
        return [(tuple(self._names[identity]), each) for identity, each in self._found.items()]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        if func not in HARMLESS:
            for each in pytree.tree_leaves((args, kwargs)):
                if id(each) in self._names:
                    self._found[id(each)] = each
                elif id(each) in self._buffers:
                    self.buffers.append(self._buffers[id(each)])
        return func(*args, **(kwargs or {}))
