"""Make the executors of this process, for one rank or for all ranks, and the callbacks of their interpreters."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from shardwise.engine.batches import Batches
from shardwise.engine.loss_sum import LossSum
from shardwise.engine.make_states import States
from shardwise.engine.parts import Parts
from shardwise.engine.recorder import Recorder
from shardwise.execution.compute_policy import ComputePolicy
from shardwise.execution.executor import Executor
from shardwise.execution.local import LocalExecutor
from shardwise.execution.pipeline import forward_only
from shardwise.execution.process import ProcessExecutor
from shardwise.execution.weight_stash import Stream
from shardwise.ranks.transport import ProcessTransport
from shardwise.ranks.wires import OneProcess
from shardwise.schedule.schedule import Schedule
from shardwise.sharding.dropout import Dropouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The executors of steps and of evaluations, their batches, and their recorder.

    `make_predictor` makes an executor that runs forwards without a loss and keeps the module's outputs.
    """

    trainer: Executor
    evaluator: Executor
    make_predictor: Callable[[], Executor]
    transport: ProcessTransport | None
    batches: Batches
    losses: LossSum
    recorder: Recorder
    dropouts: Dropouts | None

    def close(self) -> None:
        """Release the transport between processes."""
        if self.transport is not None:
            self.transport.close()


def make_execution(parts: Parts, states: States, evaluation: Schedule) -> Execution:
    """Make the executors of steps and evaluations. Every process calls this alike.

    `evaluation` is the complete schedule over the stages of evaluations, of which forwards are run. If the schedule
    never flushes the pipeline, `states` get the `Stream` that feeds it.
    """
    wires, schedule, sharded = parts.wires, parts.schedule, parts.sharded
    forwards = forward_only(evaluation)
    links = schedule.links | forwards.links
    transport = None if isinstance(wires, OneProcess) else wires.make_transport(links, parts.device)
    trainer = _make_executor(schedule, parts, states, transport, measures=True)
    in_evaluation = replace(parts, split=parts.split.of_evaluation)
    evaluator = _make_executor(forwards, in_evaluation, states, transport, measures=True)
    dropouts = None
    if not parts.options.compile:
        may_rest = not parts.options.graphs or parts.plan.num_ranks > 1  # A graph has no masks.
        dropouts = sharded.attach_dropouts(
            parts.module, parts.options.seed, parts.callers, parts.calls_before, may_rest=may_rest
        )
    batches = Batches(parts, states.data.updates.optimizers)
    losses = LossSum(
        wires, trainer.interpreters, num_alike=parts.plan.tp, waits=lambda: states.written.are_there, same=batches.same
    )
    _listen(trainer, parts, states, losses, dropouts)
    if schedule.staleness:
        finish, update = states.data.finish, states.update.take
        states.stream = Stream(trainer, parts.module, states.parameters, agree=losses.of, finish=finish, update=update)
    return Execution(
        trainer=trainer,
        evaluator=evaluator,
        make_predictor=partial(_make_executor, forwards, in_evaluation, states, transport, measures=False),
        transport=transport,
        batches=batches,
        losses=losses,
        recorder=Recorder(
            schedule, wires, trainer.interpreters, sent={} if transport is None else transport.sent, data=states.data,
            host=states.host, held=[*states.parameters.values(), *states.buffers.values()],
        ),
        dropouts=dropouts,
    )  # fmt: skip


def _make_executor(
    schedule: Schedule, parts: Parts, states: States, transport: ProcessTransport | None, *, measures: bool
) -> LocalExecutor | ProcessExecutor:
    split, policy = parts.split, ComputePolicy.of(parts.plan, schedule, casts=parts.options.masters)
    loss = parts.loss if measures else None
    beside = states.data if states.data.is_beside else None
    if isinstance(parts.wires, OneProcess):
        return LocalExecutor(schedule, split, loss, policy, beside=beside)
    assert transport is not None, "processes have a transport"
    return ProcessExecutor(
        parts.wires.ranks[0],
        schedule,
        split,
        loss,
        policy=policy,
        transport=transport,
        on_reduce=states.data.reduce,
        watch=parts.wires.watch,
        beside=beside,
    )


def _listen(trainer: Executor, parts: Parts, states: States, losses: LossSum, dropouts: Dropouts | None) -> None:
    """Connect the interpreters with everything that depends on the instructions they run."""
    host, on_cpu = states.host, parts.device.type == "cpu" and not parts.wires.is_on_nccl(parts.device)
    is_stale = parts.schedule.staleness > 0

    def agree_early() -> None:
        """Start the sum of the loss during the backwards, so that a rank that finishes early can update its weights."""
        # On a GPU, reading a number would wait for all work launched so far.
        if on_cpu and not is_stale:
            losses.find()

    for interpreter in trainer.interpreters:
        if dropouts is not None:
            interpreter.select_rows, interpreter.keep_calls = dropouts.select, dropouts.keep_calls
        interpreter.written = states.written.slots
        interpreter.offload = None if host is None else host.activations
        interpreter.losses.on_all = None if isinstance(parts.wires, OneProcess) else agree_early
    if host is not None and host.states is not None:
        waits = parts.options.clip is not None or is_stale
        states.data.keep_states(host.states, None if waits else losses.find_scale)
