"""Seconds and bytes of a training step, by part, for many layouts at once."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardwise.cluster.cluster import Cluster, Pool
from shardwise.cluster.device import Device
from shardwise.cost.compute import Seconds
from shardwise.cost.constants import CONSTANTS, Constants
from shardwise.cost.host import exposed
from shardwise.cost.layouts import Layouts
from shardwise.cost.memory import StepBytes, step_bytes
from shardwise.cost.numbers import Floats, choose
from shardwise.cost.pipeline import SPLITS_BACKWARD, span
from shardwise.cost.places import Counts, count_blocks, typical_places
from shardwise.cost.replicas import exchange
from shardwise.cost.software import Software
from shardwise.cost.stage import Pieces, Pricer, Stages, Work, add
from shardwise.model.model import Model
from shardwise.model.operations import Router

#: Share of a node's memory for its ranks. The rest is for the system, the data and the programs themselves.
HOST_TAKEN = 0.85

# Relative error of each part, at 90 % confidence. Chosen so that the interval of the step, with independent parts,
# covers 90 % of the quality A rows of published/runs.csv; validate prints its coverage. The error of compute is smaller
# for devices with more sources: six for Ampere, three for Hopper, two for Blackwell, one for anything else. The error
# of matmuls in 8 and 4 bits is added.
_COMPUTE: Mapping[str, float] = {"ampere": 0.15, "volta": 0.16, "hopper": 0.22, "blackwell": 0.28, "cpu": 0.14}
_UNKNOWN_COMPUTE, _NARROW = 0.4, 0.2
_SPREAD: Mapping[str, float] = {
    "tp": 0.40,
    "cp": 0.60,
    "ep": 0.60,
    "bubble": 0.40,
    "hops": 0.60,
    "dp": 0.60,
    "optimizer": 0.60,
    "offload": 0.60,
    "other": 1.00,
}
# Mixtures of experts vary more: fusion and CUDA graphs change with every release.
_EXPERT_COMPUTE = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A step of each candidate: its seconds with the 90 % interval, their parts, and the bytes of its ranks.

    The parts add up to the seconds. `fits`: whether the fullest rank fits its device, and the node's ranks the host.
    """

    seconds: Floats
    low: Floats
    high: Floats
    parts: Mapping[str, Floats]
    bytes: StepBytes
    fits: np.ndarray


def price(
    model: Model,
    cluster: Cluster,
    layouts: Layouts,
    *,
    sequence: int,
    software: Software | None = None,
    constants: Constants = CONSTANTS,
    pieces: Pieces | None = None,
) -> Estimate:
    """Price a step of each layout. With several pools, a step is as slow as on the slowest, and must fit all of them.

    `pieces` are those of these layouts on the only pool, if they are already known.
    """
    known = pieces if len(cluster.pools) == 1 else None
    each = [
        _price_on(model, pool, layouts, sequence, software or Software(), constants, known) for pool in cluster.pools
    ]
    if len(each) == 1:
        return each[0]
    slowest = np.stack([one.seconds for one in each]).argmax(axis=0)

    def ofslowest_stage(values: list[Floats]) -> Floats:
        return np.asarray(np.choose(slowest, values))

    return Estimate(
        seconds=ofslowest_stage([one.seconds for one in each]),
        low=ofslowest_stage([one.low for one in each]),
        high=ofslowest_stage([one.high for one in each]),
        parts={name: ofslowest_stage([one.parts[name] for one in each]) for name in each[0].parts},
        bytes=each[0].bytes,
        fits=np.logical_and.reduce([one.fits for one in each]),
    )


def _price_on(
    model: Model, pool: Pool, layouts: Layouts, sequence: int, software: Software, constants: Constants,
    pieces: Pieces | None,
) -> Estimate:  # fmt: skip
    pricer = Pricer(model=model, pool=pool, software=software, constants=constants, sequence=sequence)
    stages = pricer.stages(layouts, pieces)
    places = typical_places(model, layouts, stages.dealt)
    counts = count_blocks(model, layouts, places, cuts_experts=software.cuts_experts)
    held = step_bytes(model, pool.device, layouts, places, sequence=sequence, software=software, constants=constants)
    parts = _parts(pricer, layouts, stages, counts)
    slowest = slowest_stage(stages.first, add(stages.middle, stages.extra), stages.last, layouts)
    parts["offload"] = exposed(pricer, layouts, slowest, held, places, counts)
    parts["other"] = parts["other"] + _searching(pricer, layouts, held) * sum(parts.values(), np.zeros(len(layouts)))
    seconds = sum(parts.values(), np.zeros(len(layouts)))
    has_experts = any(isinstance(each, Router) for block, _ in model.kinds for each in block.operations)
    width = spread(parts, seconds, has_experts=has_experts, device=pool.device, software=software)
    return Estimate(
        seconds=seconds,
        low=seconds / (1 + width),
        high=seconds * (1 + width),
        parts=parts,
        bytes=held,
        fits=_fits(pool, held),
    )


def _parts(pricer: Pricer, layouts: Layouts, stages: Stages, counts: Counts) -> dict[str, Floats]:
    """Return the seconds of a step by part: those of the slowest stage, and those of pipeline and replicas."""
    num = layouts.num_microbatches.astype(np.float64)
    fullest = add(stages.middle, stages.extra)
    slowest = slowest_stage(stages.first, fullest, stages.last, layouts)
    played = span(
        layouts.schedule,
        layouts.pp,
        layouts.chunks,
        num,
        as_stage(stages.first),
        as_stage(fullest),
        as_stage(stages.last),
        hop_seconds(pricer, layouts),
        steps_overlap=pricer.software.steps_overlap,
    )
    fill = pricer.constants.pipe_fill * pricer.software.interpreted_pipe * (layouts.pp > 1)
    is_split = (layouts.pp > 1) & np.isin(layouts.schedule, SPLITS_BACKWARD)
    backward = slowest.input + slowest.weight + slowest.halves * is_split
    return {
        "compute": num * (slowest.forward + backward),
        "recompute": num * slowest.again,
        "tp": num * (slowest.tp_forward + slowest.tp_backward),
        "cp": num * slowest.cp,
        "ep": num * slowest.ep,
        "bubble": played.bubble + fill * slowest.total,
        "hops": played.hops,
        "dp": exchange(pricer, layouts, counts, stages, slowest),
        "optimizer": optimizer_seconds(pricer, layouts, counts),
        "other": np.full(len(layouts), pricer.constants.step_seconds),
    }


def as_stage(work: Work) -> Seconds:
    exchanged = (work.cp + work.ep) / 2
    return Seconds(
        work.forward + work.tp_forward + exchanged,
        work.input + work.again + work.tp_backward + exchanged,
        work.weight,
    )


def slowest_stage(first: Work, middle: Work, last: Work, layouts: Layouts) -> Work:
    """Return the work of the slowest stage, which sets the pace."""
    alone = layouts.pp == 1
    is_last = ~alone & (last.total > np.maximum(first.total, middle.total))
    is_middle = ~alone & ~is_last & (middle.total >= first.total)
    return choose(is_last, last, choose(is_middle, middle, first))


def hop_seconds(pricer: Pricer, layouts: Layouts) -> Floats:
    """Return the seconds to send one activation to the next stage."""
    rows = layouts.microbatch * (pricer.sequence / layouts.cp)
    split = np.where(layouts.sequence_parallel | pricer.software.split_hops, layouts.tp, 1)
    num_bytes = rows * pricer.model.hidden * pricer.software.width / split
    stride = layouts.tp * layouts.cp * np.where(layouts.order == 1, 1, layouts.dp)
    hop = pricer.wires.hop(num_bytes, stride, layouts.pp)
    exposed = 1.0 - pricer.constants.hop_hidden * pricer.software.overlap_hops
    return hop / pricer.constants.hop_rate * exposed + pricer.constants.meeting_seconds * (layouts.pp > 1)


def optimizer_seconds(pricer: Pricer, layouts: Layouts, counts: Counts) -> Floats:
    """Return the seconds of Adam on a rank's states: 30 bytes of traffic per parameter (facts 4.4), and the norm.

    A copy of 16-bit gradients in fp32 is a read of 2 bytes and a write of 4.
    """
    owned = counts.trained.fullest.spread(layouts, 1)[:, 0]
    moved = owned * (30 + 2 * pricer.software.gradient_bytes + 6 * pricer.software.widens_gradients)
    num_tensors = sum(count * each.trains for block, count in pricer.model.kinds for each in block.parameters)
    return pricer.engine.optimizer(moved, num_tensors / layouts.pp)


def _searching(pricer: Pricer, layouts: Layouts, held: StepBytes) -> Floats:
    """Return the share of a step that the allocator spends on searching, freeing and reallocating as memory fills up.

    If a pipeline allocates new buffers for every microbatch, with several in flight, free blocks seldom fit.
    """
    begin = pricer.constants.pressed_from
    pressed = np.clip((held.peak / pricer.pool.device.memory_bytes - begin) / (1.0 - begin), 0.0, 1.0)
    return pressed * pricer.constants.pressed * (layouts.pp > 1) * pricer.software.fresh_buffers


def _fits(pool: Pool, held: StepBytes) -> np.ndarray:
    """Return whether the fullest rank fits its device, and the host bytes of a node's ranks fit the host."""
    on_host = held.host * pool.node.devices_per_node
    room = HOST_TAKEN * pool.node.host.memory_bytes
    return np.asarray((held.peak <= pool.device.memory_bytes) & (on_host <= room))


def spread(
    parts: Mapping[str, Floats], seconds: Floats, *, has_experts: bool, device: Device, software: Software
) -> Floats:
    """Return the relative half width w of the interval, which reaches from t / (1 + w) to t (1 + w)."""
    known = _COMPUTE.get(device.architecture, _UNKNOWN_COMPUTE)
    compute = max(known, _EXPERT_COMPUTE) if has_experts else known
    if software.matmul_precision in ("fp8", "fp4"):
        compute = float(np.hypot(compute, _NARROW))
    total = np.zeros_like(seconds)
    for name, part in parts.items():
        share = compute if name in ("compute", "recompute") else _SPREAD[name]
        total = total + (share * part / seconds) ** 2
    return np.sqrt(total)
