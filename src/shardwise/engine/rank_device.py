"""The device of a rank, and moving a whole module there.

If a module or its batches are on an accelerator, that is the rank's device. If both are on the CPU, it is the CPU,
unless processes communicate over NCCL: then each has its own GPU, and computes there.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.engine.device_check import check_devices, check_example
from shardwise.ranks.gpus import check_precision, check_room, gpu_of
from shardwise.stages.rows import Marked, changed, tensors_in
from shardwise.torch_private import buffer_slots

_CPU = torch.device("cpu")


def put_together(module: nn.Module, example: Any, precision: str = "fp32") -> Any:
    """Move the whole module to this rank's device, and return the example there."""
    device = device_of_rank(module, example)
    if device.type == "cuda":
        moved = [each for each in (*module.parameters(), *module.buffers()) if _is_elsewhere(each, device)]
        free, _ = torch.cuda.mem_get_info(device)
        check_room(sum(each.nbytes for each in moved), free, gpu_of(device), type(module).__name__)
    gpus = [gpu_of(device)] if device.type == "cuda" else []
    check_precision(gpus, precision, "precision=fp16, or precision=fp32")
    put_on(module, device)
    example = batch_on(example, device)
    check_example(module, example)
    return example


def device_of_rank(module: nn.Module, example: Any) -> torch.device:
    """Return the device of this process. Refuse a module on several accelerators: a plan has one per rank."""
    sizes: Counter[torch.device] = Counter()
    for each in module.parameters():
        sizes[each.device] += each.numel()
    places = [each for each, _ in sizes.most_common() if each.type not in ("cpu", "meta")]
    if len(places) > 1:
        check_devices(module)
    places += [each.device for each in tensors_in(example) if each.device.type not in ("cpu", "meta")]
    if places:
        return places[0]
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in str(dist.get_backend_config()):
        return torch.device("cuda", torch.cuda.current_device())
    return _CPU


@torch.no_grad()
def put_on(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers that have values to a device. The parameters stay the same objects."""
    for each in module.parameters():
        if _is_elsewhere(each, device):
            each.data = each.data.to(device)
            each.grad = None
    for owner in module.modules():
        held = buffer_slots(owner)
        held.update({key: each.to(device) for key, each in held.items() if _is_elsewhere(each, device)})


def batch_on(batch: Any, device: torch.device) -> Any:
    """Return a batch with all of its tensors, at any depth, on a device."""
    if not isinstance(batch, Mapping):
        return batch

    def move(_: str, each: Any) -> Any:
        if isinstance(each, Marked):
            inner = batch_on({"": each.value}, device)[""]
            return each if inner is each.value else Marked(inner, is_rows=each.is_rows)
        return each.to(device, non_blocking=True) if _is_elsewhere(each, device) else None

    return changed(batch, move)


def _is_elsewhere(each: Any, device: torch.device) -> bool:
    return isinstance(each, Tensor) and not each.is_meta and each.device != device
