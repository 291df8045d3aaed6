"""The user's loss: tried on the example before training, and weighted over the parts of a batch."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import ShardwiseError, nearest
from shardwise.stages.batch import Padding, length_of
from shardwise.stages.label_counts import LabelCounts
from shardwise.stages.loss_kind import LEARNED_NUMBER, REMEDY, REMEDY_OF_LEARNED, REMEDY_OF_MEANS, LossKind, Tried
from shardwise.stages.metrics import pairs_of, take_metrics, with_metrics
from shardwise.stages.parts_alike import PartsAlike
from shardwise.stages.rows import tensors_in
from shardwise.stages.split.lines import line_of_error
from shardwise.stages.stage import Batch, Loss

#: The weight of a part without labels whose loss says 0 itself: nothing beside other parts, and no 0 / 0 without them.
_ALMOST_NOTHING = 1e-30


def trial_of(loss: Loss, batch: Batch) -> Callable[[Any], bool]:
    """Return a function that tries the loss on the module's output for this microbatch, and refuses an unusable one.

    It returns whether the loss also returns metrics.
    """

    def attempt(output: Any) -> bool:
        try:
            # A loss may remove entries, as HF's Trainer does with labels.
            result, metrics = take_metrics(loss(output, copy(batch)))
            if metrics is not None:
                pairs_of(metrics)
        except ShardwiseError:
            raise
        except Exception as error:
            if isinstance(error, RuntimeError) and "does not require grad" in str(error):
                raise ShardwiseError(
                    f"the loss asks for gradients itself, at {line_of_error(error)}: there are none while it is tried"
                    " on the example, nor in evaluations, which have gradients off",
                    remedy="if torch.is_grad_enabled(): around that",
                ) from error
            raise ShardwiseError(
                f"the loss raises {type(error).__name__}: {error}, at {line_of_error(error)}; on the example it is"
                f" given {describe(output)}, and a batch with {', '.join(batch)}",
                remedy=_remedy(error, output, batch),
            ) from error
        total: Any = result[0] if isinstance(result, tuple) else result
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise ShardwiseError(
                f"the loss is {describe(total)}, but it must be one number for a microbatch",
                remedy="return loss.sum(), loss.numel()",
            )
        _check_number(result)
        return metrics is not None

    return attempt


def _check_number(result: Any) -> None:
    """Refuse a second result that is not the number of a pair: outputs, for example, as from HF's `compute_loss`."""
    if not isinstance(result, tuple):
        return
    others = result[1:]
    is_one = len(others) == 1 and isinstance(others[0], (int, float, Tensor))
    if not is_one or torch.as_tensor(others[0]).numel() != 1:
        found = describe(others[0]) if len(others) == 1 else f"{len(others)} things"
        raise ShardwiseError(
            f"the loss returns {found} beside itself, where the number belongs that it is summed over",
            remedy="return loss, and engine.predict(batch) has outputs; or return loss, {'accuracy': ...} with metrics",
        )


def _remedy(error: Exception, output: Any, batch: Batch) -> str:
    """Suggest the name that was most likely meant, if the error is a missing name."""
    wanted = error.name if isinstance(error, AttributeError) else error.args[0] if error.args else None
    entries: Iterable[Any] = output if isinstance(output, Mapping) else ()
    if isinstance(wanted, str) and isinstance(error, (AttributeError, KeyError)):
        for name, among in (("output", entries), ("batch", batch)):
            meant = nearest(wanted, [each for each in among if isinstance(each, str)])
            if meant is not None:
                return f"{name}[{meant!r}]"
    return "a loss(output, batch) of what the module returns and of what the batch has"


def summed_only(loss: Loss, cp: int, tried: Tried, number_of: Callable[[Batch], float]) -> Loss:
    """Return the loss as a sum and its number: the labels for a mean over labels, `number_of` for a sum. A loss of any
    other kind is refused, since ranks have different numbers of tokens that count."""

    def checked(output: Any, batch: Batch) -> Any:
        counts = LabelCounts()
        with counts if tried.kind is LossKind.LABELS else nullcontext():
            result, metrics = take_metrics(loss(output, batch))
        if not isinstance(result, tuple) and len(counts.found) == 1:
            result = result * counts.found[0].number, counts.found[0].number
        elif not isinstance(result, tuple) and tried.kind is LossKind.LABELS and not counts.found:
            result = result, weight_without_labels(result)
        elif not isinstance(result, tuple) and tried.kind is LossKind.SUM:
            result = result, number_of(batch)
        if not isinstance(result, tuple):
            of_whole = tried.of_whole or tried
            whose = "the module computes its loss itself, as" if of_whole.inside else "the loss is"
            raise ShardwiseError(
                f"{whose} one number, and under cp={cp} each rank has its own for parts of sequences: of how many"
                " tokens it is the mean or the sum is not told, and a mean of means is not the whole's",
                remedy=_remedy_of_parts(of_whole),
            )
        return with_metrics(result, None if metrics is None else pairs_of(metrics, cp=cp))

    return checked


def _remedy_of_parts(tried: Tried) -> str:
    """Return what to write for a loss of parts of sequences: its sum, and the number that it is summed over."""
    if tried.inside:
        return (
            "a loss of what it returns, with labels that are shifted in the batch,"
            " {'input_ids': ids[:, :-1], 'labels': ids[:, 1:]}: loss=lambda output, batch:"
            " torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), batch['labels'].flatten())"
        )
    if tried.through is not None:
        path, hidden = tried.through.path, tried.through.hidden
        counted = f"batch[{path!r}]" if hidden is None else f"(batch[{path!r}] != {hidden})"
        if hidden is not None and math.isnan(hidden):
            counted = f"(~batch[{path!r}].isnan())"
        return f"return the sum and the number that it is summed over: total, {counted}.sum()"
    if tried.kind is LossKind.ROWS:
        return "of the losses of all tokens, return the sum and their number: losses.sum(), losses.numel()"
    if tried.kind is LossKind.EVEN:
        return "if no label is ignored, return loss * number, number, with number = batch['labels'].numel()"
    return "return the sum and the number that it is summed over: total, (labels != -100).sum()"


def numbers_in(entries: Collection[str], batch: Batch) -> float:
    """Count the elements of these entries with more than one dim. Over parts of sequences the counts add up."""
    found = [batch[name] for name in entries if name in batch]
    return float(sum(each.numel() for each in found if isinstance(each, Tensor) and each.dim() > 1))


class WeighedLoss:
    """The loss of parts of a batch, as a sum and a number: each part is weighted by what it is a mean over.

    `num_parts` counts the parts of a batch over all replicas. With `by_rows` they may differ in their number of rows. A
    part that `is_all` of a batch is divided by its number here, so that its backward begins like plain torch's. That is
    not done if the loss has a factor for half-precision backwards, shown by its owner's attribute `has_factor`.
    """

    def __init__(self, loss: Loss, tried: Tried, *, num_parts: int, by_rows: bool, is_all: bool = False) -> None:
        self._loss, self._tried, self._num_parts, self._by_rows = loss, tried, num_parts, by_rows
        self._is_all = is_all and not getattr(getattr(loss, "__self__", None), "has_factor", False)
        self._counts: LabelCounts | None = None
        #: Compares the means of parts that have the same weight.
        self.alike = PartsAlike()
        #: Makes the context in which a microbatch's loss is computed.
        self.around: Callable[[Batch], AbstractContextManager[Any]] = nullcontext

    def weigh(self, tried: Tried) -> None:
        """Set what was found out about the loss."""
        self._tried = tried

    def check_weights(self, batch: Batch) -> None:
        """Refuse a batch, before it is cut, whose loss its parts do not tell, as its entries show."""
        if self._tried.through is not None:
            self._tried.through.check(batch)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the labels of means within this context: the forward of the last stage and its loss."""
        kind = self._tried.kind
        if kind is not LossKind.LABELS and kind is not LossKind.EVEN:
            yield
            return
        self._counts = LabelCounts()
        try:
            # If the module computes no such mean itself, its forward is not watched.
            with self._counts if self._tried.inside else nullcontext():
                yield
        finally:
            self._counts = None

    def __call__(self, output: Any, batch: Batch) -> Any:
        is_none = self._hides_all(output, batch)
        with nullcontext() if self._counts is None or self._tried.inside else self._counts, self.around(batch):
            result, metrics = take_metrics(self._loss(output, copy(batch)))
        total, number = result if isinstance(result, tuple) else self._weighed(result, batch)
        if is_none is not None:
            total = _unless(is_none, total)
        if not isinstance(batch, Padding):
            if metrics is not None and self._by_rows:
                metrics = pairs_of(metrics, rows=length_of(batch))
            if self._is_all:
                return with_metrics(_mean(total, number), metrics)
            if isinstance(number, Tensor) and number.requires_grad:
                raise ShardwiseError(LEARNED_NUMBER, remedy=REMEDY_OF_LEARNED)
            return with_metrics((total, number), metrics)
        # Padding adds nothing to the total; of a sum, and of what a loss adds to its number, it still has its share.
        through = self._tried.through
        added = 0.0 if through is None else through.plus / self._num_parts / through.row
        return with_metrics((total * 0, number if self._tried.kind is LossKind.SUM else added), metrics and {})

    def _hides_all(self, output: Any, batch: Batch) -> Tensor | None:
        """Return whether an entry hides all of one part of a batch, whose mean is 0 / 0 then. None of its gradient goes
        into the output. None if that cannot be, or if gradients go elsewhere too. Does not synchronise."""
        through = self._tried.through
        if self._is_all or self._tried.inside or self._tried.kind is not LossKind.ENTRY or through is None:
            return None
        made = [each for each in tensors_in({"": output}) if each.requires_grad]
        if through.plus or any(type(each) is not Tensor for each in made):
            return None
        is_none = through.of(batch) == 0
        for each in made:
            each.register_hook(lambda gradient: _unless(is_none, gradient))  # type: ignore[no-untyped-call]
        return is_none

    def _weighed(self, result: Any, batch: Batch) -> tuple[Tensor, Tensor | int | float]:
        if self._tried.kind is LossKind.SUM:
            return result, 1 / self._num_parts
        if self._tried.kind is LossKind.ENTRY:
            assert self._tried.through is not None, "an entry was found"
            through, number = self._tried.through, self._tried.through.of(batch)
            # What the loss adds to the number is once in that of the batch.
            total = result * ((number + through.plus) / through.row)
            return total, (number + through.plus / self._num_parts) / through.row
        found = self._counts.found if self._counts is not None else []
        if self._tried.kind is LossKind.LABELS and not found and self._counts is not None:
            return result, 1 if self._is_all else weight_without_labels(result)
        if self._tried.kind is LossKind.LABELS and len(found) == 1:
            self._note([], batch)
            number = found[0].number / self._tried.labels
            return result * number, number
        for each in found:
            if each.number != each.size:
                raise ShardwiseError(
                    f"{each.size - float(each.number):g} of {each.size} labels are ignored here, and the loss is a mean"
                    " over the others and something else: means of parts that ignore different numbers are not that of"
                    " the batch",
                    remedy=REMEDY_OF_MEANS,
                )
        if self._counts is not None and not self._tried.of_rows:
            self._note([each.size / length_of(batch) for each in found], batch)
        return (result * length_of(batch), length_of(batch)) if self._by_rows else (result, 1)

    def _note(self, sizes: list[float], batch: Batch) -> None:
        if not isinstance(batch, Padding):
            self.alike.note(sizes)


def _unless(is_none: Tensor, value: Tensor) -> Tensor:
    """Return the value, or zeros in its place."""
    return value.where(~is_none.to(value.device), 0.0)


def weight_without_labels(result: Tensor) -> float:
    """Return the weight of a part whose loss computes no mean over labels: little if it is 0; another is refused."""
    value = float(result.detach())
    if value != 0:
        raise ShardwiseError(
            f"a part of the batch has no mean over labels, and its loss is {value:.6g}: its weight relative to the"
            " means of other parts cannot be known",
            remedy=REMEDY,
        )
    return _ALMOST_NOTHING


def _mean(total: Tensor, number: Any) -> tuple[Tensor, Tensor | float]:
    """Return the sum divided by its number, and 1; or the sum and 0 if the number is 0. Does not synchronise."""
    if not isinstance(number, Tensor):
        return (total / number, 1) if number else (total, 0)
    is_none = number == 0
    return total / torch.where(is_none, 1, number), (~is_none).float()


def describe(output: Any) -> str:
    """Describe an output in a few words, for an error."""
    kind = type(output).__name__
    if isinstance(output, Tensor):
        return f"a {kind} of shape {tuple(output.shape)}"
    return f"a {kind} with {', '.join(map(str, output))}" if isinstance(output, Mapping) else f"a {kind}"
