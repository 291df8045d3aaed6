"""Copies between a device and its host in each pass, and the part of them that compute does not hide.

A forward takes the longer of its compute and its copies, and so does a backward. Both directions of a link are used at
the same time. The optimizer's copies overlap with the last backward and the next forward, in the time in which these
leave the link free.
"""

import numpy as np

from shardwise.cluster.topology import Host
from shardwise.cost.layouts import Layouts
from shardwise.cost.memory import StepBytes
from shardwise.cost.numbers import Floats
from shardwise.cost.pipeline import SPLITS_BACKWARD
from shardwise.cost.places import Counts, Places
from shardwise.cost.software import Software
from shardwise.cost.stage import Pricer, Work

# Share of a link's rate to the host, in each direction, if both are in use (peers.md: 48.8 of 55.2 GB/s).
_BOTH_WAYS = 48.8 / 55.2
# Bytes of a parameter on the host, and of its gradient there.
_AT_HOME = 4.0


def link_rate(host: Host, num_devices: int) -> float:
    """Return the bytes per second of one device in one direction while all devices of the node copy.

    Devices behind one switch share its uplink. All devices share the host's memory bandwidth: one read or write for
    each byte.
    """
    shared = host.device_bytes_per_second / min(host.devices_on_link, max(num_devices, 1))
    return min(shared, host.memory_bytes_per_second / max(num_devices, 1))


def both_passes(work: Work) -> tuple[Floats, Floats]:
    """Return the seconds of a forward and of a backward, including exposed communication."""
    forward = work.forward + work.tp_forward + (work.cp + work.ep) / 2
    return forward, work.total - forward


def least_exposed(pricer: Pricer, slowest: Work, saved: Floats) -> Floats:
    """Return a lower bound of a microbatch's waits if `saved` bytes leave in the forward and return in the backward."""
    copied = saved / link_rate(pricer.pool.node.host, pricer.pool.node.devices_per_node)
    return np.asarray(sum(np.maximum(copied - computed, 0.0) for computed in both_passes(slowest)))


def has_masters(software: Software) -> bool:
    """Return whether the host has 16-bit weights and, of those that a rank updates, master weights in addition."""
    return software.shards_both and software.precision != "fp32"


def copied_weights(held: StepBytes, software: Software) -> Floats:
    """Return the bytes of offloaded weights that are copied to the device for each pass, on each place."""
    names = ("weights",) if has_masters(software) else ("weights", "masters")
    return sum((held.on_host[name] for name in names if name in held.on_host), np.zeros(()))


def exposed(pricer: Pricer, layouts: Layouts, slowest: Work, held: StepBytes, places: Places, counts: Counts) -> Floats:
    """Return the seconds of a step in which a device waits for its host."""
    parameters, optimizer = (
        layouts.offload_parameters,
        np.maximum(layouts.offload_optimizer, layouts.offload_parameters),
    )
    if not (optimizer.any() or layouts.offload_activations.any()):
        return np.zeros(len(layouts))
    rate = link_rate(pricer.pool.node.host, pricer.pool.node.devices_per_node)
    both = rate * _BOTH_WAYS
    num = layouts.num_microbatches.astype(np.float64)
    more = num > 1
    copied = copied_weights(held, pricer.software)
    weights, gradients = copied.max(axis=1), held.on_host["gradients"].max(axis=1)
    saved = held.on_host["activations"] / np.maximum(places.in_flight, 1.0)
    activations = (saved + held.on_host["casts"] + held.on_host["loss"]).max(axis=1)
    # Each half of a split backward fetches activations separately.
    halves = np.where((layouts.pp > 1) & np.isin(layouts.schedule, SPLITS_BACKWARD), 2, 1)
    # Only one direction is in use if a pass copies nothing but its activations.
    of_pass = np.where((weights > 0) | (layouts.pp > 1), both, rate)
    forward_in, forward_out = weights / of_pass, activations / of_pass
    # The last microbatch's gradients stay on the device, unless they are summed to shards. Earlier ones go to the host,
    # and return to be accumulated.
    returned = gradients * (num - 1.0) / num
    backward_in = (weights + returned + halves * activations) / of_pass
    backward_out = np.where(more, gradients, 0.0) / of_pass
    computed_forward, computed_backward = both_passes(slowest)
    forward = np.maximum(computed_forward, np.maximum(forward_in, forward_out))
    backward = np.maximum(computed_backward, np.maximum(backward_in, backward_out))
    owned = counts.trained.fullest.spread(layouts, 1)[:, 0]
    states = owned * (pricer.software.state_bytes - 4.0) * optimizer
    updated_in = (states + np.where(layouts.zero >= 2, gradients, 0.0)) / both
    updated_out = (states + _AT_HOME * owned * parameters) / both
    if has_masters(pricer.software):
        # Master weights come to be updated, and again to be cast in place of the weights. The casts go home.
        updated_in = updated_in + (2 * _AT_HOME - pricer.software.width) * owned * parameters / both
        updated_out = updated_out + weights / both
    room_in, room_out = forward + backward - forward_in - backward_in, forward + backward - forward_out
    tail = np.maximum(updated_in - room_in, updated_out - room_out)
    return np.asarray(num * (forward + backward - slowest.total) + np.maximum(tail, 0.0))
