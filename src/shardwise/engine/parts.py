"""The components of an engine: a module that has been cut for this process, and how it is to be trained."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.engine.options import Options
from shardwise.engine.sharded import Sharded
from shardwise.engine.tried_again import TriedAgain
from shardwise.engine.whole_example import Compared
from shardwise.fusion.fuse import Fused
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import ManyProcesses, OneProcess
from shardwise.schedule.schedule import Schedule
from shardwise.stages.loss_kind import LossKind
from shardwise.stages.rows import RowRule
from shardwise.stages.stage import Loss, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """`split` has the stages of the module, `schedule` runs them, `device` is the device of batches.

    `order` and `shapes` are the order of the parameters and the shapes of the state before the module was cut.
    `callers` are modules that apply dropout by calling a function. `calls_before` has for each stage how often its
    dropouts were called in earlier stages, if they were. `written` are the buffers that a forward writes to
    (`states/shared_buffers.py`). `has_metrics` says whether the loss also returns metrics, `rule` which entries of a
    batch are cut, and `kind` what kind of reduction the loss is.
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
    #: The parts of the module that kernels compute instead.
    fused: Fused = field(default_factory=Fused)
    #: Values that a script may set between steps.
    settings: TriedAgain | None = None
    #: What the first step is compared with.
    compared: Compared | None = None

    def detach(self) -> None:
        """Restore the module's own attention, and its own operators where kernels replaced them."""
        self.sharded.detach(self.module)
        self.fused.undo()
