"""What one operation costs, in FLOPs and bytes: enough to balance stages when nobody has measured anything."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_flop

aten = torch.ops.aten

#: FLOPs that pass in the time of one byte. Between a CPU core (about 5) and an H200 (792 TFLOP/s over 4.24 TB/s: 187);
#: it only has to give lookups and norms, which have next to no FLOPs, a small share.
FLOPS_OF_A_BYTE = 20.0


def flops_of(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> float:
    """The FLOPs of an operation that has been run, 0 for those that only move bytes."""
    packet = getattr(operation, "overloadpacket", None)
    name = getattr(packet, "__name__", "")
    if name.startswith("_scaled_dot_product") and not name.endswith("backward"):
        # Heads that share keys and values cost as if each had its own; not every torch counts them by itself.
        query, key, value = (tuple(each.shape) for each in args[:3])
        return float(sdpa_flop(query, (key[0], query[1], *key[2:]), (value[0], query[1], *value[2:])))
    if name == "_grouped_mm" and args[0].dim() == 2:
        return float(2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[-1])
    formula = flop_registry.get(packet)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=returned))


def bytes_of(returned: list[Any]) -> float:
    """The bytes of what an operation returned, written or not: views cost little, but they are few."""
    return float(sum(each.numel() * each.element_size() for each in returned if isinstance(each, Tensor)))
