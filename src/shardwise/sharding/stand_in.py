"""A copy of a module to try: other numbers, few tokens, and one block's weights for all blocks of its kind.

What a cut does to a module does not depend on its numbers, so any will do. Random ones are better than a user's: a
matrix of zeros, as many begin with, hides every mistake. And all blocks that are alike may have the same ones, so that
of a model of any depth no more is there than one block of each kind, its embeddings and its head. Of a list of blocks
the first of each kind is run, and the last; those between give back what they are given.
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

#: So many tokens and rows are tried where there are more.
_TOKENS, _ROWS = 12, 2
#: Numbers that are drawn; beyond that they repeat. Of a vocabulary of 10^9 numbers a CPU draws the rest in 10 s.
_DRAWN = 2**20 + 7
#: What a block keeps of its place in a list.
_PLACE = re.compile(r"(idx|index|layer_id|layer_number|number)$")
#: So many are computed with in float32 on a CPU, which has half of the memory to touch then.
_MANY = 2**25
#: So long are rows of numbers, each of which has its factor, where one sum tells whether they have changed.
_WIDE = 4099


def stand_in(
    module: nn.Module, sort: Callable[[str], Hashable], passing: Mapping[str, Hashable], *, dtype: torch.dtype,
    device: torch.device, seed: int, gain: float = 1.0,
) -> nn.Module:  # fmt: skip
    """The copy. Parameters of blocks that are alike, and of one sort, become one; matrices are multiplied by `gain`.

    `passing` are blocks that return a tensor like the first that they are given, and what each does: one that does
    what an earlier one does may be left out.
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
    if lost:  # Those of a module on the meta device are made as its weights would be.
        materialise(twin, lost, seed=seed, device=device)
        for each in twin.modules():
            for key, buffer in list(each.named_buffers(recurse=False)):
                setattr(each, key, _converted(buffer, dtype, device))
    return twin


def _emptied(block: nn.Module) -> nn.Module:
    """A block without layers, that returns what it is given."""
    made = copy(block)
    made.__dict__ = {**vars(block), "_modules": {}, "_parameters": {}, "_buffers": {}, "forward": _first_tensor}
    return made


def _first_tensor(*args: Any, **kwargs: Any) -> Tensor:
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))


def fitting(
    module: nn.Module, sort: Callable[[str], Hashable], device: torch.device
) -> tuple[torch.device, tuple[torch.dtype, ...]]:
    """The device for a trial, the given one or the host if it has too little memory free; and types, the best first."""
    representative = _representatives(module, sort)
    numbers = {_first_name(name, representative): each.numel() for name, each in module.named_parameters()}
    count = sum(numbers.values())
    # Whole and in pieces, each with its gradients.
    if device.type == "cuda" and 4 * count * torch.float64.itemsize > 0.5 * torch.cuda.mem_get_info(device)[0]:
        device = torch.device("cpu")
    many = device.type == "cpu" and count > _MANY
    return device, (torch.float32,) if many else (torch.float64, torch.float32)


def another(twin: nn.Module, *, writes: bool = False) -> nn.Module:
    """A copy whose parameters have the same memory, unless its forward `writes` to them, and all else of its own.

    They are tensors of its own, too: a forward may have them rest meanwhile (`requires_grad_(False)`), and copies are
    run beside each other.
    """
    return copied(twin, {id(each): _of_its_own(each, writes=writes) for each in twin.parameters()})


def versions_of(twin: nn.Module) -> list[tuple[float, ...]]:
    """How often each parameter was written; on its copies, too, that have its memory. What is written through `data`
    counts as no version, so some of its numbers are told, and a sum in which each counts by its place."""
    return [(version_of(each), *_told_of(each.detach())) for each in twin.parameters()]


def _told_of(numbers: Tensor) -> list[float]:
    flat = numbers.reshape(-1)
    if not flat.is_floating_point() or flat.is_meta or not flat.numel():
        return []
    # Rows of one length, so that no number is looked at twice and none needs a factor of its own.
    wide = min(flat.numel(), _WIDE)
    rows = flat[: flat.numel() // wide * wide].view(-1, wide).sum(0)
    return [float(rows @ torch.linspace(1, 2, wide, dtype=rows.dtype, device=rows.device)), float(flat[-1])]


def _of_its_own(parameter: nn.Parameter, *, writes: bool) -> nn.Parameter:
    numbers = parameter.detach().clone() if writes else parameter.detach()
    made = nn.Parameter(numbers, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def _representatives(module: nn.Module, sort: Callable[[str], Hashable]) -> dict[str, str]:
    """For each block of a list, the first of the list that is like it."""
    found: dict[str, str] = {}
    for name, each in module.named_modules():
        if not is_block_list(each):
            continue
        kinds: dict[Hashable, str] = {}
        for key, block in each.named_children():
            path = f"{name}.{key}" if name else key
            kind = tuple((inner, tuple(p.shape), sort(f"{path}.{inner}")) for inner, p in block.named_parameters())
            # What is done about blocks is done about all that differ in their number alone, and no others.
            found[path] = kinds.setdefault((key.isdecimal() or key, _habits(block), kind), path)
    return found


def _habits(block: nn.Module) -> Hashable:
    """All that a block does differently from another of its kind, apart from its numbers and its place."""
    return tuple(
        (name, type(each), *hooks_of(each), "forward" in vars(each), *_settings(each))
        for name, each in block.named_modules()
    )


def _settings(module: nn.Module) -> Iterator[Hashable]:
    for key, value in vars(module).items():
        if isinstance(value, (bool, int, float, str)) and not _PLACE.search(key):
            yield key, value


def _first_name(name: str, representative: Mapping[str, str]) -> str:
    """The name that a parameter has in the first block that is like its own; lists may be in blocks of lists."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        path = ".".join(parts[:count])
        if representative.get(path, path) != path:
            return _first_name(".".join([representative[path], *parts[count:]]), representative)
    return name


def _drawn(name: str, like: Tensor, owner: nn.Module, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Numbers with which values stay about as large as they are."""
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
    """A tensor on a device, in the type of the trial if it is of floats."""
    if tensor.is_meta:
        return tensor
    is_float = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.to(device=device, dtype=dtype if is_float else tensor.dtype)


def converted(batch: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A batch for the copy."""
    return pytree.tree_map(lambda each: _converted(each, dtype, device) if isinstance(each, Tensor) else each, batch)


def shortened(batch: Batch) -> Batch:
    """Some rows of a batch, and some tokens of each, as far as these are told by the shapes of its tensors."""
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
            # The last of several dims of floats are channels.
            last = each.dim() - 1 if each.is_floating_point() and each.dim() > 2 else each.dim()
            for dim in range(1, last):
                if has_tokens and each.shape[dim] == tokens and tokens > _TOKENS:
                    each = each.narrow(dim, 0, _TOKENS)
        made[name] = each
    return made


def tensors_in(output: Any) -> list[Tensor]:
    """All tensors in what a module returned, however they are nested: also in dataclasses."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    elif is_dataclass(output) and not isinstance(output, type):
        output = list(vars(output).values())
    elif not isinstance(output, (tuple, list)):
        return []
    return [tensor for each in output for tensor in tensors_in(each)]
