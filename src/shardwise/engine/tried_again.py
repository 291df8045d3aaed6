"""Repeat the trials when a script has set values between steps, or a batch has other plain values than the example.

The trials made with an engine (what a loss is a mean over, whether rows depend on each other, which layers can be
sharded) hold for the module and the loss as they were then. A curriculum sets other values later: the weight of a
contrastive term, `criterion.hard = True`, `block.normalise = True`. So when a value was set, the trials are repeated on
a copy of the module with random weights: once with the old values, and with the new ones. A trial that fails only with
the new values is refused, naming the value. The same is done for words and numbers of a batch that differ from the
example: `{"task": "tags"}`. Values that forwards set themselves are ignored, except counters: trials are made once more
with a number far beyond (`if self.steps > 1000:`).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple
from zlib import crc32

from torch import Tensor, nn

from shardwise.engine.found_again import AGAIN, EvaluationTrial, Found, check_cuts, flow_of
from shardwise.engine.valued_copy import ABSENT, ValuedCopy, WasSet
from shardwise.errors import ShardwiseError, some
from shardwise.planner.plan import Plan
from shardwise.sharding.context.parallel import ContextParallel, Unfit
from shardwise.sharding.context.trial import try_parts
from shardwise.sharding.stand_in import converted, fitting, stand_in
from shardwise.sharding.tensor.shard import find_apart
from shardwise.stages.batch import home_of
from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.loss_trial import try_loss
from shardwise.stages.rows import RowRule, unmarked
from shardwise.stages.split.script_values import asks_for_mode, find_holders, sets_mode
from shardwise.stages.split.set_values import FAR, Counted, Holder, Number, ValueKinds
from shardwise.stages.stage import Batch, Loss

#: Models with fewer parameters are run with values to see what units read. Others run on meta tensors, if possible.
_FEW = 2**25
#: The bits of the hash of values that were set (`same_weights.py`).
_BITS = 20
#: Types of plain values in a batch.
_PLAIN = (str, bool, int, float)


class _Example(NamedTuple):
    """The plain values (words) of the example, and the names of all its entries."""

    words: dict[str, Any]
    entries: tuple[str, ...]

    def of(self, batch: Batch) -> Batch:
        """Return the batch with the example's entries and words."""
        return {**{key: each for key, each in batch.items() if key in self.entries}, **self.words}

    def other_words(self, batch: Batch) -> list[tuple[str, str | bool]]:
        """Return the words and flags of a batch that differ from the example's. Numbers may differ in every batch."""
        every = [(key, batch[key]) for key in self.words if isinstance(batch.get(key), (str, bool))]
        return [(key, now) for key, now in every if now != self.words[key]]

    def told_of(self, batch: Batch) -> list[str]:
        """Name the entries of a batch that the example lacks, or has with other words."""
        told = [
            f"batch[{key!r}] ({_words(_word_of(was))}, then {_words(_word_of(batch[key]))})"
            for key, was in self.words.items()
            if key in batch and _word_of(batch[key]) != _word_of(was)
        ]
        return told + [f"batch[{key!r}] (not there, then given)" for key in batch if key not in self.entries]


def _at_first(before: Found, of_example: Tried) -> Tried:
    """Return what was found of the loss with the first values. A batch of another kind (`task="b"`, with targets of
    another type) cannot be computed with them: then it is what was found of the example."""
    return of_example if before.tried.failed else before.tried


class TriedAgain:
    """The values of one module and its loss. Made before the module is cut; `rule` says what in a batch are rows."""

    def __init__(
        self, module: nn.Module, loss: Loss, plan: Plan, rule: RowRule, *, tensor: Mapping[str, str] | None,
        example: Batch,
    ) -> None:  # fmt: skip
        self._loss, self._plan, self._rule, self._tensor = loss, plan, rule, tensor
        #: Whether batches are cut into parts, for which the loss has to be tried.
        self._has_parts = plan.dp * plan.microbatches > 1
        #: Whether weights are present only for units that were seen to read them.
        self._comes = plan.pp > 1 or plan.zero == 3 or plan.offload.parameters > 0
        #: The calls of units of each stage; and the factory of contexts if sequences are cut. Set later.
        self.stages: Sequence[Sequence[str]] = ()
        #: Under cp, if all ranks make a trial together: compares the values set on them.
        self.agree: Callable[[int], None] | None = None
        #: The context for trials.
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.make_context: Callable[[], ContextParallel] | None = None
        self.context: ContextParallel | None = None
        #: The kind of the loss itself; and how to reweight its parts, None if ranks with their own rows may disagree on
        #: it.
        self.tried = Tried(LossKind.UNTRIED)
        self.weigh: Callable[[Tried], None] | None = None
        self._holders: list[Holder] = []
        self._example = _Example({}, tuple(sorted(example)))
        if plan.num_ranks > 1 and not any(each.is_meta for each in module.parameters()):
            self._holders = find_holders(module, loss)
            words = {key: each for key, each in example.items() if _word_of(each) is not None}
            self._example = self._example._replace(words=words)
        self._kept = [each.values.read() for each in self._holders]
        self._twin = ValuedCopy(module, self._holders, self._kept) if self._holders or self._example.words else None
        #: The kinds of all values that were ever set, and the results of trials with them.
        self._kinds = ValueKinds()
        self._outcomes: dict[Hashable, Found] = {}
        #: Values that were set and not tried yet; and the latest of all plain values ever set.
        self._set: list[WasSet] = []
        self._ever: dict[tuple[int, str], Any] = {}
        #: Counters that forwards increment.
        self._counted = Counted(self._holders)
        #: The result of trials with the values that were there when the engine was made.
        self._at_first: Found | None = None
        asks, sets = (self._twin is not None and each(self._twin.module) for each in (asks_for_mode, sets_mode))
        self.evaluations = EvaluationTrial(plan, asks=asks, sets=sets)

    @property
    def _copy(self) -> ValuedCopy:
        assert self._twin is not None, "there are values to set"
        return self._twin

    def note(self) -> None:
        """Note the values that were set since the last step, before anything else runs."""
        for number, holder in enumerate(self._holders):
            now, was = holder.values.read(), self._kept[number]
            if now != was:
                self._set += [
                    WasSet(number, key, was.get(key, ABSENT), value)
                    for key, value in now.items()
                    if was.get(key, ABSENT) != value
                ]
                self._kept[number] = now

    def check(self, batch: Batch) -> None:
        """Refuse values that were set since the last step, or are in this batch, if trials fail with them."""
        self.note()
        found, self._set = self._set, []
        for each in found:
            # A buffer of one element may be on another stage.
            if isinstance(each.now, _PLAIN if self._holders[each.holder].module is not None else (*_PLAIN, Number)):
                self._ever[each.holder, each.key] = each.now
            self._kinds.note(f"{self._holders[each.holder].name}.{each.key}", each.was, each.now)
        if self.agree is not None:
            self.agree(self.bits)
        for key, was in self._example.words.items():
            now = _word_of(batch.get(key))
            if now is not None:
                self._kinds.note(f"batch[{key!r}]", _word_of(was), now)
        if self._twin is not None:
            self._kinds.note("entries", self._example.entries, tuple(sorted(batch)))
        outcome = self._outcomes.get(self._kinds.now)
        if outcome is None and self._kinds.are_others:
            self._try(batch, found)
        elif found:
            self._copy.set(found)
        if outcome is not None:
            self._weigh_as(outcome, "it is set as it was once, and")
            _fit(self.context, outcome)
        if self._counted.is_due:
            self._look_ahead(batch)

    @property
    def bits(self) -> int:
        """A hash of the numbers and words that the script has set, equal on ranks that agree; 0 if none were set."""
        return crc32(repr(sorted(self._ever.items())).encode()) & (1 << _BITS) - 1 if self._ever else 0

    def check_evaluation(self, batch: Batch) -> None:
        """Refuse an evaluation that the module was not cut for. Tried once for each set of entries and words, and of
        values that were set since the last step."""
        if self._twin is not None:
            entries, words = tuple(sorted(batch)), self._example.other_words(batch)
            is_other = bool(self._set or words) or entries != self._example.entries
            kind = entries, *words, self._kinds.now, *((each.holder, each.key, repr(each.now)) for each in self._set)
            self.evaluations.check(self._copy, batch, kind, self._set, is_other=is_other, around=self.around)

    def end(self) -> None:
        """End a step: values that changed during it were changed by it, or by making the engine."""
        before, self._kept = self._kept, [each.values.read() for each in self._holders]
        self._counted.note(before, self._kept)

    def _look_ahead(self, batch: Batch) -> None:
        """Refuse forwards that depend on counters, if trials fail with far larger counts. Tried once."""
        found = [WasSet(*each) for each in self._counted.take()]
        try:
            if self._at_first is None:
                self._at_first = self._outcomes[frozenset()] = self._trials(self._example.of(batch))
            self._copy.set(found)
            with self._counted.put([each for each in found if self._holders[each.holder].module is None]):
                far = self._trials(batch)
        except Exception:  # Training will report what is wrong.
            return
        finally:
            self._copy.set([each._replace(now=each.was) for each in found])
        names = some([f"{self._holders[each.holder].name}.{each.key}".strip(".") for each in found])
        begin = f"forwards count {names}, and when it is {FAR}"
        if self._at_first.tried.problem is None and far.tried.problem is not None:
            raise ShardwiseError(f"{begin} {far.tried.problem}", remedy=far.tried.remedy)
        check_cuts(begin, self._at_first, far, self._plan)

    def _try(self, batch: Batch, found: list[WasSet]) -> None:
        self._outcomes[self._kinds.now] = Found()
        try:
            if self._at_first is None:
                with self._as_before(found):
                    self._at_first = self._outcomes[frozenset()] = self._trials(self._example.of(batch))
            self._copy.set(found)
            now = self._trials(batch)
        except Exception:  # Training will report what is wrong.
            return
        told = [_told(each, self._holders[each.holder]) for each in found]
        told += self._example.told_of(batch)
        names = some(told) or "what the batch lacks"
        self._compare(f"{names} was set since the engine was made, and with it", self._at_first, now)
        if self.make_context is not None:
            now = now._replace(unfit=self._try_sequences(names, batch))
        self._outcomes[self._kinds.now] = now
        _fit(self.context, now)

    def _compare(self, begin: str, before: Found, now: Found) -> None:
        first = _at_first(before, self.tried)
        if first.problem is None and now.tried.problem is not None and first.kind is not LossKind.UNTRIED:
            raise ShardwiseError(f"{begin} {now.tried.problem}", remedy=now.tried.remedy)
        self._weigh_as(now, begin)
        check_cuts(begin, before, now, self._plan)

    def _weigh_as(self, now: Found, begin: str) -> None:
        """Weight parts of the loss as found by the trials, if they are weighted otherwise."""
        if self._at_first is None:
            return
        first = _at_first(self._at_first, self.tried)
        if LossKind.UNTRIED in (first.kind, now.tried.kind):
            return
        is_first = (now.tried.kind, now.tried.through) == (first.kind, first.through)
        if self.weigh is not None:
            # At first an engine goes by what it has seen of the module itself.
            self.weigh(self.tried if is_first else now.tried)
        elif not is_first:
            raise ShardwiseError(
                f"{begin} the loss is {now.tried.kind.value}; it was {first.kind.value}",
                remedy=f"{AGAIN}; or return total, number",
            )

    def _try_sequences(self, names: str, batch: Batch) -> Unfit:
        assert self.make_context is not None, "sequences are shared out"
        try:
            return try_parts(self._copy.again(), self.make_context, unmarked(batch), self._loss).unfit
        except ShardwiseError as error:
            raise ShardwiseError(
                f"{names} was set since the engine was made, and with it {error.problem}", remedy=error.remedy
            ) from error

    def _trials(self, batch: Batch) -> Found:
        with self.around():
            return self._all_trials(batch)

    def _all_trials(self, batch: Batch) -> Found:
        """Make all of them, on a copy of the copy."""
        found, twin = Found(), self._copy.outline()
        if self._has_parts or self._comes:
            device, dtypes = fitting(twin, lambda _: None, home_of(batch))
            kinds = [each.dtype for each in twin.parameters() if each.is_floating_point()]
            dtype = kinds[0] if kinds and kinds[0] in dtypes else dtypes[-1]
            module = stand_in(self._copy.again(), lambda _: None, {}, dtype=dtype, device=device, seed=1)
            given = converted(batch, dtype, device)
            if self._has_parts:
                rule = deepcopy(self._rule)
                in_turn = self._plan.microbatches > 1
                num_parts = self._plan.dp * self._plan.microbatches
                tried = try_loss(module, self._loss, given, rule, nullcontext, num_parts=num_parts, in_turn=in_turn)
                found = found._replace(tried=tried)
            if self._comes:
                # A separate copy: in the earlier one, equal blocks share the parameters of the first.
                named = self._copy.again()
                if sum(each.numel() for each in twin.parameters()) < _FEW:
                    named = stand_in(named, lambda name: name, {}, dtype=dtype, device=device, seed=1)
                flow = flow_of(named, self.stages, unmarked(given), has_buffers=self._plan.pp == 1)
                # A tensor that is read between units is gathered for the stage, if no unit was seen to read it.
                read = {unit: names for unit, names in flow.read.items() if unit}
                found = found._replace(read=read, needs=flow.needs)
        if self._plan.tp > 1:
            copy, given = self._copy.again(), unmarked(batch)
            apart = find_apart(
                copy, self._plan.tp, self._tensor, sequence=self._plan.sp, example=given, loss=self._loss
            )
            found = found._replace(apart=apart)
        # The result with the initial values; a trial of others has its own.
        return found if self._at_first is not None or self.context is None else found._replace(unfit=self.context.unfit)

    @contextmanager
    def _as_before(self, found: list[WasSet]) -> Iterator[None]:
        """Restore the earlier values within the context; attributes of modules are set on the copy."""
        own = [(self._holders[each.holder].values, each) for each in found if self._holders[each.holder].module is None]
        for values, each in own:
            if each.was is ABSENT:
                values.drop(each.key)
            else:
                values.put(each.key, each.was)
        try:
            yield
        finally:
            for values, each in own:
                values.put(each.key, each.now)


def _told(each: WasSet, holder: Holder) -> str:
    name = f"{holder.name}.{each.key}" if holder.name else each.key
    return f"{name} ({_words(each.was)}, then {_words(each.now)})"


def _fit(context: ContextParallel | None, now: Found) -> None:
    """Refuse sequences that a trial with these values has found to be computed wrongly."""
    if context is not None and now.unfit is not None:
        context.unfit = now.unfit


def _word_of(value: Any) -> Any:
    """Return a plain value of a batch, also from a tensor of one element on the host; None for anything else."""
    if isinstance(value, Tensor) and not value.dim() and value.device.type == "cpu":
        return value.item()
    return value if isinstance(value, _PLAIN) else None


def _words(value: Any) -> str:
    """Describe a value in a few words."""
    name = getattr(value, "__name__", None) or (type(value).__name__ if isinstance(value, nn.Module) else None)
    return name or repr(value)[:40]
