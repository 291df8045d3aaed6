"""Where the state of the model is on this process: parameters of its stages in buckets, the host's part, and names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.named_state import ModuleState
from shardwise.engine.optimizer_state import OptimizerState
from shardwise.engine.parts import States
from shardwise.engine.sharded import Sharded
from shardwise.engine.update import Update
from shardwise.planner.plan import Plan
from shardwise.ranks.host_exchange import make_exchange
from shardwise.ranks.replicas import Replicas
from shardwise.ranks.wires import ManyProcesses, OneProcess
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Split, Stage
from shardwise.states.batch_norm import SharedStatistics
from shardwise.states.buckets.make import HeldStages, ParameterOwners, ZeroConfig
from shardwise.states.buckets.ties import make_ties
from shardwise.states.data_parallel import DataParallel
from shardwise.states.host import make_host
from shardwise.states.parameter_group import MakeOptimizer, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """What is known of a module before it is cut: the order of its parameters, and whole shapes by name."""

    order: tuple[str, ...]
    shapes: Mapping[str, torch.Size]

    @staticmethod
    def of(module: nn.Module) -> "Original":
        return Original(
            order=tuple(name for name, _ in module.named_parameters()),
            shapes={name: each.shape for name, each in module.state_dict().items() if isinstance(each, Tensor)},
        )


def make_states(
    module: nn.Module,
    plan: Plan,
    split: Split,
    schedule: Schedule,
    *,
    optimizer: MakeOptimizer | Sequence[Share],
    sharing: ZeroConfig,
    sharded: Sharded,
    original: Original,
    wires: OneProcess | ManyProcesses,
    clip: float | None,
    device: torch.device,
) -> States:
    """Move the state of this process's stages to where the plan has it. Every process calls this alike."""
    here = [stage for stage in split.stages if stage is not None]
    held = {name for stage in here for name in stage.parameters}
    parameters = {name: each for name, each in module.named_parameters() if name in held}
    buffers: dict[str, Tensor] = {name: each for stage in here for name, each in stage.buffers.items()}
    found: list[States] = []

    def parameter_of(name: str, step: int) -> nn.Parameter:
        stream = found[0].stream
        return parameters[name] if stream is None else stream.parameter_of(name, step)

    experts = sharded.experts.parameters if sharded.experts is not None else {}

    def replicas_of(name: str) -> Replicas:
        return wires.experts if name in experts else wires.dense

    ties = (
        ()
        if isinstance(wires, OneProcess)
        else make_ties(schedule.placement, split, wires.mesh.pipelines, wires.mesh.rank)
    )
    wires.connect([tie.group for tie in ties], device)
    held_stages = HeldStages(
        stages=_stages_here(split, schedule, wires.ranks), schedule=schedule, ranks=wires.ranks, module=module,
        parameter_of=parameter_of if schedule.staleness else None,
    )  # fmt: skip
    owners = ParameterOwners(
        replicas_of=replicas_of, ties=ties, tensor=sharded.tensor, joining=sharded if sharded.is_in_parts else None,
        apart=experts,
    )  # fmt: skip
    exchange = make_exchange(held_stages.device, wires.watch)
    data = DataParallel(held_stages, owners, sharing=sharing, optimizer=optimizer, exchange=exchange)
    host = make_host(plan, device, data, wires.gather)
    has_copies = plan.dp > 1 or len(schedule.placement.pipes) > 1
    states = States(
        parameters=parameters,
        buffers=buffers,
        data=data,
        host=host,
        update=Update(data, wires, clip),
        module=ModuleState(
            module, parameters, buffers, data=data, sharded=sharded, shapes=original.shapes,
            from_pipeline=lambda part: _from_pipeline(part, plan, wires),
        ),
        optimizers=OptimizerState(
            parameters, data=data, tensor=sharded.tensor, experts=sharded.experts, shapes=original.shapes,
            order=original.order, gather=wires.gather, home_of=lambda weight: found[0].home_of(weight),
        ),
        statistics=SharedStatistics(module, buffers, lambda given: _from_copies(given, wires))
        if has_copies and isinstance(wires, ManyProcesses)
        else None,
        make_stream=lambda: None,
    )  # fmt: skip
    found.append(states)
    return states


def _stages_here(split: Split, schedule: Schedule, ranks: Sequence[int]) -> dict[int, Stage]:
    """The stages of some ranks, by their numbers in the schedule."""
    numbers = (number for rank in ranks for number in schedule.placement.stages[rank])
    every = {number: split.stages[number % split.num_stages] for number in numbers}
    return {number: stage for number, stage in every.items() if stage is not None}


def _from_pipeline(part: dict[str, Any], plan: Plan, wires: OneProcess | ManyProcesses) -> list[dict[str, Any]]:
    """The parts of all ranks of this pipeline, on the CPU."""
    if plan.pp == 1 or isinstance(wires, OneProcess):
        return []
    told = {name: each.cpu() if isinstance(each, Tensor) else each for name, each in part.items()}
    return wires.gather(told, "pp")


def _from_copies(given: Any, wires: OneProcess | ManyProcesses) -> list[Any]:
    """What is given by the ranks that have other rows of the same layers, in the order of the rows."""
    axes = wires.mesh.coordinates
    told = wires.gather(((axes["dp"], axes["pp"], axes["cp"]), axes["tp"], given))
    return [each for _, tp, each in sorted(told, key=lambda part: part[0]) if tp == axes["tp"]]
