"""What an engine is put together from: how a step is run, and where the state of the model is."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from shardwise.engine.batches import Batches
from shardwise.engine.loss_sum import LossSum
from shardwise.engine.named_state import ModuleState
from shardwise.engine.optimizer_state import OptimizerState
from shardwise.engine.recorder import Recorder
from shardwise.engine.update import Update
from shardwise.execution.continuous import Stream
from shardwise.execution.local import LocalExecutor
from shardwise.execution.process import ProcessExecutor
from shardwise.ranks.transport import ProcessTransport
from shardwise.sharding.dropout import Dropouts
from shardwise.states.batch_norm import SharedStatistics
from shardwise.states.data_parallel import DataParallel
from shardwise.states.host import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What runs a step and what runs an evaluation, the batches that they are given, and what is noted of them."""

    trainer: LocalExecutor | ProcessExecutor
    evaluator: LocalExecutor | ProcessExecutor
    transport: ProcessTransport | None
    batches: Batches
    losses: LossSum
    recorder: Recorder
    dropouts: Dropouts | None


@dataclass(slots=True, kw_only=True)
class States:
    """The state of the model that this process holds, under the names of the original module.

    `stream` feeds batches where the pipe is never emptied between steps: `make_stream` begins one with the weights as
    they are.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    data: DataParallel
    host: Host | None
    update: Update
    module: ModuleState
    optimizers: OptimizerState
    #: Statistics of batch norms of which others have copies.
    statistics: SharedStatistics | None
    make_stream: Callable[[], Stream | None]
    stream: Stream | None = field(default=None)

    @property
    def shares_statistics(self) -> bool:
        """Whether batch norms of copies tell each other what they have seen, at the end of each step."""
        return self.statistics is not None and self.statistics.are_there

    def begin_step(self) -> None:
        """Begin a step without the gradients of the last."""
        self.data.begin_step()
        if self.host is not None:
            self.host.begin_step()

    def begin_stream(self) -> None:
        """Weights have been changed from outside: start with an empty pipe, and the weights as they are."""
        self.stream = self.make_stream()

    def home_of(self, weight: nn.Parameter) -> torch.device:
        """Where the state of a weight lives that an optimizer of this process has."""
        states = None if self.host is None else self.host.states
        return torch.device("cpu") if states is not None and weight in states.weights else weight.device
