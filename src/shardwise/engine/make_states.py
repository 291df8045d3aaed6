"""Place the model state of this process: its stages' parameters in buckets, the part on the host, and the names."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.module_state import ModuleState
from shardwise.engine.optimizer_state import OptimizerState
from shardwise.engine.parts import Parts
from shardwise.engine.update import DeviceUpdate, Update, can_divide, find_device_update, use_kernels
from shardwise.errors import ShardwiseError
from shardwise.execution.weight_stash import Stream
from shardwise.ranks.wires import ManyProcesses, OneProcess, Wires
from shardwise.stages.stage import Stage
from shardwise.states.buckets.make import HeldStages, ParameterOwners, ZeroConfig
from shardwise.states.buckets.ties import make_ties
from shardwise.states.data_parallel import DataParallel
from shardwise.states.host import Host, make_host
from shardwise.states.make_optimizers import MadeOptimizer
from shardwise.states.shared_buffers import SharedBuffers


@dataclass(slots=True, kw_only=True)
class States:
    """The state of the model that this process holds, under the names of the original module.

    `stream` feeds batches if the pipeline is never flushed between steps.
    """

    parameters: dict[str, nn.Parameter]
    buffers: dict[str, Tensor]
    data: DataParallel
    host: Host | None
    update: Update
    #: The update by the device alone, if that is possible.
    device_update: DeviceUpdate | None
    module: ModuleState
    optimizers: OptimizerState
    #: Buffers that forwards write to, and that other ranks have copies of.
    written: SharedBuffers
    stream: Stream | None = None

    def begin_step(self) -> None:
        """Begin a step without the gradients of the last."""
        self.data.updates.check_hooks()
        self.data.updates.show_attributes()
        self.data.begin_step()
        if self.host is not None:
            self.host.begin_step()

    def begin_stream(self) -> None:
        """Restart after the weights were changed from outside: the pipeline is empty."""
        if self.stream is not None:
            self.stream.begin_anew()

    def flush(self) -> None:
        """Finish all work in flight: afterwards weights and state on the host are up to date."""
        if self.stream is not None:
            with torch.enable_grad():
                self.stream.flush()
        if self.host is not None:
            self.host.wait()
        self.data.take_over()

    def home_of(self, weight: nn.Parameter) -> torch.device:
        """Return the device of the optimizer state of a weight of this process."""
        states = None if self.host is None else self.host.states
        return torch.device("cpu") if states is not None and weight in states.weights else weight.device

    def close(self) -> None:
        """Release hooks, groups and threads."""
        if self.host is not None:
            self.host.close()
        self.data.close()


def make_states(parts: Parts, optimizers: Sequence[MadeOptimizer], sharing: ZeroConfig) -> States:
    """Move the state of this process's stages to where the plan places it. Every process calls this alike."""
    module, plan, schedule, wires, sharded = parts.module, parts.plan, parts.schedule, parts.wires, parts.sharded
    here = [stage for stage in parts.split.stages if stage is not None]
    held = {name for stage in here for name in stage.parameters}
    parameters = {name: each for name, each in module.named_parameters() if name in held}
    buffers: dict[str, Tensor] = {name: each for stage in here for name, each in stage.buffers.items()}
    experts = sharded.experts.parameters if sharded.experts is not None else {}

    def parameter_of(name: str, step: int) -> nn.Parameter:
        assert states.stream is not None, "the pipe is emptied between steps"
        return states.stream.parameter_of(name, step)

    pipelines = None if isinstance(wires, OneProcess) else wires.mesh.pipelines
    wires.gather(None)  # A barrier: creating process groups for ties cannot be interrupted.
    ties = () if pipelines is None else make_ties(schedule.placement, parts.split, pipelines, wires.mesh.rank)
    wires.connect([tie.group for tie in ties], parts.device)
    held_stages = HeldStages(
        stages=_stages_here(parts), schedule=schedule, ranks=wires.ranks, module=module,
        parameter_of=parameter_of if schedule.staleness else None,
    )  # fmt: skip
    owners = ParameterOwners(
        replicas_of=lambda name: wires.experts if name in experts else wires.dense, ties=ties, tensor=sharded.tensor,
        joining=sharded if sharded.is_in_parts else None, apart=experts,
    )  # fmt: skip
    exchange = wires.make_exchange(held_stages.device)
    data = DataParallel(held_stages, owners, sharing=sharing, optimizers=optimizers, exchange=exchange)
    for optimizer in data.updates.optimizers:
        vars(optimizer)["zero_grad"] = partial(_zeroed, optimizer.zero_grad)
    data.updates.pieces = _pieces_of(parts)
    data.updates.is_in_turn = bool(plan.offload.optimizer or plan.offload.parameters)
    data.updates.check_hooks()
    data.updates.check_kept()
    use_kernels(parts, data)
    has_copies = isinstance(wires, ManyProcesses) and (plan.dp * plan.cp > 1 or len(schedule.placement.pipes) > 1)
    states = States(
        parameters=parameters,
        buffers=buffers,
        data=data,
        host=make_host(plan, parts.device, data, wires.gather),
        update=Update(data, wires, parts.options.clip, divides_on=parts.device if can_divide(parts, data) else None),
        device_update=find_device_update(parts, data),
        module=ModuleState(
            module, parameters, buffers, data=data, sharded=sharded, shapes=parts.shapes,
            from_pipeline=lambda part: _from_pipeline(part, parts),
        ),
        optimizers=OptimizerState(
            parameters, data=data, sharded=sharded, shapes=parts.shapes, order=parts.order,
            gather=wires.gather, home_of=lambda weight: states.home_of(weight),
        ),
        written=SharedBuffers(
            module, buffers, parts.written, how=parts.options.buffers, units=parts.split.units,
            stages=[number for number, stage in enumerate(parts.split.stages) if stage is not None],
            gather=(lambda given: _from_copies(given, wires)) if has_copies else None,
        ),
    )  # fmt: skip
    return states


def sharing_of(parts: Parts) -> ZeroConfig:
    """Return how the model state is sharded over replicas, given a compute-only schedule."""
    plan, schedule, bucket_bytes = parts.plan, parts.schedule, parts.options.bucket_bytes
    is_alone, is_stale = plan.num_ranks == plan.pp, schedule.staleness > 0
    # With two versions of the weights, the version that a batch used is updated in place.
    masters = plan.precision != "fp32" and not is_stale and parts.options.masters
    has_masters = masters and any(each.itemsize < 4 for each in parts.module.parameters())
    updates_early = plan.offload.optimizer > 0 or plan.offload.parameters > 0
    sharing = ZeroConfig(
        zero=plan.zero,
        masters=masters,
        layerwise=not schedule.splits_backward,
        offloaded=plan.offload.parameters,
        # Two versions of the weights swap right after an update, so their gather cannot be deferred.
        updates_late=updates_early and not is_stale,
        # Updates in the backward, with state from the host, work bucket by bucket; so do fp32 masters of 16-bit
        # weights, whose gradients are rounded as under any other plan. Otherwise gradients stay where autograd puts
        # them: they are not copied, and take no memory during the next forward.
        local=is_alone and plan.zero == 0 and (is_stale or not (updates_early or has_masters)),
    )
    return sharing if bucket_bytes is None else replace(sharing, bucket_bytes=bucket_bytes)


def _pieces_of(parts: Parts) -> str | None:
    """Describe what an optimizer of this process holds, if it is not every parameter, whole; else None."""
    plan, experts = parts.plan, parts.sharded.experts
    if plan.zero:
        return f"pieces of parameters, as zero={plan.zero} keeps them"
    if plan.tp > 1:
        return f"a rank's part of every layer (tp={plan.tp})"
    if experts is not None and experts.parameters:
        return f"a rank's experts (ep={plan.ep})"
    if plan.pp > 1 and not isinstance(parts.wires, OneProcess):
        return f"the parameters of one stage (pp={plan.pp})"
    return "some parameters at a time (offload)" if plan.offload.optimizer or plan.offload.parameters else None


def _stages_here(parts: Parts) -> dict[int, Stage]:
    """Return the stages of this process's ranks, by their numbers in the schedule."""
    split, placement = parts.split, parts.schedule.placement
    numbers = (number for rank in parts.wires.ranks for number in placement.stages[rank])
    every = {number: split.stages[number % split.num_stages] for number in numbers}
    return {number: stage for number, stage in every.items() if stage is not None}


def _from_pipeline(part: dict[str, Any], parts: Parts) -> list[dict[str, Any]]:
    """Return the parts of all ranks of this pipeline, on the CPU."""
    if parts.plan.pp == 1 or isinstance(parts.wires, OneProcess):
        return []
    told = {name: each.cpu() if isinstance(each, Tensor) else each for name, each in part.items()}
    return parts.wires.gather(told, "pp")


def _from_copies(given: Any, wires: Wires) -> list[Any]:
    """Gather from the ranks that compute other rows with the same layers, in the order of the rows."""
    axes = wires.mesh.coordinates
    told = wires.gather(((axes["dp"], axes["pp"], axes["cp"]), axes["tp"], given))
    return [each for _, tp, each in sorted(told, key=lambda part: part[0]) if tp == axes["tp"]]


def _zeroed(zero_grad: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Let a habitual `optimizer.zero_grad()` pass: every step begins without gradients anyway."""
    with suppress(ShardwiseError):
        zero_grad(*args, **kwargs)
