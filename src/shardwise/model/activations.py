"""Bytes that a forward keeps for its backward, on one rank and of one microbatch."""

from collections.abc import Collection, Iterable

from shardwise.model.flops import chosen_parts, expert_rows, gemm
from shardwise.model.operations import Matmul, Operation, Saved
from shardwise.model.share import Count, Share, divided


def saved_bytes(operations: Iterable[Operation], share: Share, recompute: str | Collection[str] = "none") -> Count:
    """Bytes that these operations keep.

    `recompute` is `none`, `selective` (Korthikanti et al. 2022: the scores of attention are made again) or the names of
    parts, as in `Saved.dropped_by`. Full recomputation keeps a block's input only: `Block.input_bytes`.
    """
    parts = chosen_parts(recompute)
    if parts is None:
        return 0
    total: Count = 0
    for operation in operations:
        for saved in operation.saves:
            if _is_kept(saved, share) and parts.isdisjoint(saved.dropped_by):
                total = total + tensor_bytes(saved, share)
    return total


def tensor_bytes(saved: Saved, share: Share) -> Count:
    """Bytes of one kept tensor on one rank."""
    rows = share.num_rows(saved.rows) * saved.copies * (share.sequence if saved.per_key else 1)
    if saved.cut == "tp" and saved.units is not None:
        count = rows * divided(saved.units, share.tp) * (saved.elements // saved.units)
    else:
        count = share.part(rows * saved.elements, saved.cut)
    return count * (share.width if saved.width is None else saved.width)


def held_for_weights_bytes(operations: Iterable[Operation], share: Share) -> Count:
    """Bytes still held between a block's input gradient `I` and its weight gradient `W` (zero bubble schedules).

    The weight gradient of a matmul needs its input and the gradient of its output. Matmuls that read one input (query,
    key and value; gate and up) hold it once, because they are one operation here.
    """
    total: Count = 0
    for operation in operations:
        if isinstance(operation, Matmul) and operation.trains:
            shape = gemm(operation, share)
            inputs = shape.k
            if operation.sharding == "column" and not operation.num_experts:
                inputs = divided(operation.k, share.outside)
            total = total + expert_rows(operation, share) * (inputs + shape.n) * share.width
    return total


def _is_kept(saved: Saved, share: Share) -> bool:
    """Whether the software of this share keeps the tensor."""
    kept = {
        "always": True,
        "flash": share.flash,
        "scores": not share.flash,
        "fused": share.fused,
        "unfused": not share.fused,
        "unfused scores": not share.fused and not share.flash,
    }
    return kept[saved.when]
