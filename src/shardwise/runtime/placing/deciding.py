"""Streamed to the devices, or computed by the host: what has no room on them is whichever takes less time.

A weight that is streamed crosses a link twice in training, up in the forward and down in the backward, beside the
computation. One that the host computes with takes what the host's cores take, and the devices wait for it, unless there
are microbatches for them to go on with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.dataflow.machine import Machine
from shardwise.runtime.placing.host import Unit
from shardwise.runtime.placing.layout import NoRoomError, lay_out
from shardwise.runtime.placing.loads import Loads
from shardwise.runtime.placing.places import Place, matmul_flops
from shardwise.units import format_seconds

#: A backward computes twice what its forward does.
_TRAINING = 3.0
#: Weights come in for the forward and for the backward. Gradients go out beside them.
_PASSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether units are streamed, and why."""

    streams: bool
    reason: str


def decide(
    loads: Loads,
    units: Sequence[Unit],
    places: Sequence[Place],
    *,
    trains: bool,
    is_pipelined: bool,
) -> Decision:
    """Compare both ways for one batch. Without an example nothing is known of it, and units are streamed."""
    if not loads.are_measured:
        return Decision(streams=True, reason="streamed: no example= says how long the host would compute")
    devices = [place for place in places if any(unit.place is place for unit in units)]
    try:
        runs = lay_out(loads.calls, places, range(len(places)), num_in_flight=1, inseparable=loads.inseparable)
    except NoRoomError:
        return Decision(streams=True, reason="streamed: with units of its own the host would have no room either")
    first = matmul_flops(places[0].device) / places[0].speed
    flops = {place.name: first * place.speed for place in places}
    times = _TRAINING if trains else 1.0
    costs = {
        place.name: times * sum(loads.calls[call].cost for call in run) for place, run in zip(places, runs, strict=True)
    }
    taken = [costs[place.name] / flops[place.name] for place in places]
    computed = max(taken) if is_pipelined else sum(taken)
    streamed = max(
        sum(costs.values()) / max(flops[place.name] for place in devices),
        (_PASSES if trains else 1) * max(_link_seconds(place, units) for place in devices),
    )
    ways = f"{format_seconds(streamed)} a pass if streamed, {format_seconds(computed)} if the host computes"
    return Decision(streams=streamed <= computed, reason=ways)


def _link_seconds(device: Place, units: Sequence[Unit]) -> float:
    """What the streamed units of a device take on its link, as measured."""
    with Machine([device.name]) as machine:
        link = machine.measure()["host", device.name]
    return sum(link.seconds(unit.weight_bytes) for unit in units if unit.place is device and unit.is_streamed)
