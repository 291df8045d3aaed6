"""What data parallelism adds to a step: gradients added up, shards gathered, as far as compute does not hide them."""

import numpy as np

from shardwise.cost.layouts import Layouts
from shardwise.cost.numbers import Floats
from shardwise.cost.stage import Pricer, Stages, Work
from shardwise.cost.states import Counts


def exchange(pricer: Pricer, layouts: Layouts, counts: Counts, stages: Stages, pace: Work) -> Floats:
    """Seconds of a step that replicas spend on each other and that nothing hides."""
    return np.where(
        layouts.zero >= 3, _sharded(pricer, layouts, counts, stages), _replicated(pricer, layouts, counts, pace)
    )


def _replicated(pricer: Pricer, layouts: Layouts, counts: Counts, pace: Work) -> Floats:
    """ZeRO 0 to 2: once a step, gradients are reduced, and what each rank has updated is gathered."""
    wires, software = pricer.wires, pricer.software
    dense, expert = counts.dense.max(axis=1), counts.expert.max(axis=1)
    replicas = layouts.dp * layouts.cp
    group = wires.group(replicas, layouts.tp)
    experts = wires.group(np.maximum(replicas * layouts.tp // layouts.ep, 1), layouts.ep)
    scatter = wires.all_gather(dense * software.reduce_bytes, group)
    scatter = scatter + wires.all_gather(expert * software.reduce_bytes, experts)
    gather = wires.all_gather(dense * 2, group) + wires.all_gather(expert * 2, experts)
    reduce = wires.all_reduce(dense * software.reduce_bytes, group)
    reduce = reduce + wires.all_reduce(expert * software.reduce_bytes, experts)
    gradients = np.where(layouts.zero >= 1, scatter, reduce)
    parameters = np.where(layouts.zero >= 1, gather, 0.0)
    # Beside the backward (forward) of one microbatch there is that much room.
    backward, forward = pace.backward + pace.tp_backward, pace.forward + pace.tp_forward
    hidden = pricer.constants.dp_hidden
    gradients, parameters = gradients / pricer.constants.exchange_rate, parameters / pricer.constants.exchange_rate
    if software.overlap_gradients:
        gradients = gradients - np.minimum(gradients * hidden, backward)
    if software.overlap_parameters:
        parameters = parameters - np.minimum(parameters * hidden, forward)
    return gradients + parameters


def _sharded(pricer: Pricer, layouts: Layouts, counts: Counts, stages: Stages) -> Floats:
    """ZeRO-3: with every microbatch, each layer is gathered for both passes and its gradients are scattered."""
    wires, software = pricer.wires, pricer.software
    replicas = layouts.dp * layouts.cp
    group = wires.group(np.where(layouts.zero_group > 0, layouts.zero_group, replicas), layouts.tp)
    layer = counts.layer
    gather = wires.all_gather(layer * 2, group)
    scatter = wires.all_gather(layer * software.reduce_bytes, group)
    gather, scatter = gather / pricer.constants.exchange_rate, scatter / pricer.constants.exchange_rate
    num_layers = pricer.model.num_layers / layouts.pp
    forward, backward = stages.layer.forward + stages.layer.tp_forward, stages.layer.backward + stages.layer.tp_backward
    loss = pricer.constants.overlap_loss
    exposed_forward = np.maximum(gather - forward, 0.0) + loss * np.minimum(gather, forward)
    both = gather + scatter
    exposed_backward = np.maximum(both - backward, 0.0) + loss * np.minimum(both, backward)
    ends = wires.all_gather(counts.ends * 2, group) + wires.all_gather(counts.ends * software.reduce_bytes, group)
    once = gather + scatter + ends
    return layouts.num_microbatches * (num_layers * (exposed_forward + exposed_backward) + once)
