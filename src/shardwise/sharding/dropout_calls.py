"""Which call of a forward this is, of a dropout that is called several times.

    forward                       a call                        its name
    layer, layer                  the second of layer.drop      layer.drop@1
    on a stage behind another     the first that it has         layer.drop@1, as the other stage has @0
    run again for its backward    the same                      the same

What a plan recomputes begins to count where it began (`keep`). A checkpoint of the module's own is known by what torch
keeps of it: where it began is noted in its first run.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from shardwise.torch_private import backward_id, checkpoint_frame, checkpoint_here


class DropoutCalls:
    """Counts the calls of one forward, by name."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        #: For each checkpoint, how many calls were before the first inside of it.
        self._began: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()
        #: For each second run of one, what it has come to.
        self._again: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()

    def begin(self, before: Mapping[str, int]) -> None:
        """A forward begins. Stages before it had so many calls."""
        self._counts = dict(before)

    def keep(self) -> Callable[[], None]:
        """What has calls counted on from here."""
        then = dict(self._counts)
        return lambda: self.begin(then)

    def name_next(self, name: str) -> str:
        """The name of this call: that of the first is the layer's own."""
        hook = checkpoint_here()
        if hook is not None:
            frame, is_again = checkpoint_frame(hook)
            if frame is None:
                return name  # Nobody could tell it from others when it is run again.
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
