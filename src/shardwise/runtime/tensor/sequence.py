"""Sequence parallelism: what lies between the regions of a block is shared out along the sequence.

    block      norm ─ gather ─ columns ─ rows ─ sum and scatter ─ add ─ norm ─ gather ─ ...
                s/n            all of s                     s/n

The first block of a list takes its piece of what it is given, the last one gives back the whole, so that whatever comes
before and after sees no difference; between two blocks only a rank's piece of the activations moves. In a block, what
works token by token does so on its piece, and the gradients of its parameters are parts. What needs all tokens and is
not cut (a router with its experts, an attention that was not recognised) has them gathered around it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shardwise.errors import ShardwiseError
from shardwise.runtime.collectives import Group, gather, scatter
from shardwise.runtime.split.units import is_block_list
from shardwise.runtime.tensor.around import surround
from shardwise.runtime.tensor.columns import ColumnLinear, RowLinear, sequence_dim
from shardwise.runtime.tensor.labels import Trace
from shardwise.runtime.tensor.streams import Streams


class SequenceRegions:
    """Shares out the blocks of one module; keeps which parameters now have parts of their gradients."""

    def __init__(self, module: nn.Module, group: Group, seen: Trace, by_heads: Iterable[str]) -> None:
        self._module, self._group, self._seen, self._by_heads = module, group, seen, set(by_heads)
        self.partial: set[str] = set()

    def share(self) -> None:
        """Share out every list of blocks that holds cut layers."""
        lists = list(self._outermost_lists("", self._module))
        if not lists:
            raise ShardwiseError(
                f"sequence=True shares out lists of blocks, and {type(self._module).__name__} has none with cut layers",
                remedy="sp=false, or the blocks in an nn.ModuleList",
            )
        for name, blocks in lists:
            for number, block in enumerate(blocks):
                self._share_block(name, f"{name}.{number}", block, is_block=True)
                self._around_block(block, is_first=number == 0, is_last=number == len(blocks) - 1)

    def _outermost_lists(self, name: str, module: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            blocks = list(child.children()) if is_block_list(child) else []
            if any(
                isinstance(each, RowLinear) for block in blocks for part in block.children() for each in part.modules()
            ):
                yield path, blocks
            else:
                yield from self._outermost_lists(path, child)

    def _around_block(self, block: nn.Module, *, is_first: bool, is_last: bool) -> None:
        group = self._group
        draws = any(isinstance(each, _DropoutNd) and each.p > 0 for each in block.modules()) or self._seen.drawn_at
        streams = Streams(group) if draws else None

        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if is_first:
                args, kwargs = _with_first(args, kwargs, lambda each: _own_piece(each, group))
            device = _first(args, kwargs).device
            if streams is not None and block.training:
                streams.part(device)
            returned = call(*args, **kwargs)
            if streams is not None:
                streams.meet(device)
            if not is_last:
                return returned
            return _with_result(returned, lambda each: gather(each, group, sequence_dim(each), used_alike=True))

        surround(block, around)

    def _share_block(self, stream: str, name: str, module: nn.Module, *, is_block: bool = False) -> None:
        """Gather where all tokens are needed, and note whose gradients are parts."""
        cut = [each for each in module.modules() if isinstance(each, (ColumnLinear, RowLinear))]
        if not is_block and (_has_experts(module) or (not cut and not _is_token_wise(module))):
            self._give_all_tokens(module)
            return
        if isinstance(module, RowLinear):
            module.scatters = True
        if not isinstance(module, ColumnLinear):
            self.partial |= {key for key, _ in module.named_parameters(name, recurse=False)}
        self._gather_for_columns(stream, name, module, is_block=is_block)
        for key, child in module.named_children():
            if not isinstance(child, nn.Embedding):
                self._share_block(stream, f"{name}.{key}", child)

    def _gather_for_columns(self, stream: str, name: str, module: nn.Module, *, is_block: bool) -> None:
        """Columns directly in a module that read the stream: their input is gathered by the module, or by them."""
        columns = {
            f"{name}.{key}": each
            for key, each in module.named_children()
            if isinstance(each, ColumnLinear) and stream in self._seen.streams[f"{name}.{key}"]
        }
        given = self._seen.given.get(name)
        if not is_block and any(key in self._by_heads or self._seen.layers[key].inputs[0] is given for key in columns):
            for each in columns.values():
                each.together.reduces = False
            self._give_all_tokens(module, gives_back=False)
            return
        for key, each in columns.items():
            if key in self._by_heads:
                raise ShardwiseError(
                    f"sequence=True: {key} is a part of an attention that is written out in the block {name}, where it"
                    " cannot be given all tokens",
                    remedy="attention in a module of its own, or sp=false",
                )
            each.together.gathers = True

    def _give_all_tokens(self, module: nn.Module, *, gives_back: bool = True) -> None:
        """Gather the first tensor that a module is given. `gives_back`: it returns all tokens too, of which each rank
        takes its piece; all ranks compute alike in between. Else each computes a part, and rows scatter."""
        group = self._group

        def around(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            args, kwargs = _with_first(
                args, kwargs, lambda each: gather(each, group, sequence_dim(each), used_alike=gives_back)
            )
            returned = call(*args, **kwargs)
            if not gives_back:
                return returned
            return _with_result(returned, lambda each: scatter(each, group, sequence_dim(each)))

        surround(module, around)


def _has_experts(module: nn.Module) -> bool:
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return not is_list and any(type(each).__name__.endswith("Experts") for each in module.modules())


def _is_token_wise(module: nn.Module) -> bool:
    """Whether a module that is not cut treats every token by itself: norms, linear layers, what has no parameters."""
    if isinstance(module, nn.Linear) or "norm" in type(module).__name__.lower():
        return True
    return not any(True for _ in module.parameters())


def _own_piece(tensor: Tensor, group: Group) -> Tensor:
    dim = sequence_dim(tensor)
    if tensor.shape[dim] % group.size:
        longer = -(-tensor.shape[dim] // group.size) * group.size
        raise ShardwiseError(
            f"a sequence of {tensor.shape[dim]} tokens does not divide by tp={group.size}",
            remedy=f"sequences of {longer} tokens (padded), or sp=false",
        )
    return scatter(tensor, group, dim)


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the first tensor among them changed."""
    for number, each in enumerate(args):
        if isinstance(each, Tensor):
            return (*args[:number], change(each), *args[number + 1 :]), kwargs
    for key, each in kwargs.items():
        if isinstance(each, Tensor):
            return args, {**kwargs, key: change(each)}
    return args, kwargs


def _with_result(returned: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a module returns with its tensor, or the first of several, changed."""
    if isinstance(returned, Tensor):
        return change(returned)
    return type(returned)((change(returned[0]), *returned[1:]))
