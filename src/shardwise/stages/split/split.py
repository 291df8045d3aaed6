"""Split a module into stages.

1. `units.py` finds the units: the pieces between which the module may be cut.
2. `flow.py` runs the module once on the example, and records the data flow between calls of units.
3. `cut.py` divides the calls into stages, each a run of calls. (`choose.py` goes back to 1 for finer units if needed.)
4. `parts.py` determines what each stage reads, writes and holds.
   `compare.py` runs all stages on a second batch, and compares them with the module.
5. `materialise.py` gives this process the weights of its stages, and frees those of others.
6. `module_stage.py` runs a stage: the module's own forward, with the units of other stages skipped.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from shardwise.stages.rows import tensors_in
from shardwise.stages.split.choose import SplitOptions, choose, costs_of
from shardwise.stages.split.compare import StageCheck
from shardwise.stages.split.evaluated import find_evaluated, with_gradients
from shardwise.stages.split.flow import watch
from shardwise.stages.split.forecast import Forecast
from shardwise.stages.split.materialise import free, materialise
from shardwise.stages.split.meta import has_meta
from shardwise.stages.split.module_stage import ModuleStage
from shardwise.stages.split.parts import StagePart, make_parts
from shardwise.stages.split.sources import HeldTensor
from shardwise.stages.split.switch import Switch
from shardwise.stages.split.unit_flow import UnitFlow
from shardwise.stages.stage import Batch, Second, Split


def split(
    module: nn.Module,
    num_stages: int,
    example: Batch,
    *,
    only: Collection[int] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    probe: Callable[[Any], None] | None = None,
    second: Second | None = None,
    read_by_loss: Callable[[], Collection[str]] = tuple,
    evaluates: bool = False,
    **options: Any,
) -> Split:
    """Split an unmodified module into stages, from one run on an example microbatch.

    `options` are the options of the cut: see `SplitOptions`. `only` are the stages of this process; the weights of
    others are freed. A module on the meta device is materialised on `device` from `seed`, for these stages only.
    `probe` gets the module's output on the example. With `second` the stages are tried before anything is freed. The
    last holds parameters that are `read_by_loss`, asked after the run, and in no unit. `evaluates`: a single stage too
    is given the calls of evaluations.
    """
    asked = SplitOptions(num_stages=num_stages, **options)
    units, flow, where = choose(module, example, asked, probe)
    flow = _with_reads(module, units, with_gradients(module, units, example, flow), read_by_loss())
    parts = make_parts(module, units, flow, where)
    # No call is lost or duplicated.
    placed = list(chain.from_iterable(part.calls for part in parts))
    assert placed == list(range(len(flow.calls))), f"{len(flow.calls)} units were called, {len(placed)} are in stages"
    called = {call.unit: units[call.unit] for call in flow.calls}
    if flow.traces:
        recorded = watch(module, called, example, records=True)
        flow = replace(flow, left=recorded.left, slots=recorded.slots)
    if second is not None and (second.reruns or second.has_threads):
        # Attributes that are set around a call and then restored have to be set again when the call is rerun.
        noted = watch(module, called, example, notes_flags=True, notes_glue=second.has_threads)
        flow = replace(flow, slots={**noted.slots, **flow.slots}, assigns=noted.assigns)
    if second is not None and not has_meta(module):
        StageCheck(module, called, flow, parts, example, second).check()
    evaluated = find_evaluated(module, units, example, flow, parts) if evaluates or num_stages > 1 else None
    here = range(num_stages) if only is None else sorted(only)
    flow.leave_for({call for stage in here for call in parts[stage].calls})
    home = torch.device(device) if device is not None else _home(module, example)
    kept = set().union(*(parts[stage].holds for stage in here))
    if only is not None:
        free(module, kept, flow.in_glue, home)
    materialise(module, kept, seed=seed, device=home)
    # Units that the example does not call get gates too, to notice a batch that calls one: one stage has its weights.
    switch, forecast = Switch(units if num_stages > 1 or evaluated else called), Forecast(called, example)
    costs = costs_of(flow, asked)
    return Split(
        stages=tuple(
            ModuleStage(module, switch, flow, part, forecast) if part.stage in here else None for part in parts
        ),
        reads=tuple(tuple(part.reads.values()) for part in parts),
        writes=tuple(tuple(part.writes.values()) for part in parts),
        makers={name: part.stage for part in parts for name in part.writes.values()},
        ties=_ties(module, parts),
        units=tuple(tuple(flow.calls[call].name for call in part.calls) for part in parts),
        unit_costs=tuple(tuple(costs[call] for call in part.calls) for part in parts),
        unit_bytes=tuple(tuple(float(flow.calls[call].weight_bytes) for call in part.calls) for part in parts),
        left=tuple(flow.slots.values()),
        rewritten=flow.rewritten,
        shapes_by_data=flow.shapes_by_data,
        draws_in_python=flow.draws_in_python,
        compiled=flow.compiled,
        assigns=flow.assigns,
        held_last=parts[-1].holds,
        evaluated=None if evaluated is None else evaluated.of,
    )


def _with_reads(module: nn.Module, units: Mapping[str, nn.Module], flow: UnitFlow, names: Iterable[str]) -> UnitFlow:
    """Return the flow with the parameters that the loss reads and no unit has."""
    in_units = {id(each) for unit in units.values() for each in unit.parameters()}
    read = {HeldTensor(name) for name in names if id(module.get_parameter(name)) not in in_units}
    return replace(flow, output_needs=flow.output_needs | read)


def stage_costs(module: nn.Module, num_stages: int, example: Batch, **options: Any) -> list[float]:
    """Return what each stage would cost, in FLOPs or the equivalent, if the module were split. Change nothing."""
    asked = SplitOptions(num_stages=num_stages, **options)
    _, flow, where = choose(module, example, asked)
    costs = costs_of(flow, asked)
    return [sum(costs[call] for call in calls) for calls in where]


def _ties(module: nn.Module, parts: Sequence[StagePart]) -> dict[str, tuple[int, ...]]:
    held = {name: tuple(part.stage for part in parts if name in part.holds) for name, _ in module.named_parameters()}
    return {name: stages for name, stages in held.items() if len(stages) > 1}


def _home(module: nn.Module, example: Batch) -> torch.device:
    """Return the device for the weights of a module on the meta device: that of the example, if it has tensors."""
    tensors = chain(tensors_in(example), module.parameters(), module.buffers())
    return next((each.device for each in tensors if not each.is_meta), torch.device("cpu"))
