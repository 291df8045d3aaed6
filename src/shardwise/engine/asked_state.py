"""Guard an optimizer's `state` between steps: its keys may be pieces, not the module's parameters.

If this rank updates a piece of a parameter `p` (zero, tp), or a copy in full precision, `optimizer.state[p]` would be
an empty entry that no step uses: a script's writes and resets there would be lost. So it raises. State in transit to or
from the host is waited for.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any
from weakref import WeakMethod, ref

from torch.optim import Optimizer

from shardwise.engine.shown import Shown
from shardwise.errors import ShardwiseError
from shardwise.states.optimizer_copy import inner_optimizers


def ask_of_state(
    optimizer: Optimizer, shown: Shown, cut: Mapping[int, str], has: str, wait: Callable[[], None] | None
) -> None:
    """Guard an optimizer's state. `cut` names the parameters for which it holds something else: `has` says what."""
    before = optimizer.state
    asked = AskedState(before, shown, cut, has, wait)
    for one in (optimizer, *inner_optimizers(optimizer)):  # A wrapper shares the state of what it wraps.
        if one.state is before:
            one.state = asked


class AskedState(defaultdict[Any, Any]):
    """The same entries. Between steps, access by a parameter that is not a key raises."""

    def __init__(
        self, state: Mapping[Any, Any], shown: Shown, cut: Mapping[int, str], has: str,
        wait: Callable[[], None] | None,
    ) -> None:  # fmt: skip
        super().__init__(dict, state)
        self._shown, self._cut, self._has, self._thread = ref(shown), cut, has, get_ident()
        self._wait = None if wait is None else WeakMethod(wait)

    def _look(self, *keys: Any) -> None:
        shown = self._shown()
        if shown is None or not shown.is_idle or get_ident() != self._thread:
            return
        for key in keys:
            if id(key) in self._cut:
                raise ShardwiseError(
                    f"state[{self._cut[id(key)]}] of this optimizer is asked for, and there is none:"
                    f" it has {self._has}",
                    remedy="engine.optimizer_state_dict() on every rank, which has all of it by names, and"
                    " engine.load_optimizer_state_dict(state); optimizer.state.clear() forgets all of it",
                )
        wait = None if self._wait is None else self._wait()
        if wait is not None:
            wait()

    def __getitem__(self, key: Any) -> Any:
        self._look(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._look(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: Any) -> None:
        self._look(key)
        super().__delitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._look(key)
        return super().__contains__(key)

    def __iter__(self) -> Iterator[Any]:
        self._look()
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        self._look(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._look(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._look(key)
        return super().setdefault(key, default)

    def keys(self) -> Any:
        self._look()
        return super().keys()

    def values(self) -> Any:
        self._look()
        return super().values()

    def items(self) -> Any:
        self._look()
        return super().items()

    def clear(self) -> None:
        self._look()
        super().clear()

    def __reduce__(self) -> Any:
        """Let copies and files have a plain dictionary."""
        return defaultdict, (dict,), None, None, iter(list(self.items()))
