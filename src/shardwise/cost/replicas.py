"""The time that data parallelism adds to a step: exposed reductions of gradients and gathers of shards."""

from typing import NamedTuple

import numpy as np

from shardwise.cost.collective import Group, Wires
from shardwise.cost.layouts import Layouts
from shardwise.cost.numbers import Floats, choose
from shardwise.cost.places import Counts
from shardwise.cost.stage import Pricer, Stages, Work


def exchange(pricer: Pricer, layouts: Layouts, counts: Counts, stages: Stages, pace: Work) -> Floats:
    """Return the exposed seconds of communication between replicas in a step."""
    is_sharded = layouts.zero >= 3
    if is_sharded.all():
        return _sharded(pricer, layouts, counts, stages, pace)
    replicated = _replicated(pricer, layouts, counts, pace)
    if not is_sharded.any():
        return replicated
    return np.where(is_sharded, _sharded(pricer, layouts, counts, stages, pace), replicated)


class _Replicas(NamedTuple):
    """The ranks with the same dense weights; those of them that shard one copy of states; those with the same shard."""

    all: Group
    shard: Group
    copies: Group
    shard_size: Floats


def _replicas(wires: Wires, layouts: Layouts) -> _Replicas:
    """Place the replicas. If `dp` is the outermost axis, consecutive replicas are a whole pipeline apart."""
    count, size = layouts.replicas, layouts.num_sharing
    apart = np.where(layouts.order == 1, layouts.pp, 1)
    near, far = np.minimum(size, layouts.cp), np.maximum(size // layouts.cp, 1)
    jump = layouts.tp * layouts.cp * apart
    plain = layouts.order == 0
    whole = wires.nested(layouts.cp, layouts.tp, layouts.dp, jump)
    shard = wires.nested(near, layouts.tp, far, jump)
    return _Replicas(
        all=choose(plain, wires.group(count, layouts.tp), whole),
        shard=choose(plain, wires.group(size, layouts.tp), shard),
        copies=wires.group(np.maximum(count // size, 1), layouts.tp * size * apart),
        shard_size=size.astype(np.float64),
    )


def _expert_replicas(pricer: Pricer, layouts: Layouts, counts: Counts) -> Group:
    """Return the group of ranks with the same experts."""
    return pricer.wires.group(
        np.maximum(counts.expert_replicas.astype(np.int64), 1),
        layouts.ep * (layouts.tp if pricer.software.cuts_experts else 1),
    )


def _replicated(pricer: Pricer, layouts: Layouts, counts: Counts, pace: Work) -> Floats:
    """Price ZeRO 0 to 2: gradients are reduced (ZeRO-2: with every microbatch), and updated shards are gathered.

    If states are sharded within groups of replicas, each rank's shard is also reduced over the groups.
    """
    wires, software, sent = pricer.wires, pricer.software, pricer.software.gather_bytes
    dense, expert = counts.trained.dense.max(axis=1), counts.trained.expert.max(axis=1)
    replicas = _replicas(wires, layouts)
    experts = _expert_replicas(pricer, layouts, counts)
    scatter = wires.all_gather(dense * software.reduce_bytes, replicas.shard)
    scatter = scatter + wires.all_gather(expert * software.reduce_bytes, experts)
    between = wires.all_reduce(dense * software.reduce_bytes / replicas.shard_size, replicas.copies)
    gather = wires.all_gather(dense * sent, replicas.shard) + wires.all_gather(expert * sent, experts)
    reduce = wires.all_reduce(dense * software.reduce_bytes, replicas.all)
    reduce = reduce + wires.all_reduce(expert * software.reduce_bytes, experts)
    rate, hidden = pricer.constants.exchange_rate, pricer.constants.dp_hidden
    shares = (layouts.zero >= 1) & software.scatters_gradients
    gradients = np.where(shares, scatter, reduce) / rate
    parameters = np.where(layouts.zero >= 1, gather, 0.0) / rate
    last = np.where(shares, between, 0.0) / rate
    # Communication can overlap with the backward (forward) of one microbatch.
    backward, forward = pace.backward + pace.tp_backward, pace.forward + pace.tp_forward
    before = gradients
    if software.overlap_gradients:
        gradients = gradients + last - np.minimum((gradients + last) * hidden, backward)
        before = before - np.minimum(before * hidden, backward)
    else:
        gradients = gradients + last
    if software.overlap_parameters:
        parameters = parameters - np.minimum(parameters * hidden, forward)
    earlier = np.where(layouts.zero == 2, (layouts.num_microbatches - 1) * before, 0.0)
    meetings = pricer.constants.meeting_seconds * (layouts.replicas > 1) * (1 + (layouts.zero >= 1))
    return gradients + earlier + parameters + meetings


def _sharded(pricer: Pricer, layouts: Layouts, counts: Counts, stages: Stages, pace: Work) -> Floats:
    """Price ZeRO-3: for every microbatch, each layer is gathered for both passes and its gradients are scattered."""
    wires, software, sent = pricer.wires, pricer.software, pricer.software.gather_bytes
    replicas = _replicas(wires, layouts)
    group = replicas.shard
    experts, expert = _expert_replicas(pricer, layouts, counts), counts.layer_expert
    layer = counts.layer - expert
    gather = wires.all_gather(layer * sent, group) + wires.all_gather(expert * sent, experts)
    made, made_expert = counts.trained.layer, counts.trained.layer_expert
    scatter = wires.all_gather((made - made_expert) * software.reduce_bytes, group)
    scatter = scatter + wires.all_gather(made_expert * software.reduce_bytes, experts)
    gather, scatter = gather / pricer.constants.gather_rate, scatter / pricer.constants.gather_rate
    # One for a layer's forward, one for its backward, and one for its gradients. Embedding and head count as a layer.
    meetings = 3 * pricer.constants.meeting_seconds * (layouts.replicas > 1)
    num_layers = pricer.model.num_layers / layouts.pp
    # All-to-alls of experts inside a domain leave the links between domains free.
    spread = wires.group(layouts.ep, layouts.tp if software.cuts_experts else 1)
    beside = 0.5 * stages.layer.ep * ((spread.domains <= 1) & (experts.domains > 1))
    forward = stages.layer.forward + stages.layer.tp_forward + beside
    backward = stages.layer.backward + stages.layer.tp_backward + beside
    # Overlapped communication takes multiprocessors and memory bandwidth from compute, in proportion to its bytes,
    # however slow the links between nodes are.
    loss = pricer.constants.registered_loss if software.registered_buffers else pricer.constants.overlap_loss
    taken = wires.inside_seconds(counts.layer * sent) / pricer.constants.gather_rate * (group.size > 1)
    more = 1.0 + software.reduce_bytes / sent * made / np.maximum(counts.layer, 1.0)
    both = gather + scatter
    exposed_forward = np.maximum(gather - forward, 0.0) + loss * np.minimum(np.minimum(gather, taken), forward)
    exposed_backward = np.maximum(both - backward, 0.0) + loss * np.minimum(np.minimum(both, more * taken), backward)
    ends = wires.all_gather(counts.ends * software.width, group)
    ends = ends + wires.all_gather(counts.trained.ends * software.reduce_bytes, group)
    once = gather + scatter + ends
    # Each group of replicas holds all states. A rank's shard of the gradients is reduced over the groups once a step.
    owned = counts.trained.dense.max(axis=1) / replicas.shard_size
    between = wires.all_reduce(owned * software.reduce_bytes, replicas.copies) / pricer.constants.gather_rate
    if software.overlap_gradients:
        between = between - np.minimum(between * pricer.constants.dp_hidden, pace.backward + pace.tp_backward)
    often = layouts.num_microbatches
    copied: Floats = np.zeros(len(layouts))
    if software.shards_parameters:
        # Gathered weights are copied out for both passes, and gradients are cast when they are copied in.
        num_bytes = counts.dense.max(axis=1) * 2 * 2 * sent
        num_bytes = num_bytes + counts.trained.dense.max(axis=1) * (software.width + software.reduce_bytes)
        copied = num_bytes / (pricer.pool.device.streaming_bytes_per_second * pricer.constants.streaming)
        often = np.where((layouts.pp > 1) | software.stays_gathered, 1, often)
    waited = (num_layers + 1) * meetings
    return often * (num_layers * (exposed_forward + exposed_backward) + once + copied + waited) + between
