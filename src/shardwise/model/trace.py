"""Any `nn.Module` as a `Model`, from one run on fake tensors.

The module runs forward and backward once, with tensors that have shapes and no memory. Every kernel call is recorded
under the block that made it. So parameters, FLOPs, bytes moved and bytes saved are those of this module itself, and
not of a similar family. They hold for the sequence length of the example; the number of samples may change.
"""

from collections.abc import Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.model.model import Block, Model
from shardwise.model.operations import Embedding
from shardwise.model.tracing.layers import Traced, blocks_of, gather
from shardwise.model.tracing.recorder import tensors_in
from shardwise.model.tracing.run import record

# Containers of modules that are never called themselves.
_SHELVES = (nn.ModuleList, nn.ModuleDict)


def trace_model(
    module: nn.Module,
    batch: Mapping[str, Any] | Sequence[Any] | Tensor,
    *,
    name: str | None = None,
    fake: bool = True,
) -> Model:
    """Return the model of a module, called with an example batch: keyword arguments, positional ones, or one tensor.

    The first dimension of the first tensor counts samples. `fake=False` runs the module on copies of its real tensors,
    for modules with data-dependent control flow.
    """
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = _taken(module, batch)
    else:
        args = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    segments, parameters = record(module, _find_blocks(module), args, kwargs, fake=fake)
    first = next(tensor for tensor in tensors_in((args, dict(kwargs))) if tensor.dim() > 0)
    traced = Traced(
        segments=gather(segments),
        parameters=parameters,
        module=module,
        num_samples=first.shape[0],
        width=next(iter(parameters.values())).element_size(),
    )
    blocks, ties = blocks_of(traced)
    sequence = first.shape[1] if first.dim() == 2 and not first.is_floating_point() else 1
    return Model(
        name=name or type(module).__name__,
        family="traced",
        blocks=blocks,
        ties=ties,
        hidden=_hidden(blocks, sequence),
        vocabulary=_vocabulary(blocks),
        sequence=sequence,
    )


def _taken(module: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a batch that the module's forward takes. Labels, for example, are only for the loss."""
    parameters = signature(module.forward).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        return dict(batch)
    taken = {key: value for key, value in batch.items() if key in parameters}
    if not taken:
        raise ShardwiseError(
            f"forward of {type(module).__name__} takes {', '.join(parameters) or 'nothing'}, and the example has "
            f"{', '.join(batch)}",
            remedy=f"example={{{next(iter(parameters), 'x')!r}: ...}}",
        )
    return taken


def _hidden(blocks: tuple[Block, ...], sequence: int) -> int:
    """Return the width of the second block's input at one position."""
    return blocks[min(1, len(blocks) - 1)].input_elements // sequence


def _vocabulary(blocks: tuple[Block, ...]) -> int:
    tables = [each.vocabulary for block in blocks for each in block.operations if isinstance(each, Embedding)]
    return max(tables, default=0)


def _find_blocks(root: nn.Module) -> dict[str, nn.Module]:
    """Return every block by name. Without lists of blocks, the children that have parameters are the blocks."""
    found = dict(_items(root, ""))
    if found:
        return found
    return {name: child for name, child in root.named_children() if _has_parameters(child)}


def _items(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the items of the outermost lists of blocks in a module."""
    is_list = _is_block_list(module)
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if is_list and not isinstance(child, _SHELVES):
            if _has_parameters(child):
                yield path, child
        else:
            yield from _items(child, path)


def _is_block_list(module: nn.Module) -> bool:
    """Return whether this is a list of at least two blocks. A Sequential of linear, activation, linear is one block."""
    if isinstance(module, _SHELVES):
        return len(module) >= 2
    if not isinstance(module, nn.Sequential):
        return False
    return sum(next(child.children(), None) is not None and _has_parameters(child) for child in module) >= 2


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
