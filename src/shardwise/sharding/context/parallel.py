"""Context parallelism of one module: shard its batches, and make its attention see the tokens of other ranks.

    context = ContextParallel(mesh.group("cp"))
    context.attach(module)                          once, when the module has its weights and its stages
    part = context.cut(microbatch)                  this rank's tokens
    with context.running(part):                     around every forward, the recomputed ones too
        output = module(**part)

The rest of the module runs unchanged on this rank's tokens. It must therefore treat each token independently, and take
positions from the argument `positions`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError, unknown
from shardwise.ranks.collectives import Group
from shardwise.sharding.context import hf
from shardwise.sharding.context.all_to_all import all_to_all_attention
from shardwise.sharding.context.attention_calls import AttentionCalls
from shardwise.sharding.context.kernels import AttentionBlock, LogitScaling, Plain
from shardwise.sharding.context.mask import Mask, Tokens
from shardwise.sharding.context.ring import AttentionCall, ring_attention
from shardwise.sharding.context.sequence_shards import (
    Entry,
    LocalBatch,
    SequenceSharding,
    first_tokens,
    length_of,
    shard_sequence,
    without_last,
)
from shardwise.sharding.dropout import WeightDrop
from shardwise.sharding.zigzag import zigzag_shard
from shardwise.stages.split.module_stage import ModuleStage
from shardwise.stages.stage import Batch, Split
from shardwise.torch_private import BatchNormModule

FORMS = {"ring": ring_attention, "all-to-all": all_to_all_attention}
_NUMBERS = count()


class Unfit(NamedTuple):
    """Sequences that cannot be cut into parts for this module, unlike those of the first trial: padded ones, and those
    whose pieces are not multiples of `piece` tokens (`x[:, ::2]`). Each with its reason."""

    padded: ShardwiseError | None = None
    others: ShardwiseError | None = None
    piece: int = 1

    def check(self, tokens: Tokens) -> None:
        num_pieces = 2 * tokens.num_ranks
        if self.padded is not None and tokens.length > tokens.num_real:
            raise ShardwiseError(
                f"a sequence of {tokens.num_real} tokens is padded to {tokens.length}, and with padding"
                f" {self.padded.problem}",
                remedy=f"sequences of a multiple of {num_pieces} tokens, or cp=1",
            )
        if self.others is not None and tokens.length // num_pieces % self.piece:
            raise ShardwiseError(
                f"a sequence of {tokens.length} tokens has pieces of {tokens.length // num_pieces}, which is no"
                f" multiple of {self.piece}, and then {self.others.problem}",
                remedy=f"sequences of a multiple of {num_pieces * self.piece} tokens, or cp=1",
            )


class ContextParallel:
    """How the tokens of every sequence are sharded over the ranks of a group.

    `form` is the way attention sees the tokens of other ranks. `positions` is the module's argument for positions, None
    if it uses none. `entries` are the token dims of batch entries unknown to cp (see `sequence_shards.py`). `pads` adds
    padding to sequences that do not divide. `masks` is the meaning of masks that the module gives to torch's attention.
    """

    def __init__(
        self,
        group: Group,
        *,
        form: Literal["ring", "all-to-all"] = "ring",
        positions: str | None = "position_ids",
        entries: Mapping[str, Entry | int | None] | None = None,
        pads: bool = True,
        masks: Mask | None = None,
    ) -> None:
        if form not in FORMS:
            raise unknown("form of context parallelism", form, FORMS)
        self.group = group
        #: Attention calls handled so far. If it stays 0, the module's attention was not found.
        self.num_calls = 0
        #: Returns the dropout of weights for queries and a probability.
        self.drops: Callable[[Tensor, float], WeightDrop | None] | None = None
        #: `draws`: attention applies dropout. `is_strict`: operations that look like hand-written attention are
        #: refused. Both are off during a trial; a module that a trial has run needs no such guess.
        self.draws = self.is_strict = True
        #: The sequences that a trial has found to be computed wrongly.
        self.unfit = Unfit()
        self._attention, self._masks = FORMS[form], masks
        self._sharding = SequenceSharding(entries=entries or {}, positions=positions, pads=pads)
        self._name = f"shardwise-context-{next(_NUMBERS)}"
        self._watches = True
        self._counts_itself = False
        self._tokens: Tokens | None = None
        self._undo: list[Callable[[], None]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "ContextParallel":
        return self  # A copy of one block, made for its shapes only, must not copy all blocks attached here.

    def attach(self, module: nn.Module) -> None:
        """Route the module's attention through this object, and read its signature. Refuse unsupported modules."""
        _check_tokenwise(module)
        models = hf.models_in(module)
        for model in models:
            hf.check_model(model)
        parameters = inspect.signature(module.forward).parameters
        positions = self._sharding.positions
        if positions is not None and positions not in parameters:
            raise ShardwiseError(
                f"{type(module).__name__}.forward takes no {positions}, so every rank would count positions from 0",
                remedy="a forward with position_ids, or positions=None if the module uses none",
            )
        drops = frozenset({"documents"} - set(parameters))
        self._sharding = replace(self._sharding, packs=bool(models), drops=drops)
        if models:
            self._undo.append(hf.install(module, self._name, self.attend))
        own = _with_attend(module)
        for each in own:
            self._undo.append(partial(setattr, each, "attend", each.attend))
            setattr(each, "attend", self._attend_by_mask)  # noqa: B010 - a method of theirs, not a submodule
        # In other modules each call of torch's attention is intercepted.
        self._watches = not models and not own
        self._counts_itself = hf.counts_positions_itself(module)

    def attach_stages(self, split: Split) -> None:
        """Make every stage of a pipeline run inside `running`, where attention sees the tokens of other ranks."""
        for stage in split.stages:
            if isinstance(stage, ModuleStage):
                stage.running = self.running

    def detach(self) -> None:
        """Give the module back its own attention."""
        while self._undo:
            self._undo.pop()()

    def cut(self, batch: Batch, *, predicts: bool = False) -> LocalBatch:
        """Return this rank's part of a batch, or a microbatch, that all ranks of the group have whole.

        `predicts`: no loss is computed, so padding tokens may be added without labels that exclude them.
        """
        if self._counts_itself and self._sharding.positions not in batch:
            raise ShardwiseError(
                "the module makes positions from its tokens in a way of its own, so a part of them gets wrong ones",
                remedy="position_ids in the batch, made from the whole sequences",
            )
        sharding = replace(self._sharding, predicts=predicts)
        part = shard_sequence(batch, rank=self.group.rank, num_ranks=self.group.size, sharding=sharding)
        self.unfit.check(part.tokens)
        return part

    def shortened(self, batch: Batch, num_tokens: int) -> Batch:
        """Return about the first `num_tokens` tokens of a batch, a number that the pieces divide."""
        return first_tokens(batch, num_tokens, 2 * self.group.size, self._sharding)

    def padded(self, batch: Batch) -> Batch | None:
        """Return the batch without the last token of its sequences, if these divide and may be padded."""
        return without_last(batch, 2 * self.group.size, self._sharding)

    def num_tokens(self, batch: Batch) -> int:
        """The length of the sequences of a batch."""
        return length_of(batch, self._sharding)

    @contextmanager
    def running(self, batch: Batch) -> Iterator[None]:
        """Run the module's forward in this context, on a batch from `cut`."""
        if not isinstance(batch, LocalBatch):
            raise ShardwiseError("the batch was not cut for cp", remedy="context.cut(batch) for each microbatch")
        before, self._tokens = self._tokens, batch.tokens
        try:
            if self._watches:
                num_tokens = batch.tokens.length // self.group.size
                with AttentionCalls(self.attend, num_tokens, self._masks, is_strict=self.is_strict):
                    yield
            else:
                yield
        finally:
            self._tokens = before

    def real_tokens(self) -> Tensor | None:
        """Return which of this rank's tokens of a sequence are not padding; None outside of a forward."""
        if self._tokens is None:
            return None
        places = zigzag_shard(torch.arange(self._tokens.length), 0, self.group.rank, self.group.size)
        return places < self._tokens.num_real

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None, cap: float | None = None,
        dropout: float = 0.0,
    ) -> Tensor:  # fmt: skip
        """Compute attention of this rank's queries to all keys: each [batch, heads, this rank's tokens, head size]."""
        logits = LogitScaling(scale=query.shape[-1] ** -0.5 if scale is None else scale, cap=cap)
        self.num_calls += 1
        if query.is_meta and self._tokens is None:
            return _on_meta(query, key, value, logits)
        if self._tokens is None:
            raise ShardwiseError(
                "attention was computed outside of context.running(batch)",
                remedy="with context.running(batch); and recompute=full in the plan instead of the module's own",
            )
        _check_shapes(query, key, value, self._tokens.length // self.group.size)
        if query.is_meta:
            return _on_meta(query, key, value, logits)
        if torch.is_autocast_enabled(query.device.type):
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        drop = self._drop(query, dropout)
        call = AttentionCall(group=self.group, tokens=self._tokens, mask=mask, logits=logits, drop=drop)
        return self._attention(query, key, value, call)

    def _drop(self, query: Tensor, dropout: float) -> WeightDrop | None:
        """Return the dropout of weights, which does not depend on the rank that computes them."""
        if not dropout or not self.draws:
            return None
        drop = None if self.drops is None else self.drops(query, dropout)
        if drop is None:
            raise ShardwiseError(
                f"attention drops weights with probability {dropout:g}, and only an engine can choose which",
                remedy="parallelize, or attention dropout 0; dropout elsewhere is no problem",
            )
        return drop

    def _attend_by_mask(
        self, query: Tensor, key: Tensor, value: Tensor, own: Any, scale: float, dropout: float = 0.0
    ) -> Tensor:  # fmt: skip
        """Compute attention for modules with their own function `attend`: causal, with the window of their mask."""
        mask = Mask(causal=True, window=own.window, documents=True, padding=True)
        return self.attend(query, key, value, mask, scale, dropout=dropout)


def _with_attend(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose attention is a function `attend` in their attributes."""
    return [each for each in module.modules() if callable(each.__dict__.get("attend"))]


def _check_tokenwise(module: nn.Module) -> None:
    """Refuse layers known to mix the tokens of a sequence, since each rank has only a part of them."""
    for name, each in module.named_modules():
        mixes = isinstance(each, (BatchNormModule, nn.RNNBase)) or (
            isinstance(each, nn.Conv1d) and each.kernel_size != (1,)
        )
        if mixes:
            raise ShardwiseError(
                f"{name} is a {type(each).__name__}, which mixes the tokens of a sequence, and cp gives each rank a"
                " part of them",
                remedy="cp=1 for it",
            )


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> None:
    for name, each in (("queries", query), ("keys", key), ("values", value)):
        if each.dim() != 4 or each.shape[2] != num_tokens:
            raise ShardwiseError(
                f"attention has {name} of {list(each.shape)}, but cp needs [batch, heads, {num_tokens}, size]: those of"
                " this rank's tokens, without a cache and without another sequence",
                remedy="use_cache=False, or cp=1",
            )
    if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
        raise ShardwiseError(
            f"{query.shape[1]} heads of queries cannot share {key.shape[1]} of keys and {value.shape[1]} of values"
        )


def _on_meta(query: Tensor, key: Tensor, value: Tensor, logits: LogitScaling) -> Tensor:
    """Return a meta tensor of the right shape, without communication."""
    return Plain().forward(AttentionBlock(query=query, key=key, value=value, bias=None, causal=False, logits=logits))[0]
