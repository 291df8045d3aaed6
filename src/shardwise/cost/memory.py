"""Peak bytes on a rank, by part and by the place of its stage, for many layouts at once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import erf, log
from typing import NamedTuple

import numpy as np

from shardwise.cluster.device import Device
from shardwise.cost.constants import CONSTANTS, Constants
from shardwise.cost.layouts import Layouts
from shardwise.cost.numbers import Floats
from shardwise.cost.pipeline import SPLITS_BACKWARD
from shardwise.cost.places import PLACES, Counts, Places, count_blocks, ends_of, layer_kinds
from shardwise.cost.software import Software
from shardwise.cost.stage import DECIDE_WORK, share_of, share_of_ends
from shardwise.model.activations import made_bytes, narrow_bytes, saved_bytes
from shardwise.model.model import Block, Model
from shardwise.model.operations import Attention, CrossEntropy, Norm
from shardwise.model.share import Share

_SELECTIVE = ("core_attention",)
# Peak bytes of one logit: in 16 bits (2), in fp32 (4), and its gradient in both. A fused kernel overwrites the logit
# with the gradient (facts 4.1: 6 for the first two, 8 to 12 in total).
_LOGIT = 14.0
_FUSED_LOGIT = 2.0
# Of these, the bytes that the loss saves for its backward: the log-softmax, in fp32. A fused loss saves the logits.
_SAVED_LOGIT = 4.0
# Temporary bytes of one attention score.
_TORCH_SCORE = 8.0
_FUSED_SCORE = 2.0


#: Optimizer state on the host is updated in this many staging buffers on the device, each of about this size. Forwards
#: wait if more than this many bytes of saved tensors are still on their way to the host.
NUM_STAGING_BUFFERS, STAGING_BYTES = 4, 256 * 2**20
DEFERRED_FREE_BYTES = 256 * 2**20

#: Uncertainty of a rank's bytes: the standard deviation of the logarithm of predicted over published peaks, whose mean
#: `validate` prints (published/runs.csv: [bloom, zb, bskill, bcard]). A plan is chosen if it fits with this many
#: deviations to spare: a probability of four in five.
SPREAD, SPARE = 0.06, 0.84

# Parts that both passes hold, and that are free when the optimizer steps.
_FREED = ("activations", "recomputed", "loss", "scores", "gathered")

#: Parts that a program's own count of allocated tensors does not include.
NOT_ALLOCATED = ("context", "buffers", "workspace", "fragments")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """Bytes of each part on each place (first, middle, last stage; or every rank): arrays of candidates x places.

    `on_host` are the bytes of each part that are on the host instead, for each place. `widened` are the bytes of
    gradients that the optimizer's step copies to fp32. The gradients' part includes what these need beyond the memory
    that both passes have freed.
    """

    parts: Mapping[str, Floats]
    on_host: Mapping[str, Floats]
    widened: Floats | None = None

    @property
    def by_place(self) -> Floats:
        return sum(self.parts.values(), np.zeros(()))

    @property
    def beyond_passes(self) -> Floats:
        """Bytes that the optimizer's step needs beyond the peak of both passes."""
        return np.zeros(()) if self.widened is None else np.maximum(self.widened - freed_bytes(self.parts), 0.0)

    def movable(self, optimizer: float, parameters: float, activations: float) -> Floats:
        """Return the bytes on each place that leave the device if nothing of these shares is staged there."""
        parts = self.parts
        weights = parts["weights"] + parts["masters"] + parts["gradients"] - self.beyond_passes
        states = max(optimizer, parameters) * parts["optimizer"] + parameters * weights
        if self.widened is None:
            return np.asarray(states + activations * parts["activations"])
        freed = freed_bytes(parts)
        left = np.maximum(freed - activations * parts["activations"], (1.0 - parameters) * self.widened)
        return np.asarray(states + np.maximum(freed, self.widened) - left)

    @property
    def fragments_of_states(self) -> Floats:
        """Bytes on each place that weights and gradients lose to fragmentation: as much as leaves with them at most."""
        parts = self.parts
        lost = CONSTANTS.fragments_states * (parts["weights"] + parts["gradients"])
        return np.asarray(np.minimum(lost, parts.get("fragments", 0.0)))

    @property
    def peak(self) -> Floats:
        """Device bytes of the fullest rank."""
        return np.asarray(self.by_place.max(axis=1))

    @property
    def host(self) -> Floats:
        """Host bytes of the rank that has most there."""
        return np.asarray(sum(self.on_host.values(), np.zeros(())).max(axis=1))

    @property
    def allocated(self) -> Floats:
        """Bytes of tensors on the fullest rank: without context, buffers, workspaces and fragmentation."""
        parts = [part for name, part in self.parts.items() if name not in NOT_ALLOCATED]
        return np.asarray(sum(parts, np.zeros(())).max(axis=1))

    @property
    def reserved(self) -> Floats:
        """The same, including fragmentation of the allocator."""
        parts = [part for name, part in self.parts.items() if name not in NOT_ALLOCATED or name == "fragments"]
        return np.asarray(sum(parts, np.zeros(())).max(axis=1))

    @property
    def fullest(self) -> list[str]:
        """The place of each candidate's fullest rank, for typical places."""
        return [PLACES[index] for index in self.by_place.argmax(axis=1)]


def fitting_odds(held: float, capacity: float) -> float:
    """Return the probability that a rank with `held` predicted bytes fits."""
    return 0.5 * (1.0 + erf(log(capacity / max(held, 1.0)) / (SPREAD * 2**0.5)))


def freed_bytes(parts: Mapping[str, Floats]) -> Floats:
    """Return the bytes of both passes that are free again when the optimizer steps."""
    return sum((parts[name] for name in _FREED if name in parts), np.zeros(()))


class Kept(NamedTuple):
    """The parts of a rank's memory that ZeRO does not change: its number of parameters, and bytes of activations."""

    counts: Counts
    activations: dict[str, Floats]


def keep(model: Model, layouts: Layouts, places: Places, *, sequence: int, software: Software) -> Kept:
    """Return what does not depend on how these layouts shard or offload states."""
    parts = _activations(model, layouts, places, sequence, software)
    leaves = layouts.offload_activations > 0
    if leaves.any():
        # Offloaded tensors are those that autograd saves for each operation: no compiler recomputes some instead.
        plain = _activations(model, layouts, places, sequence, replace(software, fused=False, fused_norms=False))
        parts |= {name: np.where(leaves[:, None], plain[name], parts[name]) for name in plain}
    return Kept(count_blocks(model, layouts, places, cuts_experts=software.cuts_experts), parts)


def step_bytes(
    model: Model,
    device: Device,
    layouts: Layouts,
    places: Places,
    *,
    sequence: int,
    software: Software | None = None,
    constants: Constants = CONSTANTS,
    kept: Kept | None = None,
) -> StepBytes:
    """Return the memory of each layout on its places. `kept` is the result of `keep`, if it is already known."""
    software = software or Software()
    kept = kept or keep(model, layouts, places, sequence=sequence, software=software)
    counts = kept.counts
    parts = _states(layouts, counts, software) | kept.activations
    every = np.ones_like(places.begins)
    on_host = _on_host(parts, layouts, counts, software)
    saved_loss = 1.0 if software.fused_loss else _SAVED_LOGIT / _LOGIT
    # Casts of weights are saved like activations.
    on_host["casts"] = parts["weights"] * (software.saves_casts * layouts.offload_activations)[:, None]
    on_host["loss"] = parts["loss"] * saved_loss * layouts.offload_activations[:, None]
    if np.any(layouts.zero == 3):
        # Two gathered layers (one prefetched), the gradients of one layer before and in reduction, embedding and head.
        made = counts.trained.layer * (software.width + software.reduce_bytes)
        gathered = counts.layer * 2 * software.held_width + made + counts.ends * software.held_width
        parts["gathered"] = np.where(layouts.zero == 3, gathered, 0.0)[:, None] * every
    if device.architecture != "cpu":
        axes = (layouts.tp, layouts.replicas, layouts.pp, layouts.ep)
        groups = 1.0 + sum((axis > 1).astype(np.float64) for axis in axes)
        buffers = np.where(layouts.num_ranks > 1, groups * constants.group_bytes, 0.0)
        moving = parts["activations"] + parts["recomputed"] + parts["loss"] + parts["scores"]
        # Frozen weights stay where they were loaded, and cause no fragmentation.
        still = counts.frozen * software.width
        states = np.maximum(parts["weights"] - still, 0.0) + parts["gradients"]
        parts["buffers"] = buffers[:, None] * every
        parts["workspace"] = constants.workspace_bytes * every
        parts["context"] = constants.context_bytes * every
        lost = constants.fragments * moving + constants.fragments_states * states
        parts["fragments"] = np.where((layouts.zero == 3)[:, None] & software.shards_parameters, 0.0, lost)
    held = StepBytes(parts=parts, on_host=on_host)
    if not software.widens_gradients:
        return held
    widened = 4.0 * counts.trained.spread(layouts, 1) * (1.0 - layouts.offload_parameters)[:, None]
    held = replace(held, widened=widened)
    return replace(held, parts={**parts, "gradients": parts["gradients"] + held.beyond_passes})


def _on_host(parts: dict[str, Floats], layouts: Layouts, counts: Counts, software: Software) -> dict[str, Floats]:
    """Return the bytes on the host. Subtract them from the device's `parts`, except for the buffers that stay there.

    If only the optimizer's state is offloaded, weights stay on the device, and their casts if the precision is lower.
    If weights are offloaded, their gradients and state are too. Weights that are whole on every rank (zero 1 and 2) are
    whole on the host. With 16-bit weights (`shards_both`), the host has these and the master weights that a rank
    updates. With fp32 weights it has these alone: casts stay on the device for the backward, also of weights that were
    gathered (zero 3), except for frozen weights, which are on the host in the precision of compute.
    """
    is_sharded, sharing = (layouts.zero == 3)[:, None], np.where(layouts.zero == 3, layouts.num_sharing, 1)
    # Of offloaded weights, the device holds two layers (one prefetched), and embedding and head, which may be one
    # tensor; or the shards of these, before they are gathered.
    coming = ((2 * counts.layer + counts.ends) / sharing)[:, None]
    weights = layouts.offload_parameters
    staged = NUM_STAGING_BUFFERS * STAGING_BYTES
    moves: list[tuple[str, Floats, Floats, Floats | float]] = [
        ("optimizer", np.maximum(layouts.offload_optimizer, weights), parts["optimizer"], staged),
        ("gradients", weights, parts["gradients"], DEFERRED_FREE_BYTES),
        ("activations", layouts.offload_activations, parts["activations"], DEFERRED_FREE_BYTES),
    ]
    if software.shards_both and software.precision != "fp32":
        moves.append(("weights", weights, parts["weights"], software.width * coming))
        # After a step, master weights come layer by layer to be cast.
        layers = (2 * counts.trained.layer / sharing)[:, None]
        moves.append(("masters", weights, parts["masters"], 4.0 * layers))
    elif parts["masters"].any():
        whole = np.where(is_sharded, parts["masters"], 4.0 * (counts.trained.dense + counts.trained.expert))
        moves.append(("masters", weights, whole, 4.0 * coming))
    else:
        whole = np.where(is_sharded, parts["weights"], 4.0 * (counts.dense + counts.expert))
        moves.append(("weights", weights, whole, 4.0 * coming))
    on_host = {}
    for name, share, at_home, on_device in moves:
        on_host[name] = at_home * share[:, None]
        parts[name] = parts[name] * (1.0 - share[:, None]) + np.minimum(on_host[name], on_device)
    if "weights" not in on_host and counts.some is not None:
        leaves = software.width * _frozen_here(layouts, counts) * weights[:, None]
        on_host["weights"] = leaves
        parts["weights"] = parts["weights"] - leaves + np.minimum(leaves, software.width * coming)
    return on_host


def _states(layouts: Layouts, counts: Counts, software: Software) -> dict[str, Floats]:
    """Return the bytes of weights, gradients, optimizer states and master weights, as ZeRO shards them."""
    masters = 4.0 if software.precision != "fp32" else 0.0
    weights = counts.spread(layouts, 3)
    stays = software.shards_parameters & ((layouts.pp > 1) | software.stays_gathered)
    if masters:
        # Under ZeRO-3 the shards are the master weights: fp32, cast when gathered (FSDP, facts 4.2). If casts are
        # saved, or fp32 weights offloaded, the casts of a whole stage exist between its forward and its backward.
        leaves = (layouts.offload_parameters > 0) & (not software.shards_both)
        casts = (layouts.zero < 3) | leaves | software.saves_casts
        shards = counts.trained.spread(layouts, 3) * software.shards_both
        weights = np.where((casts | stays)[:, None], counts.trained.dense + counts.trained.expert, shards)
        # Frozen weights are held in the precision of compute, and have no master weights and no casts.
        gathered = np.where((stays & (layouts.zero == 3))[:, None], counts.frozen, 0.0)
        weights = weights + _frozen_here(layouts, counts) + gathered
    gradients = counts.trained.spread(layouts, 2) * software.gradient_bytes
    if software.shards_parameters:
        # A stage that stays gathered accumulates whole gradients in the precision of the reduction (FSDP2's source:
        # they are cast with the first microbatch).
        # Experts without replicas are not sharded, and their gradients exist once.
        shared = counts.expert_replicas > 1
        whole = (counts.trained.dense + counts.trained.expert * shared[:, None]) * software.reduce_bytes
        gradients = gradients + np.where((stays & (layouts.zero == 3))[:, None], whole, 0.0)
    return {
        "weights": weights * software.width,
        "gradients": gradients,
        "optimizer": counts.trained.spread(layouts, 1) * (software.state_bytes - 4.0),
        # Weights in fp32 are their own master weights, which only ZeRO-3 shards.
        "masters": counts.trained.spread(layouts, 3 if software.saves_casts else 1) * masters,
    }


def _frozen_here(layouts: Layouts, counts: Counts) -> Floats:
    """Return the number of frozen parameters on a rank: all, or their shards under ZeRO-3."""
    return counts.spread(layouts, 3) - counts.trained.spread(layouts, 3)


def _activations(
    model: Model, layouts: Layouts, places: Places, sequence: int, software: Software
) -> dict[str, Floats]:
    some, kinds = layouts.distinct(DECIDE_WORK)
    share = share_of(some, sequence, software)
    zero = np.zeros(len(some))
    every = np.ones_like(places.begins)
    layers = layer_kinds(model)
    activations, biggest, at_once = np.zeros_like(places.begins), zero, np.zeros_like(places.begins)
    for index, (block, _) in enumerate(layers):
        none = zero + saved(block, share, software)
        chosen = np.where(
            some.recompute == 2,
            zero + block.input_bytes(share),
            np.where(some.recompute == 1, zero + _selected(block, share, software), none),
        )
        kept = none + (chosen - none) * some.recompute_share
        activations = activations + places.kept_layers[:, :, index] * kept[kinds, None]
        biggest = np.maximum(biggest, none)
        at_once = at_once + places.layers[:, :, index] / layouts.chunks[:, None] * none[kinds, None]
    before, after, outside = *ends_of(model), share_of_ends(share)
    begin = sum((zero + saved(block, outside, software) for block in before), zero)
    end = sum((zero + saved(block, outside, software) for block in after), zero)
    loss = sum((zero + _loss_bytes(block, share, software) for block in after), zero)
    activations = activations + places.kept_begins * begin[kinds, None] + places.kept_ends * end[kinds, None]
    if software.interpreted_pipe:
        # A stage keeps what it sent, in addition to what it received, until the gradient returns.
        sent = zero + layers[0][0].output_bytes(share)
        activations = activations + places.in_flight * sent[kinds, None] * (layouts.pp > 1)[:, None]
    scores = zero + sum((_score_bytes(block, share, software) for block, _ in layers[:1]), zero)
    return {
        "scores": scores[kinds, None] * every,
        "activations": activations,
        "recomputed": _at_work(layouts, software, biggest[kinds, None] * every, at_once),
        "loss": np.minimum(places.ends, 1.0) * loss[kinds, None],
    }


def _at_work(layouts: Layouts, software: Software, layer: Floats, stage: Floats) -> Floats:
    """Return the bytes of a layer being recomputed or offloaded, or of a whole stage if it is recomputed at once."""
    recomputes = layouts.recompute >= (1 if software.by_operation else 2)
    splits = np.isin(layouts.schedule, SPLITS_BACKWARD) & (layouts.pp > 1) & software.recomputes_stages
    one = recomputes | (layouts.offload_activations > 0)
    return np.where((recomputes & splits)[:, None], np.maximum(stage, layer), np.where(one[:, None], layer, 0.0))


def _selected(block: Block, share: Share, software: Software) -> Floats:
    """Return the bytes that a block saves under selective recomputation."""
    if not software.by_operation:
        return saved(block, share, software, _SELECTIVE)
    made = np.asarray(made_bytes(block.operations, share), dtype=np.float64)
    if software.every_second:
        attention = made_bytes([each for each in block.operations if isinstance(each, Attention)], share)
        made = attention + (made - attention) / 2
    kept = np.asarray(block.input_bytes(share) + made, dtype=np.float64)
    return np.minimum(kept, saved(block, share, software))


def saved(block: Block, share: Share, software: Software, recompute: tuple[str, ...] | str = "none") -> Floats:
    """Return the bytes that a block saves for one microbatch, with norms and the rest fused as the software does."""
    norms = [each for each in block.operations if isinstance(each, Norm)]
    others = [each for each in block.operations if not isinstance(each, (Norm, CrossEntropy))]
    is_narrow = software.fp8_layers and software.matmul_precision == "fp8" and bool(block.stack)
    less = narrow_bytes(block.operations, share) if is_narrow and recompute == "none" else 0
    return np.asarray(
        saved_bytes(norms, replace(share, fused=software.fused_norms), recompute)
        + saved_bytes(others, share, recompute)
        - less,
        dtype=np.float64,
    )


def _score_bytes(block: Block, share: Share, software: Software) -> Floats:
    """Return the bytes of temporary scores in attention: torch has several, also in fp32; a fused softmax has one."""
    total = np.zeros(())
    for operation in block.operations:
        if isinstance(operation, Attention) and not software.is_flash:
            rows = np.asarray(share.num_rows(operation.rows), dtype=np.float64)
            pairs = rows * share.sequence * -(-operation.heads // share.tp)
            total = np.maximum(total, pairs * (_TORCH_SCORE if software.attention == "torch" else _FUSED_SCORE))
    return total


def _loss_bytes(block: Block, share: Share, software: Software) -> Floats:
    """Return the bytes of logits during the loss: in 16 bits, in fp32, and their gradient (facts 4.1: 8 to 12 each)."""
    total = np.zeros(())
    for operation in block.operations:
        if isinstance(operation, CrossEntropy):
            rows = np.asarray(share.num_rows(operation.rows), dtype=np.float64)
            cut = share.tp if operation.cut == "tp" and software.parallel_loss else 1
            total = total + rows * operation.vocabulary / cut * (_FUSED_LOGIT if software.fused_loss else _LOGIT)
    return total
