"""Find branches of a forward on values over all rows of a batch: `if x.mean() > 0:`, `if float(loss) > 5:`.

Each part of a batch decides by its own rows, which is correct only if all parts decide alike. Three rows may agree by
chance. So every such value is intercepted where Python reads it, and the forward is run again with the other answer. If
the loss changes, the line is reported.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.stages.rows import tensors_in
from shardwise.stages.split.lines import line_of
from shardwise.torch_private import READ_NUMBER, EagerDispatchMode, pytree

#: Replaces a number that was read: beyond any threshold.
_FAR = 1e30
#: At most this many lines are tried, each with one or two forwards.
_MOST_LINES = 4
#: Operators that make one number of a mask. Hugging Face's models ask `mask.sum() == mask.numel()`.
_COUNTING = ("sum", "count_nonzero", "min", "max", "amin", "amax", "prod")


class _Read(NamedTuple):
    """A value as Python read it, and the operator that computed it."""

    value: bool | float
    maker: str

    def others(self) -> tuple[bool | float, ...]:
        """Return the alternative values; none where another answer may change the result without harm.

        `any` and `all` often guard a shortcut: the general path for masked rows is also right if none is masked.
        """
        if isinstance(self.value, bool):
            is_short_cut = self.value == (self.maker == "any") and self.maker in ("any", "all")
            return () if is_short_cut else (not self.value,)
        return (_FAR, -_FAR)


class Decisions(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Records, by line, the values computed from a batch that Python reads; with `answers`, returns those instead."""

    def __init__(self, batch: Mapping[str, Any], answers: Mapping[str, bool | float] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._answers = answers or {}
        #: Tensors that come from the batch, with the name of the operator that has made each.
        self._made_by = WeakTensorKeyDictionary()
        for each in tensors_in(batch):
            self._made_by[each] = ""
        self.reads: dict[str, _Read] = {}
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if not any(each in self._made_by for each in given):
            return made
        if func is READ_NUMBER:
            return self._noted(made, self._made_by[given[0]])
        name = self._name_of(func.overloadpacket.__name__, given)
        for each in pytree.tree_leaves(made):
            if isinstance(each, Tensor):
                self._made_by[each] = name
        return made

    def _name_of(self, name: str, given: list[Tensor]) -> str:
        """Return the operator's name. A comparison of a count over a mask is named `all` (eq) or `any` (ne)."""
        known = [each for each in given if each in self._made_by and not each.is_floating_point()]
        is_count = any(self._made_by[each] in _COUNTING for each in known)
        return {"eq": "all", "ne": "any"}.get(name, name) if is_count else name

    def _noted(self, value: Any, maker: str) -> Any:
        if not isinstance(value, (bool, float)):  # Lengths and indices: other values would be out of range.
            return value
        line = line_of()
        self.reads.setdefault(line, _Read(value, maker))
        self.counts[line] += 1
        return self._answers.get(line, value)


#: Computes the loss of rows within a `Decisions`.
Run = Callable[[Mapping[str, Any], Decisions], float]


def find_decision(
    run: Run, three: Mapping[str, Any], one: Mapping[str, Any], tolerance: Callable[[], float]
) -> str | None:
    """Return the first line that branches on a value over all rows and so changes the loss of three rows."""
    seen, fewer = Decisions(three), Decisions(one)
    whole = run(three, seen)
    if not seen.reads:
        return None
    run(one, fewer)
    for line, read in list(seen.reads.items())[:_MOST_LINES]:
        if seen.counts[line] != fewer.counts[line]:
            continue  # The value is read for each row separately.
        for other in read.others():
            try:
                loss = run(three, Decisions(three, {line: other}))
            except Exception:  # A guard that raises.
                continue
            if abs(loss) < float("inf") and abs(loss - whole) > tolerance() * max(abs(whole), abs(loss)):
                return line
    return None
