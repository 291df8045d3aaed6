"""Sequence parallelism: the operations between the regions of a block are sharded along the sequence.

    block      norm ─ gather ─ columns ─ rows ─ sum and scatter ─ add ─ norm ─ gather ─ ...
                s/n            all of s                     s/n

The first block of a list takes its piece of its input, and the last one returns the whole, so code before and after
sees no difference. Between two blocks only a rank's piece of the activations is passed. Within a block, tokenwise
modules work on their piece, and the gradients of their parameters are partial sums. Modules that need all tokens and
are not cut (a router with its experts, an unrecognised attention) have them gathered around them.

If the ranks do not divide the sequence, the last pieces are shorter, or empty: a block has no padding. A piece does not
show the length of the whole. The first block sees the whole and records its length (`SequenceLength`) in every forward,
and in every stage of a pipeline, where it gets a stand-in for the whole.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import Group
from shardwise.sharding.rng_tracker import RngTracker
from shardwise.sharding.tensor.channel_groups import ChannelTrace
from shardwise.sharding.tensor.lazy_gather import LazyGather, SequenceLength
from shardwise.sharding.tensor.linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from shardwise.sharding.wrap_forward import wrap_forward
from shardwise.stages.split.units import is_block_list
from shardwise.torch_private import DropoutModule, RunningNormModule


class UnsharedError(ShardwiseError):
    """A module in which nothing can be sharded along the sequence."""


class SequenceRegions:
    """Shards the blocks of one module along the sequence. `partial` are parameters whose gradients become partial."""

    def __init__(self, module: nn.Module, group: Group, seen: ChannelTrace, by_heads: Iterable[str]) -> None:
        self._module, self._group, self._seen, self._by_heads = module, group, seen, set(by_heads)
        self.partial: set[str] = set()

    def share(self) -> None:
        """Shard every list of blocks that holds cut layers."""
        lists = list(self._outermost_lists("", self._module))
        if not lists:
            raise UnsharedError(f"{type(self._module).__name__} has no list of blocks with cut layers")
        for name, blocks in lists:
            length = SequenceLength(self._group)
            # A hook, because a pipeline stage that does not hold the first block calls only its hooks.
            blocks[0].register_forward_hook(partial(_note, length), with_kwargs=True)
            for number, block in enumerate(blocks):
                self._share_block(length, name, f"{name}.{number}", block, is_block=True)
                self._around_block(length, block, is_first=number == 0, is_last=number == len(blocks) - 1)

    def _outermost_lists(self, name: str, module: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
        for key, child in module.named_children():
            path = f"{name}.{key}" if name else key
            blocks = list(child.children()) if is_block_list(child) else []
            if any(
                isinstance(each, RowParallelLinear)
                for block in blocks
                for part in block.children()
                for each in part.modules()
            ):
                if not all(place.isdecimal() for place, _ in child.named_children()):
                    raise UnsharedError(f"the blocks of {path} have names, and no order")
                if any(isinstance(block, (nn.ModuleList, nn.ModuleDict)) for block in blocks):
                    raise UnsharedError(f"the blocks of {path} are lists of layers, which the module around calls")
                yield path, blocks
            else:
                yield from self._outermost_lists(path, child)

    def _around_block(self, length: SequenceLength, block: nn.Module, *, is_first: bool, is_last: bool) -> None:
        draws = any(isinstance(each, DropoutModule) and each.p > 0 for each in block.modules()) or self._seen.drawn_at
        rng = RngTracker(self._group) if draws else None

        def wrapped(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if is_first:
                length.note(_first(args, kwargs))
                args, kwargs = _with_first(args, kwargs, length.scatter)
            device = _first(args, kwargs).device
            if rng is not None and block.training:
                rng.enter(device)
            returned = call(*args, **kwargs)
            if rng is not None:
                rng.leave(device)
            if not is_last:
                return returned
            return _with_result(returned, partial(length.gather, used_alike=True))

        wrap_forward(block, wrapped)

    def _share_block(
        self,
        length: SequenceLength,
        stream: str,
        name: str,
        module: nn.Module,
        *,
        is_block: bool = False,
        has_all: bool = False,
    ) -> None:
        """Gather where all tokens are needed, and record partial gradients. `has_all`: all tokens are here already."""
        cut = [each for each in module.modules() if isinstance(each, ParallelLinear)]
        is_apart = is_block or has_all
        if not is_apart and (_has_experts(module) or (not cut and not _is_token_wise(module))):
            self._give_all_tokens(length, module, turned=self._has_tokens_last(stream, name))
            return
        if isinstance(module, RowParallelLinear):
            module.scatters = length
        if not isinstance(module, ColumnParallelLinear):
            self.partial |= {key for key, _ in module.named_parameters(name, recurse=False)}
        cut_here = [(key, each) for key, each in module.named_children() if isinstance(each, ColumnParallelLinear)]
        columns = {f"{name}.{key}": each for key, each in cut_here if stream in self._seen.streams[f"{name}.{key}"]}
        if has_all or (not is_block and self._reads_all(name, columns)):
            for each in columns.values():
                each.together.reduces = False
            if not has_all and self._only_columns_read(self._seen.given.get(name), columns.values()):
                wrap_forward(module, partial(_gathering_lazily, length))
            elif not has_all:
                self._give_all_tokens(length, module, gives_back=False)
            has_all = True
        else:
            self._gather_for_columns(length, name, columns)
        for key, child in module.named_children():
            if not isinstance(child, nn.Embedding):
                self._share_block(length, stream, f"{name}.{key}", child, has_all=has_all)

    def _reads_all(self, name: str, columns: Mapping[str, ColumnParallelLinear]) -> bool:
        """Whether a module needs all tokens for its columns: those of attention heads, or that read its input."""
        given = self._seen.given.get(name)
        return any(key in self._by_heads or self._seen.layers[key].inputs[0] is given for key in columns)

    def _gather_for_columns(
        self, length: SequenceLength, name: str, columns: Mapping[str, ColumnParallelLinear]
    ) -> None:
        """Make columns that read the stream gather it themselves."""
        for key, each in columns.items():
            if key in self._by_heads:
                raise UnsharedError(
                    f"{key} is a part of an attention that is written out in the block {name}, where it cannot be given"
                    " all tokens"
                )
            each.together.gathers = length

    def _only_columns_read(self, given: Tensor | None, columns: Iterable[ColumnParallelLinear]) -> bool:
        """Whether only the columns of one set read a tensor."""
        sets = {id(each.together) for each in columns}
        readers = [name for name, layer in self._seen.layers.items() if any(each is given for each in layer.inputs)]
        known = [self._module.get_submodule(name) for name in readers]
        return (
            given is not None
            and given not in self._seen.read
            and bool(known)
            and all(isinstance(each, ColumnParallelLinear) and {id(each.together)} == sets for each in known)
        )

    def _has_tokens_last(self, stream: str, name: str) -> bool:
        """Whether a module's input is (batch, channels, tokens), as for convolutions."""
        given, first = self._seen.given.get(name), self._seen.given.get(f"{stream}.0")
        if first is None:
            raise UnsharedError(f"the blocks of {stream} are not called as modules")
        tokens = first.shape[-2]
        return given is not None and given.dim() > 2 and given.shape[-1] == tokens != given.shape[-2]

    def _give_all_tokens(
        self, length: SequenceLength, module: nn.Module, *, gives_back: bool = True, turned: bool = False
    ) -> None:
        """Gather the first tensor argument of a module. `gives_back`: all ranks compute the same, the module returns
        all tokens, and each rank takes its piece. If False, each rank computes a part, and rows scatter the sum.
        `turned`: tokens are the last dim of both."""

        def turn(each: Tensor) -> Tensor:
            return each.mT if turned else each

        def wrapped(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            args, kwargs = _with_first(
                args, kwargs, lambda each: turn(length.gather(turn(each), used_alike=gives_back))
            )
            returned = call(*args, **kwargs)
            if not gives_back:
                return returned
            return _with_result(returned, lambda each: turn(length.scatter(turn(each))))

        wrap_forward(module, wrapped)


def _gathering_lazily(length: SequenceLength, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a module with a `LazyGather` of its first tensor, whose tokens its columns gather."""
    args, kwargs = _with_first(args, kwargs, lambda each: LazyGather.of(each, length))
    return call(*args, **kwargs)


def _has_experts(module: nn.Module) -> bool:
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return not is_list and any(type(each).__name__.endswith("Experts") for each in module.modules())


def _is_token_wise(module: nn.Module) -> bool:
    """Whether a module that is not cut treats tokens independently: a norm, a linear layer, or without parameters."""
    if isinstance(module, (RunningNormModule, nn.GroupNorm)):
        return False  # Batch norms and the like normalise channels over all tokens.
    if isinstance(module, nn.Linear) or "norm" in type(module).__name__.lower():
        return True
    return not any(True for _ in module.parameters())


def _note(length: SequenceLength, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
    del returned
    length.note(_first(args, kwargs))


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))


def _with_first(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the first tensor among them changed."""
    for number, each in enumerate(args):
        if isinstance(each, Tensor):
            return (*args[:number], change(each), *args[number + 1 :]), kwargs
    for key, each in kwargs.items():
        if isinstance(each, Tensor):
            return args, {**kwargs, key: change(each)}
    return args, kwargs


def _with_result(returned: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a module's output with its tensor, or the first of several, changed."""
    if isinstance(returned, Tensor):
        return change(returned)
    return type(returned)((change(returned[0]), *returned[1:]))
