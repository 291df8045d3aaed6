"""Vocabulary parallelism: each rank embeds and scores its own words.

A vocabulary that the ranks do not divide is padded with zeros at its end. No token is ever a padding word, and the loss
leaves them out, so their gradient is zero and they stay what they are.

To the model and to a loss the logits of a rank look like the whole: same shape, same indexing. Their cross entropy is
computed where they are (`cross_entropy.py`), and so is what keeps words apart: scaling, a cap, a cast, another shape of
the tokens. All else is done on the whole, which is gathered for it first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.ranks.collectives import Group, gather, sum_over
from shardwise.sharding.tensor.columns import ColumnParallelLinear
from shardwise.sharding.tensor.cross_entropy import cross_entropy
from shardwise.sharding.wrap_forward import wrap_forward
from shardwise.torch_private import without_subclasses

#: What changes each number by itself.
_EACH: set[Callable[..., Any]] = {
    Tensor.float, Tensor.to, Tensor.double, Tensor.bfloat16, Tensor.half, Tensor.contiguous, Tensor.clone,
    Tensor.mul, Tensor.div, Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.true_divide, Tensor.tanh,
    Tensor.mul_, Tensor.div_, Tensor.__imul__, torch.mul, torch.div, torch.tanh, torch.clone, Tensor.detach,
}  # fmt: skip
_NEW_SHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.__getitem__}
#: What is asked of a tensor without looking at its numbers.
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


#: What is done to a tensor of a graph, and not to another that shares its numbers.
_ON_ITSELF: set[Any] = {Tensor.register_hook, Tensor.retain_grad}


class VocabParallelLogits(Tensor):
    """The scores of this rank's words, with what is needed to act as the whole."""

    group: Group
    words: int

    @staticmethod
    def of(local: Tensor, group: Group, words: int) -> "VocabParallelLogits":
        made = local.as_subclass(VocabParallelLogits)
        made.group, made.words = group, words
        return made

    @property
    def local(self) -> Tensor:
        """The scores of this rank's words, padding included."""
        with without_subclasses():
            return self.as_subclass(Tensor)

    def whole(self) -> Tensor:
        """The scores of all words."""
        return gather(self.local, self.group, -1, used_alike=True)[..., : self.words]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        given = args[0] if args and isinstance(args[0], VocabParallelLogits) else kwargs.get("input")
        if isinstance(given, VocabParallelLogits):
            if func in _ON_ITSELF:
                with without_subclasses():
                    return func(*args, **kwargs)
            local, rest = given.local, args[1:]
            if func in _FACTS:
                return func(local, *rest, **kwargs)
            if func == Tensor.shape.__get__:  # type: ignore[attr-defined]
                return torch.Size((*local.shape[:-1], given.words))
            if func is Tensor.size:
                shape = (*local.shape[:-1], given.words)
                return shape[rest[0] if rest else kwargs["dim"]] if rest or kwargs else torch.Size(shape)
            if func in _EACH and not any(isinstance(each, Tensor) and each.dim() for each in (*rest, *kwargs.values())):
                return VocabParallelLogits.of(func(local, *rest, **kwargs), given.group, given.words)
            if func in _NEW_SHAPES and (made := _reshaped(func, given, rest, kwargs)) is not None:
                return made
            if func is functional.cross_entropy and (loss := _loss(given, rest, kwargs)) is not None:
                return loss
        whole = [each.whole() if isinstance(each, VocabParallelLogits) else each for each in args]
        return func(
            *whole,
            **{key: each.whole() if isinstance(each, VocabParallelLogits) else each for key, each in kwargs.items()},
        )


def _reshaped(
    func: Any, given: VocabParallelLogits, rest: tuple[Any, ...], kwargs: dict[str, Any]
) -> VocabParallelLogits | None:
    """Tokens in another shape; None if words are touched."""
    local = given.local
    if kwargs:
        return None
    if func is Tensor.__getitem__:
        return (
            VocabParallelLogits.of(local[rest[0]], given.group, given.words)
            if _picks_tokens(rest[0], local.dim())
            else None
        )
    if func in (Tensor.flatten, torch.flatten):
        if len(rest) < 2 or rest[1] % local.dim() == local.dim() - 1:
            return None
        return VocabParallelLogits.of(local.flatten(*rest), given.group, given.words)
    shape = list(rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest)
    if not all(isinstance(each, int) for each in shape) or shape[-1] not in (given.words, -1) or len(shape) < 2:
        return None
    if shape[-1] == -1:
        tokens = 1
        for each in shape[:-1]:
            tokens *= each
        if tokens * local.shape[-1] != local.numel():
            return None
    return VocabParallelLogits.of(local.reshape(*shape[:-1], local.shape[-1]), given.group, given.words)


def _picks_tokens(index: Any, num_dims: int) -> bool:
    """Whether an index is of plain numbers and slices, and leaves the last dim alone."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(isinstance(each, (int, slice)) or each is Ellipsis for each in parts):
        return False
    if parts.count(Ellipsis) == 1:
        at = parts.index(Ellipsis)
        parts[at : at + 1] = [slice(None)] * (num_dims - len(parts) + 1)
    return len(parts) < num_dims or parts[-1] == slice(None)


def _loss(given: VocabParallelLogits, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The cross entropy where the words are; None if it is of another kind than tokens by words."""
    order = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    named = {**dict(zip(order, rest, strict=False)), **kwargs}
    named.pop("input", None)
    target = named.pop("target")
    legacy = [named.pop(key, None) for key in ("weight", "size_average", "reduce")]
    if any(each is not None for each in legacy) or target.is_floating_point() or given.local.dim() != 2:
        return None
    return cross_entropy(given.local, target, given.group, given.words, **named)


class VocabularyHead(ColumnParallelLinear):
    """This rank's words of the layer that scores words. What it returns looks like the scores of all words."""

    words: int = 0

    def forward(self, tensor: Tensor) -> Tensor:
        local = super().forward(tensor)
        return VocabParallelLogits.of(local, self.together.group, self.words)


def share_embedding(module: nn.Embedding, group: Group, words: int) -> None:
    """Let an embedding, whose weight is this rank's words already, give the vectors of all words."""
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
