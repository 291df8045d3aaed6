"""Bytes that a forward saves for its backward, for one microbatch on one rank."""

from collections.abc import Collection, Iterable
from itertools import pairwise

from shardwise.model.flops import chosen_parts, expert_rows, gemm
from shardwise.model.operations import Attention, Matmul, Operation, Product, Saved
from shardwise.model.share import Count, Share, divided, total


def saved_bytes(operations: Iterable[Operation], share: Share, recompute: str | Collection[str] = "none") -> Count:
    """Return the bytes that these operations save.

    `recompute` is `none`, `selective` (Korthikanti et al. 2022: attention scores are recomputed) or the names of
    parts, as in `Saved.dropped_by`. Full recomputation saves only a block's input: `Block.input_bytes`.
    """
    parts = chosen_parts(recompute)
    if parts is None:
        return 0
    every = (saved for operation in operations for saved in operation.saves)
    kept = (saved for saved in every if _is_kept(saved, share) and parts.isdisjoint(saved.dropped_by))
    return total(tensor_bytes(saved, share) for saved in kept)


def made_bytes(operations: Iterable[Operation], share: Share) -> Count:
    """Return the bytes of all outputs of matmuls and attention: recomputation of everything else keeps just these."""
    return total(_made_bytes(each, share) for each in operations)


def _made_bytes(operation: Operation, share: Share) -> Count:
    if isinstance(operation, Matmul):
        return expert_rows(operation, share) * gemm(operation, share).n * share.width
    if isinstance(operation, Product):
        return share.microbatch * operation.batch * operation.m * operation.n * share.width
    if isinstance(operation, Attention):
        pairs = share.num_rows(operation.rows) * divided(operation.heads, share.tp)
        # With flash attention, the log-sum-exp of each softmax, in fp32. Without it, the scores: a matmul's output.
        beside = 4 if share.flash else share.sequence * share.width
        return pairs * (operation.v_dim * share.width + beside)
    return 0


def narrow_bytes(operations: Iterable[Operation], share: Share) -> Count:
    """Return the bytes that are saved less if matmuls of layers save their inputs in 8 bits; negative if more.

    A tensor saved only for a matmul, such as the output of a norm, shrinks. The output of attention is also saved for
    attention's own backward, so its 8-bit copy comes on top.
    """
    return total(_narrow_bytes(before, each, share) for before, each in pairwise(operations))


def _narrow_bytes(before: Operation, operation: Operation, share: Share) -> Count:
    if not isinstance(operation, Matmul) or not is_narrow(operation) or not operation.trains:
        return 0
    read = [each for each in before.saves if each.elements == operation.k and each.width is None]
    kept = next((each for each in reversed(read) if _is_kept(each, share)), None)
    if kept is None:
        return 0
    narrow = tensor_bytes(kept, share) // share.width
    return -narrow if isinstance(before, Attention) else (share.width - 1) * narrow


def is_narrow(operation: Matmul) -> bool:
    """Return whether this matmul runs in 8 bits if the plan chooses that. Those of experts and routers do not."""
    return operation.sharding != "none" and not operation.num_experts


def tensor_bytes(saved: Saved, share: Share) -> Count:
    """Return the bytes of one saved tensor on one rank."""
    rows = share.num_rows(saved.rows) * saved.copies * (share.sequence if saved.per_key else 1)
    if saved.cut == "tp" and saved.units is not None:
        count = rows * divided(saved.units, share.tp) * (saved.elements // saved.units)
    else:
        count = share.part(rows * saved.elements, saved.cut)
    return count * (share.width if saved.width is None else saved.width)


def held_for_weights_bytes(operations: Iterable[Operation], share: Share) -> Count:
    """Return the bytes held between a block's input gradient `I` and its weight gradient `W` (zero bubble schedules).

    The weight gradient of a matmul needs its input and the gradient of its output. Matmuls that share an input (query,
    key and value; gate and up) are one operation here, so their input is counted once.
    """
    return total(_held_bytes(each, share) for each in operations if isinstance(each, Matmul) and each.trains)


def _held_bytes(operation: Matmul, share: Share) -> Count:
    shape = gemm(operation, share)
    gathers = operation.sharding == "column" and not operation.num_experts
    inputs = divided(operation.k, share.outside) if gathers else shape.k
    return expert_rows(operation, share) * (inputs + shape.n) * share.width


def _is_kept(saved: Saved, share: Share) -> bool:
    """Return whether the software that this share describes (flash, fused) saves the tensor."""
    kept = {
        "always": True,
        "flash": share.flash,
        "scores": not share.flash,
        "fused": share.fused,
        "unfused": not share.fused,
        "unfused scores": not share.fused and not share.flash,
    }
    return kept[saved.when]
