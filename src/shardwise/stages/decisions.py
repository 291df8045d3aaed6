"""What a forward decides by numbers of all rows of a batch: `if x.mean() > 0:`, `if float(loss) > 5:`.

Parts of a batch decide each by its own rows, and that is the same only as long as all decide alike. Three rows may do
so by chance. So every such number is seen where Python reads it, and the forward is run again with the other answer: if
the loss is another then, the line is told.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.stages.rows import tensors_in
from shardwise.stages.split.lines import line_of
from shardwise.torch_private import READ_NUMBER, EagerDispatchMode, pytree

#: In the place of a number that was read: no threshold lies beyond.
_FAR = 1e30
#: So many lines are tried, each with a forward or two.
_MOST_LINES = 4
#: Operators that make one number of a mask. Hugging Face's models ask `mask.sum() == mask.numel()`.
_COUNTING = ("sum", "count_nonzero", "min", "max", "amin", "amax", "prod")


class _Read(NamedTuple):
    """A number as Python was given it, and the operator that has computed it."""

    value: bool | float
    maker: str

    def others(self) -> tuple[bool | float, ...]:
        """What else it could have been; nothing where the other answer may change the result, and does no harm.

        `any` and `all` stand before a short cut: what is done where some are masked may be done where none is.
        """
        if isinstance(self.value, bool):
            is_short_cut = self.value == (self.maker == "any") and self.maker in ("any", "all")
            return () if is_short_cut else (not self.value,)
        return (_FAR, -_FAR)


class Decisions(EagerDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what Python reads of numbers that come from a batch, by line; with `answers`, gives those instead."""

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
        """Who counts what a mask lets through, and compares, asks for `all` of it, or whether there is `any`."""
        known = [each for each in given if each in self._made_by and not each.is_floating_point()]
        is_count = any(self._made_by[each] in _COUNTING for each in known)
        return {"eq": "all", "ne": "any"}.get(name, name) if is_count else name

    def _noted(self, value: Any, maker: str) -> Any:
        if not isinstance(value, (bool, float)):  # Lengths and places: others would be out of range.
            return value
        line = line_of()
        self.reads.setdefault(line, _Read(value, maker))
        self.counts[line] += 1
        return self._answers.get(line, value)


#: Computes the loss of rows, and notes what is decided meanwhile.
Run = Callable[[Mapping[str, Any], Decisions], float]


def find_decision(
    run: Run, three: Mapping[str, Any], one: Mapping[str, Any], tolerance: Callable[[], float]
) -> str | None:
    """The first line that decides by a number of all rows, so that the loss of three rows depends on it."""
    seen, fewer = Decisions(three), Decisions(one)
    whole = run(three, seen)
    if not seen.reads:
        return None
    run(one, fewer)
    for line, read in list(seen.reads.items())[:_MOST_LINES]:
        if seen.counts[line] != fewer.counts[line]:
            continue  # It is asked of each row by itself.
        for other in read.others():
            try:
                loss = run(three, Decisions(three, {line: other}))
            except Exception:  # A guard that raises.
                continue
            if abs(loss) < float("inf") and abs(loss - whole) > tolerance() * max(abs(whole), abs(loss)):
                return line
    return None
