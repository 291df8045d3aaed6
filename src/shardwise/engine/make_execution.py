"""What runs the steps of this process: an executor of one rank or of all, and what listens to its interpreters."""

from collections.abc import Callable, Collection

import torch
from torch import nn

from shardwise.engine.batches import Batches
from shardwise.engine.loss_sum import LossSum
from shardwise.engine.parts import Execution, States
from shardwise.engine.prepare import Options
from shardwise.engine.recorder import Recorder
from shardwise.engine.sharded import Sharded
from shardwise.execution.compute_policy import ComputePolicy
from shardwise.execution.continuous import Stream
from shardwise.execution.local import LocalExecutor
from shardwise.execution.pipeline import forward_only
from shardwise.execution.process import ProcessExecutor
from shardwise.execution.weight_stash import WeightStash
from shardwise.planner.plan import Plan
from shardwise.ranks.transport import ProcessTransport
from shardwise.ranks.wires import ManyProcesses, OneProcess
from shardwise.schedule.instruction import SENDS
from shardwise.schedule.schedule import Schedule
from shardwise.sharding.dropout import Dropouts
from shardwise.sharding.rng_tracker import Channels
from shardwise.sharding.tensor.columns import ColumnParallelLinear
from shardwise.stages.losses import by_rows
from shardwise.stages.stage import Loss, Split


def make_execution(
    module: nn.Module,
    plan: Plan,
    split: Split,
    schedule: Schedule,
    *,
    loss: Loss,
    options: Options,
    callers: Collection[str],
    states: States,
    sharded: Sharded,
    wires: OneProcess | ManyProcesses,
    device: torch.device,
) -> Execution:
    """Make what runs a step and an evaluation. Every process calls this alike.

    `callers` are modules that drop at random by calling a function.
    """
    transport = wires.make_transport(_links_of(schedule), device) if isinstance(wires, ManyProcesses) else None
    measured = by_rows(loss) if options.pad else loss
    trainer, evaluator = (
        _make_executor(each, split, measured, plan, states, transport, wires)
        for each in (schedule, forward_only(schedule))
    )
    dropouts = None if options.compile else _attach_dropouts(module, plan, options.seed, callers, sharded)
    losses = LossSum(wires, trainer.interpreters, num_alike=plan.tp, waits=lambda: states.shares_statistics)
    _listen(trainer, plan, states, losses, dropouts, clip=options.clip, is_alone=isinstance(wires, OneProcess))
    return Execution(
        trainer=trainer,
        evaluator=evaluator,
        transport=transport,
        batches=Batches(plan, wires.mesh, device=device, pad=options.pad, context=sharded.context),
        losses=losses,
        recorder=Recorder(
            schedule, wires, trainer.interpreters, transport, data=states.data, host=states.host,
            held=[*states.parameters.values(), *states.buffers.values()],
        ),
        dropouts=dropouts,
    )  # fmt: skip


def make_stream(module: nn.Module, schedule: Schedule, execution: Execution, states: States) -> Stream | None:
    """Where the schedule never empties the pipe: what feeds it, from an empty one and the weights as they are."""
    if not schedule.staleness:
        return None
    trained = {name: each for name, each in states.parameters.items() if each.requires_grad}
    stream = Stream(
        execution.trainer,
        WeightStash(module, trained),
        agree=execution.losses.of,
        finish=states.update.finish,
        update=states.update.take,
    )
    for interpreter in execution.trainer.interpreters:
        interpreter.select_weights = stream.select_weights
    return stream


def _make_executor(
    schedule: Schedule,
    split: Split,
    loss: Loss,
    plan: Plan,
    states: States,
    transport: ProcessTransport | None,
    wires: OneProcess | ManyProcesses,
) -> LocalExecutor | ProcessExecutor:
    policy, beside = ComputePolicy.of(plan), states.data if states.data.is_beside else None
    if isinstance(wires, OneProcess):
        return LocalExecutor(schedule, split, loss, policy, beside=beside)
    assert transport is not None, "processes have a transport"
    return ProcessExecutor(
        wires.ranks[0],
        schedule,
        split,
        loss,
        policy=policy,
        transport=transport,
        on_reduce=states.data.reduce,
        watch=wires.waiter,
        beside=beside,
    )


def _listen(
    trainer: LocalExecutor | ProcessExecutor,
    plan: Plan,
    states: States,
    losses: LossSum,
    dropouts: Dropouts | None,
    *,
    clip: float | None,
    is_alone: bool,
) -> None:
    """Tell interpreters what else depends on what they run."""
    host, on_cpu = states.host, all(each.device.type == "cpu" for each in states.parameters.values())

    def find_scale() -> float | None:
        count = losses.find_count()
        return None if count is None else 1 / count

    def agree_early() -> None:
        """Begin to agree while backwards go on: a rank that has ended its own can update its weights then."""
        # A host that asks a GPU for a number waits for all that it has told it to do.
        if states.stream is None and on_cpu:
            losses.find()

    for interpreter in trainer.interpreters:
        interpreter.select_rows = None if dropouts is None else dropouts.select
        interpreter.offload = None if host is None else host.activations
        interpreter.on_losses = None if is_alone else agree_early
    if host is not None and host.states is not None:
        waits = clip is not None or plan.schedule == "pipedream-2bw"
        states.data.keep_states(host.states, None if waits else find_scale)


def _attach_dropouts(
    module: nn.Module, plan: Plan, seed: int, callers: Collection[str], sharded: Sharded
) -> Dropouts | None:
    """Let dropouts, and `callers` of functions that drop, drop what they would under any plan."""
    dropouts = Dropouts(seed=seed, channels=_channels_of(module), attends=plan.cp == 1)
    if not dropouts.attach(module, callers):
        return None
    if sharded.context is not None:
        sharded.context.drops = dropouts.weight_drop
    return dropouts


def _channels_of(module: nn.Module) -> Callable[[], Channels | None]:
    """What says which channels this rank is at, inside of layers that are cut."""
    trackers = [
        each.rng for each in module.modules() if isinstance(each, ColumnParallelLinear) and each.rng is not None
    ]
    return lambda: next((each.channels for each in trackers if each.is_inside), None)


def _links_of(schedule: Schedule) -> set[tuple[int, int]]:
    """Which ranks of a pipeline send to which."""
    ranks, every = schedule.placement.ranks, (each for order in schedule.orders for each in order)
    return {(ranks[each.stage], ranks[each.peer]) for each in every if each.kind in SENDS and each.peer is not None}
