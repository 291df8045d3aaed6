"""Vocabulary parallelism: each rank embeds and scores its own words.

If the ranks do not divide the vocabulary, it is padded with zeros at its end. No token is ever a padding word, and the
loss excludes them, so their gradient is zero and they never change.

To the model and to a loss the logits of a rank look like the whole: same shape, same indexing. Their cross entropy is
computed on the shards (as in Megatron-LM), and so are operations that keep words separate: scaling, a cap, a cast, a
reshape of the tokens. Any other operation first gathers the whole. Logits that are written to, or viewed in a way that
allows writes, stay gathered with all of their views, so that every alias sees a change.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardwise.kernels.lazy_logits import may_wait, reshaped, waiting
from shardwise.kernels.linear_cross_entropy import Ranks
from shardwise.ranks.collectives import Group, copy, gather, start_all_reduce, sum_over
from shardwise.sharding.tensor.lazy_gather import LazyGather
from shardwise.sharding.tensor.linear import ColumnParallelLinear
from shardwise.sharding.wrap_forward import wrap_forward
from shardwise.torch_private import pytree, storage_id, without_subclasses

#: Elementwise operations.
_EACH: set[Callable[..., Any]] = {
    Tensor.float, Tensor.to, Tensor.double, Tensor.bfloat16, Tensor.half, Tensor.contiguous, Tensor.clone,
    Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.true_divide, Tensor.tanh,
    Tensor.mul_, Tensor.div_, Tensor.__imul__, torch.mul, torch.div, torch.tanh, torch.clone, Tensor.detach,
}  # fmt: skip
_NEW_SHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.__getitem__}
#: Queries of a tensor that do not read its values.
_FACTS: set[Any] = {
    Tensor.is_floating_point,
    Tensor.dim,
    Tensor.is_contiguous,
    Tensor.untyped_storage,
    *(
        getattr(Tensor, name).__get__
        for name in ("dtype", "device", "ndim", "requires_grad", "is_meta", "layout", "grad_fn", "is_leaf", "is_cuda")
    ),
}


#: The elementwise operations that write to their tensor.
_IN_PLACE = {Tensor.mul_, Tensor.div_, Tensor.__imul__}
#: Names that end in an underscore though they change no value.
_KEEPS_NUMBERS = {"requires_grad_", "rename_", "share_memory_"}
_LIKE_PLUS_EQUALS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow")}
#: Operations on the tensor object in its graph; they must not go to another tensor with the same values.
_ON_ITSELF: set[Any] = {Tensor.register_hook, Tensor.retain_grad}


class VocabParallelLogits(Tensor):
    """The logits of this rank's words, which act as the logits of all words."""

    group: Group
    words: int
    #: The logits of all words, once they have been gathered for good.
    _gathered: Tensor | None
    #: The logits of which these are a view, and the function that makes the view.
    _view_of: "tuple[VocabParallelLogits, Callable[[Tensor], Tensor]] | None"

    @staticmethod
    def of(local: Tensor, group: Group, words: int) -> "VocabParallelLogits":
        made = local.as_subclass(VocabParallelLogits)
        made.group, made.words, made._gathered, made._view_of = group, words, None, None
        return made

    @property
    def local(self) -> Tensor:
        """The logits of this rank's words, padding included."""
        with without_subclasses():
            return self.as_subclass(Tensor)

    def like(self, local: Tensor) -> "VocabParallelLogits":
        """Return other logits of the same words."""
        return VocabParallelLogits.of(local, self.group, self.words)

    def view_by(self, local: Tensor, make: Callable[[Tensor], Tensor]) -> "VocabParallelLogits":
        """Return a view of these logits. `make` makes the same view of the whole."""
        made = self.like(local)
        made._view_of = self, make
        return made

    @property
    def is_gathered(self) -> bool:
        """Whether the logits of all words are kept here, so that this rank's own are out of date."""
        return self._gathered is not None or (self._view_of is not None and self._view_of[0].is_gathered)

    def whole(self) -> Tensor:
        """Return the logits of all words."""
        if self._gathered is not None:
            return self._gathered
        if self._view_of is not None and self._view_of[0].is_gathered:
            base, make = self._view_of
            self._gathered = make(base.whole())
            return self._gathered
        return gather(self.local, self.group, -1, used_alike=True)[..., : self.words]

    def keep_whole(self) -> Tensor:
        """Keep the logits of all words from now on, here and in the base of this view with all of its views."""
        if self._view_of is not None:
            self._view_of[0].keep_whole()
        elif self._gathered is None:
            self._gathered = self.whole().clone()
        return self.whole()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        given = args[0] if args and isinstance(args[0], VocabParallelLogits) else kwargs.get("input")
        if isinstance(given, VocabParallelLogits):
            if func in _ON_ITSELF and not given.is_gathered:
                with without_subclasses():
                    return func(*args, **kwargs)
            if given.is_gathered:
                return _on_whole(func, args, kwargs)
            local, rest = given.local, args[1:]
            if func in _FACTS:
                return func(local, *rest, **kwargs)
            if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
                return torch.Size((*local.shape[:-1], given.words))
            if func is Tensor.size:
                shape = (*local.shape[:-1], given.words)
                return shape[rest[0] if rest else kwargs["dim"]] if rest or kwargs else torch.Size(shape)
            if func in _EACH and not any(isinstance(each, Tensor) and each.dim() for each in (*rest, *kwargs.values())):
                made = func(local, *rest, **kwargs)
                if func in _IN_PLACE:
                    return given
                if made is local or _share_memory(made, local):
                    return given.view_by(made, lambda whole: func(whole, *rest, **kwargs))
                return given.like(made)
            if func in _NEW_SHAPES and (made := _reshaped(func, given, rest, kwargs)) is not None:
                return made
            if func is functional.cross_entropy and (loss := _loss(given, rest, kwargs)) is not None:
                return loss
        return _on_whole(func, args, kwargs)


def _on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function to the logits of all words."""
    first = args[0] if args and isinstance(args[0], VocabParallelLogits) else None
    if first is not None and (_writes(func) or kwargs.get("out") is first):
        whole = first.keep_whole()
        made = func(whole, *map(_read, args[1:]), **{key: _read(each) for key, each in kwargs.items()})
        return first if made is whole else made
    given = [each for each in (*args, *kwargs.values()) if isinstance(each, VocabParallelLogits)]
    wholes = {id(each): each.whole() for each in given}

    def read(each: Any) -> Any:
        return wholes[id(each)] if id(each) in wholes else _read(each)

    made = func(*map(read, args), **{key: read(each) for key, each in kwargs.items()})
    views = [each for each in _tensors(made) if any(_share_memory(each, whole) for whole in wholes.values())]
    if not views or all(each.is_gathered for each in given):
        return made
    # A later write to a view must show in the logits themselves, so apply it again to the whole that is kept.
    for each in given:
        wholes[id(each)] = each.keep_whole()
    return func(*map(read, args), **{key: read(each) for key, each in kwargs.items()})


def _tensors(made: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(made) if isinstance(each, Tensor)]


def _writes(func: Any) -> bool:
    """Whether a torch function writes to its first argument: its name ends in an underscore, or it is like +=."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or name in _LIKE_PLUS_EQUALS
    return name.endswith("_") and not name.startswith("_") and name not in _KEEPS_NUMBERS


def _share_memory(some: Any, other: Tensor) -> bool:
    if not isinstance(some, Tensor):
        return False
    with without_subclasses():
        return storage_id(some.untyped_storage()) == storage_id(other.untyped_storage())


def _read(each: Any) -> Any:
    """Replace logits anywhere in an argument by the logits of all words."""
    if isinstance(each, VocabParallelLogits):
        return each.whole()
    if type(each) in (list, tuple):
        return type(each)(map(_read, each))
    return {key: _read(value) for key, value in each.items()} if type(each) is dict else each


def _reshaped(
    func: Any, given: VocabParallelLogits, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> VocabParallelLogits | None:
    """Reshape the tokens; None if the dim of words is affected."""
    if kwargs:
        return None
    made = reshaped(func, given.local, given.words, rest)
    # The gathered logits may not be contiguous, so that `view` would fail.
    whole_by = torch.reshape if func is Tensor.view else func
    shape = rest if whole_by is func or isinstance(rest[0], (tuple, list)) else (rest,)
    return None if made is None else given.view_by(made, lambda whole: whole_by(whole, *shape))


def _loss(given: VocabParallelLogits, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Return the cross entropy computed on the shards; None unless it is of (tokens, words) with class labels."""
    order = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    named = {**dict(zip(order, rest, strict=False)), **kwargs}
    named.pop("input", None)
    target = named.pop("target")
    legacy = [named.pop(key, None) for key in ("weight", "size_average", "reduce")]
    if any(each is not None for each in legacy) or target.is_floating_point() or given.local.dim() != 2:
        return None
    return cross_entropy(given.local, target, given.group, given.words, **named)


def cross_entropy(
    local: Tensor,
    target: Tensor,
    group: Group,
    words: int,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross entropy of logits that are sharded by words: (tokens, words of this rank).

    For a token with logits z and target t, over all words of all ranks:

        loss = log(sum exp(z - m)) - (z_t - m)          m = max z; one all-reduce for m, one for the other two
        gradient of z_i = softmax(z)_i - [i = t]        needs no further communication

    Label smoothing s takes (1 - s) of the target's term and s of the mean over all words. So ranks exchange three
    numbers per token: the largest logit, the sum of exponentials, and the target's logit (with smoothing also the sum
    of logits).
    """
    losses = _CrossEntropy.apply(local, target, group, words, ignore_index, label_smoothing)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses  # type: ignore[no-any-return]
    total: Tensor = losses.sum()
    return total if reduction == "sum" else total / (target != ignore_index).sum()


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, target: Tensor, group: Group, words: int, ignore_index: int, smoothing: float
    ) -> Tensor:
        size = local.shape[-1]
        first = group.rank * size
        count = max(0, min(size, words - first))
        scores = local.float() if local.dtype in (torch.bfloat16, torch.float16) else local
        own = scores[:, :count]
        highest = own.amax(-1) if count else scores.new_full(scores.shape[:1], -torch.inf)
        highest = start_all_reduce(highest, group, dist.ReduceOp.MAX).finish()
        shifted = own - highest.unsqueeze(-1)
        is_here = (target >= first) & (target < first + count)
        column = (target - first).masked_fill(~is_here, 0).unsqueeze(-1)
        hit = shifted.gather(-1, column).squeeze(-1) if count else shifted.new_zeros(shifted.shape[:1])
        parts = [hit.masked_fill(~is_here, 0)]
        if smoothing:
            parts.append(shifted.sum(-1))
        exponentials = shifted.exp_() if not smoothing else shifted.exp()
        parts.append(exponentials.sum(-1))
        hit, *average, total = start_all_reduce(torch.stack(parts), group).finish().unbind()
        is_ignored = target == ignore_index
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), column, is_here, is_ignored)
        ctx.smoothing, ctx.words, ctx.size, ctx.kind = smoothing, words, size, local.dtype
        losses = total.log() - hit * (1 - smoothing)
        if smoothing:
            losses = losses - smoothing / words * average[0]
        return losses.masked_fill(is_ignored, 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        shares, column, is_here, is_ignored = ctx.saved_tensors
        found = shares - ctx.smoothing / ctx.words if ctx.smoothing else shares.clone()
        if shares.shape[-1]:
            found.scatter_add_(-1, column, -(1 - ctx.smoothing) * is_here.to(found.dtype).unsqueeze(-1))
        found *= gradient.masked_fill(is_ignored, 0).unsqueeze(-1)
        return functional.pad(found, (0, ctx.size - shares.shape[-1])).to(ctx.kind), None, None, None, None, None


class VocabularyHead(ColumnParallelLinear):
    """This rank's words of the output head. Its output looks like the logits of all words."""

    words: int = 0
    #: Whether logits are computed lazily, when they are first read, as in the layer that was cut.
    waits = False

    def forward(self, input: Tensor) -> Tensor:
        given = input.piece if isinstance(input, LazyGather) else input
        if self.waits and self.bias is None and may_wait(given, self.weight, training=self.training):
            return waiting(self._all_tokens(input), self.weight, self._ranks(), self._shown)
        return self._shown(super().forward(input))

    def _shown(self, local: Tensor) -> Tensor:
        return VocabParallelLogits.of(local, self.group, self.words)

    def _all_tokens(self, given: Tensor) -> Tensor:
        """Return the input for all tokens. Its gradient is partial on each rank: summed here or by its producer."""
        length = given.length if isinstance(given, LazyGather) else self.together.gathers
        if length is not None:
            return length.gather(given.piece if isinstance(given, LazyGather) else given, used_alike=False)
        return copy(given, self.group) if self.together.reduces else given

    def _ranks(self) -> Ranks:
        """Return the communication of a loss that is sharded by words: a maximum, and a sum of three numbers."""
        return Ranks(
            first=self.group.rank * self.weight.shape[0],
            words=self.words,
            maximum=lambda tensor: start_all_reduce(tensor, self.group, dist.ReduceOp.MAX).finish(),
            total=lambda tensor: start_all_reduce(tensor, self.group).finish(),
            sums_input=False,
        )


def share_embedding(module: nn.Embedding, group: Group, words: int) -> None:
    """Make an embedding, whose weight is this rank's words already, return the vectors of all words."""
    size = -(-words // group.size)
    first, last = group.rank * size, min((group.rank + 1) * size, words)
    if module.padding_idx is not None:
        module.padding_idx = module.padding_idx - first if first <= module.padding_idx < last else None
    module.num_embeddings = size

    def around(call: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        ids = args[0] if args else kwargs["input"]
        is_elsewhere = (ids < first) | (ids >= last)
        vectors = call((ids - first).masked_fill(is_elsewhere, 0))
        return sum_over(vectors.masked_fill(is_elsewhere.unsqueeze(-1), 0), group, in_place=True)

    wrap_forward(module, around)
