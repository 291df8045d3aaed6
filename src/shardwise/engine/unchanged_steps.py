"""Try again what steps of a script's own optimizers do, if it has set something that they read.

`group["clip"] = 1.0`, `optimizer.trust = True`, a rate that was 0: what a step does to a parameter may depend on others
from then on, of which a rank may have a part only. Each kind of value is tried once.
"""

from collections.abc import Hashable

from shardwise.stages.split.script_values import find_holders_of_optimizer
from shardwise.stages.split.set_values import ValueKinds
from shardwise.states.optimizers.updates import Updates


class UnchangedSteps:
    """What a script can set of its optimizers."""

    def __init__(self, updates: Updates) -> None:
        self._updates = updates
        self._holders = [holder for each in updates.custom for holder in find_holders_of_optimizer(each)]
        self._kinds, self._tried = ValueKinds(), set[Hashable]()
        self.end()

    def check(self) -> None:
        """Refuse steps that are coupled with what was set since the last one."""
        is_new = False
        for number, (holder, was) in enumerate(zip(self._holders, self._kept, strict=True)):
            now = holder.values.read()
            for key, value in now.items() if now != was else ():
                if key not in was or was[key] != value:
                    is_new = True
                    self._kinds.note(f"{number}.{key}", was.get(key), value)
        if is_new and self._kinds.are_others and self._kinds.now not in self._tried:
            self._updates.check_steps()
            self._tried.add(self._kinds.now)

    def end(self) -> None:
        """End a step: what changed during it was changed by it."""
        self._kept = [each.values.read() for each in self._holders]
