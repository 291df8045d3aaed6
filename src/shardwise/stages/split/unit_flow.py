"""What a run of a module on the example shows: the calls of its units, and what flows between them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardwise.stages.split.outline import Outline
from shardwise.stages.split.sources import Sources
from shardwise.stages.split.write_guard import Rewritten


@dataclass(kw_only=True)
class UnitCall:
    """One call of a unit: `layers.3`, or `layers.3#1` if it is the second of that unit."""

    name: str
    unit: str
    outline: Outline
    signature: tuple[Any, ...]
    #: The sources of its arguments.
    needs: Sources
    flops: float
    bytes: float
    #: Parameters and buffers that it used, in whichever module they are registered.
    touched: frozenset[str]
    #: The bytes of those parameters, as far as this process has them.
    weight_bytes: float = 0.0
    #: The time of its forward and backward, if it was measured.
    seconds: float | None = None
    #: Leaves of its output that glue writes to later.
    overwritten: set[int] = field(default_factory=set)
    #: The lists and dictionaries among its arguments that it writes into, by number: their contents are in the outline.
    filled: tuple[int, ...] = ()
    #: The first call in the same checkpoint of the module's own, if it is in one.
    checkpoint: int | None = None


class Left(NamedTuple):
    """A value that a call stored in an attribute or under a key. `is_from_data`: a number that may depend on data."""

    call: int
    name: str
    holder: dict[Any, Any]
    key: Any
    value: Any
    is_from_data: bool


@dataclass(frozen=True, kw_only=True)
class UnitFlow:
    """All calls of units in one run, in order, and the sources of the module's output."""

    calls: tuple[UnitCall, ...]
    output_needs: Sources
    #: Parameters and buffers that glue uses.
    in_glue: frozenset[str]
    #: Where a value from inside a call is first used outside it, although the call did not return it.
    leaks: Mapping[int, str]
    #: Whether the run changed attributes, lists or closures; and the values that calls stored, if recorded.
    traces: bool = False
    left: tuple[Left, ...] = ()
    #: Parameters that the run wrote to.
    rewritten: Mapping[str, Rewritten] = field(default_factory=dict)
    #: The holder and key of each attribute or entry that the run wrote, in calls or between them, by name.
    slots: Mapping[str, tuple[dict[Any, Any], Any]] = field(default_factory=dict)
    #: Whether shapes between units, or of their outputs, depend on values in the batch.
    shapes_by_data: bool = False
    #: Whether the forward draws from the generators of Python or NumPy.
    draws_in_python: bool = False
    #: The name of a compiled function that calls units, if there is one.
    compiled: str | None = None
    #: Whether glue assigned attributes or the like between calls, if flags were noted.
    assigns: bool = False

    def leave_for(self, calls: Collection[int]) -> None:
        """Set the attributes that other calls would set, as on the example, where they are missing.

        A process with some of the calls runs all glue between them. Results there that depend on attributes of other
        calls are not used, but the attributes must exist.
        """
        for each in self.left:
            if each.call not in calls and each.holder.get(each.key) is None:
                each.holder[each.key] = each.value

    def mislead(self, calls: Collection[int]) -> None:
        """Alter the data-dependent numbers that other calls store, as two batches may happen to give the same ones."""
        for each in self.left:
            if each.call not in calls and each.is_from_data:
                each.holder[each.key] = not each.value if isinstance(each.value, bool) else 1.3 * each.value + 1
