"""A copy of a module for trials: random weights, few tokens, and shared weights for all blocks of one kind.

The effect of a cut on a module does not depend on its weights, so any will do. Random ones are better than the user's:
a zero matrix, a common initialisation, hides every mistake. All blocks that are alike share one set of weights, so a
model of any depth needs the memory of one block of each kind, its embeddings and its head. Of a list of blocks the
first of each kind and the last are run; those between return their first tensor argument.
"""

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from copy import copy
from dataclasses import is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.sharding.block_watch import left_out
from shardwise.stages.split.materialise import materialise
from shardwise.stages.split.module_copy import copied
from shardwise.stages.split.units import is_block_list
from shardwise.stages.stage import Batch
from shardwise.torch_private import hooks_of, pytree, version_of

#: A trial uses at most this many tokens and rows.
_TOKENS, _ROWS = 12, 2
#: All tokens are tried with at most about this many products of a parameter and a token. A forward and backward of so
#: many in float64 takes a core 0.6 s (measured on Arm); the number for GPUs is an estimate.
_PRODUCTS = {"cpu": 2**30, "cuda": 2**35}
#: How many random numbers are drawn; larger tensors repeat them. Drawing all 10^9 of a vocabulary takes a CPU 10 s.
_DRAWN = 2**20 + 7
#: Attributes in which a block stores its index in a list.
_PLACE = re.compile(r"(idx|index|layer_id|layer_number|number)$")
#: With more parameters than this, a CPU computes in float32: half the memory traffic.
_MANY = 2**25
#: The row length of the checksum that shows whether weights have changed; each column has its own factor.
_WIDE = 4099


def stand_in(
    module: nn.Module, sort: Callable[[str], Hashable], passing: Mapping[str, Hashable], *, dtype: torch.dtype,
    device: torch.device, seed: int, gain: float = 1.0,
) -> nn.Module:  # fmt: skip
    """Return the copy. Parameters of one sort in blocks that are alike become one; matrices are multiplied by `gain`.

    `passing` are blocks whose output has the shape of their first tensor argument, with a hash of their operations. A
    block with the operations of an earlier one may be skipped.
    """
    representative = _representatives(module, sort)
    memo: dict[int, Any] = {}
    for path in left_out(module, representative, passing):
        block = module.get_submodule(path)
        memo[id(block)] = _emptied(block)
    made: dict[str, nn.Parameter] = {}
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in module.named_parameters():
        first = _first_name(name, representative)
        if first not in made:
            owner = module.get_submodule(name.rpartition(".")[0])
            numbers = _drawn(name, parameter, owner, generator, dtype)
            if gain != 1.0 and parameter.dim() > 1 and parameter.is_floating_point():
                numbers.mul_(gain)
            made[first] = nn.Parameter(numbers, requires_grad=parameter.requires_grad)
            vars(made[first]).update(vars(parameter))
        memo[id(parameter)] = made[first]
    for buffer in module.buffers():
        memo[id(buffer)] = _converted(buffer.detach(), dtype, device).clone()
    twin = copied(module, memo)
    lost = [name for name, each in twin.named_buffers() if each.is_meta]
    if lost:  # Buffers of a module on the meta device are materialised as its weights would be.
        materialise(twin, lost, seed=seed, device=device)
        for each in twin.modules():
            for key, buffer in list(each.named_buffers(recurse=False)):
                setattr(each, key, _converted(buffer, dtype, device))
    return twin


def _emptied(block: nn.Module) -> nn.Module:
    """Return a shallow copy of a block without layers. Its forward returns its first tensor argument."""
    made = copy(block)
    made.__dict__ = {**vars(block), "_modules": {}, "_parameters": {}, "_buffers": {}, "forward": _first_tensor}
    return made


def _first_tensor(*args: Any, **kwargs: Any) -> Tensor:
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))


def fitting(
    module: nn.Module, sort: Callable[[str], Hashable], device: torch.device
) -> tuple[torch.device, tuple[torch.dtype, ...]]:
    """Return the device for a trial, the CPU if the given one has too little free memory, and dtypes, best first."""
    representative = _representatives(module, sort)
    numbers = {_first_name(name, representative): each.numel() for name, each in module.named_parameters()}
    count = sum(numbers.values())
    # Four times: the whole module and its shards, each with gradients.
    if device.type == "cuda" and 4 * count * torch.float64.itemsize > 0.5 * torch.cuda.mem_get_info(device)[0]:
        device = torch.device("cpu")
    many = device.type == "cpu" and count > _MANY
    return device, (torch.float32,) if many else (torch.float64, torch.float32)


def another(twin: nn.Module, *, writes: bool = False) -> nn.Module:
    """Return a copy. Its parameters share memory with the twin's unless the forward `writes` to them; all else is new.

    The parameters are new tensor objects: a forward may freeze them for a while (`requires_grad_(False)`), and copies
    are run side by side.
    """
    return copied(twin, {id(each): _of_its_own(each, writes=writes) for each in twin.parameters()})


def versions_of(twin: nn.Module) -> list[tuple[float, ...]]:
    """Return a fingerprint of each parameter: its version counter, which also counts writes to copies that share its
    memory, and a checksum weighted by position. Writes through `data` change only the checksum."""
    return [(version_of(each), *_told_of(each.detach())) for each in twin.parameters()]


def _told_of(numbers: Tensor) -> list[float]:
    flat = numbers.reshape(-1)
    if not flat.is_floating_point() or flat.is_meta or not flat.numel():
        return []
    # Rows of one length are summed first: each element is read once, and only the columns need factors.
    wide = min(flat.numel(), _WIDE)
    rows = flat[: flat.numel() // wide * wide].view(-1, wide).sum(0)
    return [float(rows @ torch.linspace(1, 2, wide, dtype=rows.dtype, device=rows.device)), float(flat[-1])]


def _of_its_own(parameter: nn.Parameter, *, writes: bool) -> nn.Parameter:
    numbers = parameter.detach().clone() if writes else parameter.detach()
    made = nn.Parameter(numbers, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def _representatives(module: nn.Module, sort: Callable[[str], Hashable]) -> dict[str, str]:
    """Map each block of a list to the first block of the list that is like it."""
    found: dict[str, str] = {}
    for name, each in module.named_modules():
        if not is_block_list(each):
            continue
        kinds: dict[Hashable, str] = {}
        for key, block in each.named_children():
            path = f"{name}.{key}" if name else key
            kind = tuple((inner, tuple(p.shape), sort(f"{path}.{inner}")) for inner, p in block.named_parameters())
            # Keys that are numbers may differ; any other key must be equal. Sharding rules treat blocks likewise.
            found[path] = kinds.setdefault((key.isdecimal() or key, _habits(block), kind), path)
    return found


def _habits(block: nn.Module) -> Hashable:
    """Return what distinguishes a block's behaviour, except weights and index: types, hooks, forwards, settings."""
    return tuple(
        (name, type(each), *hooks_of(each), "forward" in vars(each), *_settings(each))
        for name, each in block.named_modules()
    )


def _settings(module: nn.Module) -> Iterator[Hashable]:
    for key, value in vars(module).items():
        if isinstance(value, (bool, int, float, str)) and not _PLACE.search(key):
            yield key, value


def _first_name(name: str, representative: Mapping[str, str]) -> str:
    """Return a parameter's name in the first block that is like its own. Lists of blocks may be nested."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        path = ".".join(parts[:count])
        if representative.get(path, path) != path:
            return _first_name(".".join([representative[path], *parts[count:]]), representative)
    return name


def _drawn(name: str, like: Tensor, owner: nn.Module, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Draw weights that roughly preserve the magnitude of activations."""
    device = generator.device
    if not like.is_floating_point():
        return like.detach().to(device).clone()
    dtype = torch.promote_types(dtype, like.dtype) if like.dtype == torch.float64 else dtype
    count = like.numel()
    numbers = torch.empty(min(count, _DRAWN), dtype=dtype, device=device).normal_(generator=generator)
    if count > _DRAWN:
        numbers = numbers.repeat(-(-count // _DRAWN))[:count]
    numbers = numbers.reshape(like.shape)
    if isinstance(owner, nn.Embedding):
        return numbers
    if like.dim() < 2 or not count:
        return numbers.mul_(0.2) if "bias" in name.rpartition(".")[2] else numbers.mul_(0.2).add_(1)
    return numbers.mul_(1.5 / (prod(like.shape) / like.shape[0]) ** 0.5)


def _converted(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Move a tensor to a device; convert floats, except float64, to the dtype of the trial."""
    if tensor.is_meta:
        return tensor
    is_float = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(device=device, dtype=dtype if is_float else tensor.dtype)


def converted(batch: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Convert a batch for the copy."""
    return pytree.tree_map(lambda each: _converted(each, dtype, device) if isinstance(each, Tensor) else each, batch)


def shortened(batch: Batch) -> Batch:
    """Return some rows of a batch and some tokens of each, as far as tensor shapes show which dims these are."""
    tensors = [each for each in batch.values() if isinstance(each, Tensor) and each.dim() >= 2]
    if not tensors:
        return batch
    if any(each.is_nested for each in tensors):
        raise ShardwiseError(
            "the batch has a nested tensor, of which no rows can be taken to try what is cut",
            remedy="to_padded_tensor(0), and the lengths beside it",
        )
    first = tensors[0]
    rows, tokens = first.shape[0], first.shape[1]
    has_tokens = not first.is_floating_point() or first.dim() == 3
    made = {}
    for name, each in batch.items():
        if isinstance(each, Tensor) and each.dim():
            if each.shape[0] == rows and rows > _ROWS:
                each = each[:_ROWS]
            # The last dim of a float tensor with more than two dims is channels.
            last = each.dim() - 1 if each.is_floating_point() and each.dim() > 2 else each.dim()
            for dim in range(1, last):
                if has_tokens and each.shape[dim] == tokens and tokens > _TOKENS:
                    each = each.narrow(dim, 0, _TOKENS)
        made[name] = each
    return made


def examples_of(batch: Batch, module: nn.Module, *, all_tokens: bool) -> tuple[Batch, ...]:
    """Return what a trial is run on, the first that the module takes: few rows and tokens, or else all.

    With `all_tokens` it is all of them, unless they are too many: if each rank has its own tokens, a capacity may be
    reached only where there are many.
    """
    few = shortened(batch)
    if not all_tokens:
        return few, batch
    tensors = tensors_in(batch)
    tokens = max((each.shape[:2].numel() for each in tensors), default=1)
    products = tokens * sum(each.numel() for each in module.parameters())
    most = _PRODUCTS.get(tensors[0].device.type if tensors else "cpu", _PRODUCTS["cpu"])
    return (batch,) if products <= most else (few, batch)


def tensors_in(output: Any) -> list[Tensor]:
    """Return all tensors in a module's output, however nested, dataclasses included."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output) and not isinstance(output, type):
        output = list(vars(output).values())
    elif not isinstance(output, (tuple, list)):
        return []
    return [tensor for each in output for tensor in tensors_in(each)]
