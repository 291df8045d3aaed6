"""Number the calls of a dropout within one forward, where it is called several times.

    forward                       a call                        its name
    layer, layer                  the second of layer.drop      layer.drop@1
    on a stage behind another     the first that it has         layer.drop@1, as the other stage has @0
    run again for its backward    the same                      the same

A forward recomputed by a plan starts again from the counts of its first run (`keep`). A checkpoint of the module's own
is identified by torch's frame object for it; the counts at its start are recorded in its first run.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from shardwise.torch_private import backward_id, checkpoint_frame, checkpoint_here


class DropoutCalls:
    """Counts the calls of one forward, by name."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        #: For each checkpoint, by name, how many calls preceded the first inside it.
        self._began: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()
        #: For each rerun of a checkpoint, the names that it has reached.
        self._again: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()

    def begin(self, before: Mapping[str, int]) -> None:
        """Begin a forward. `before` are the counts of calls in earlier stages."""
        self._counts = dict(before)

    def keep(self) -> Callable[[], None]:
        """Return a function that resets the counts to their present values."""
        then = dict(self._counts)
        return lambda: self.begin(then)

    def name_next(self, name: str) -> str:
        """Return the name of this call. The first call has the layer's own name."""
        hook = checkpoint_here()
        if hook is not None:
            frame, is_again = checkpoint_frame(hook)
            if frame is None:
                return name  # A rerun of it could not be matched with its first run.
            began = self._began.setdefault(frame, {})
            if not is_again:
                began.setdefault(name, self._counts.get(name, 0))
            elif name not in (seen := self._again.setdefault(hook, set())):
                seen.add(name)
                self._counts[name] = began.get(name, 0)
        elif backward_id() >= 0:
            return name
        count = self._counts.get(name, 0)
        self._counts[name] = count + 1
        return f"{name}@{count}" if count else name
