"""What an engine is put together from: a module that has been cut for this process, and how it is to be trained."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.engine.options import Options
from shardwise.engine.sharded import Sharded
from shardwise.engine.tried_again import TriedAgain
from shardwise.fusion.fuse import Fused
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import ManyProcesses, OneProcess
from shardwise.schedule.schedule import Schedule
from shardwise.stages.loss_kind import LossKind
from shardwise.stages.rows import RowRule
from shardwise.stages.stage import Loss, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`split` are the stages of the module, and `schedule` is what runs them. `device` is where batches are.

    Before it was cut the module had its parameters in this `order`, and its state in these `shapes`. `callers` are
    modules that drop at random by calling a function, and `calls_before` for each stage how often what drops in it was
    called in others before, if so; `written` are the buffers that a forward writes
    (`states/shared_buffers.py`). `has_metrics` says whether the loss returns metrics beside itself, `rule` what of a
    batch is cut, and `kind` what the loss is.
    """

    module: nn.Module
    plan: Plan
    split: Split
    schedule: Schedule
    loss: Loss
    options: Options
    sharded: Sharded
    order: tuple[str, ...]
    shapes: Mapping[str, torch.Size]
    wires: OneProcess | ManyProcesses
    device: torch.device
    callers: Collection[str] = ()
    calls_before: Sequence[Mapping[str, int]] = ()
    written: Mapping[str, bytes | None] = field(default_factory=dict)
    has_metrics: bool = False
    rule: RowRule = field(default_factory=RowRule)
    kind: LossKind = LossKind.UNTRIED
    #: Whether any parameter was on the meta device.
    is_without_numbers: bool = False
    #: What kernels compute in place of the module.
    fused: Fused = field(default_factory=Fused)
    #: What a script may set between steps.
    settings: TriedAgain | None = None

    def detach(self) -> None:
        """What the module computes is its own again: attention, and what kernels computed in its place."""
        self.sharded.detach(self.module)
        self.fused.undo()
