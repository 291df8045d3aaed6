"""Kernels launched at once: all of their data are at their GPU already, and nothing is to be evicted or noted.

It is what `Dispatcher.issue` does, by the same rule (`dependencies.py`), without what it would find nothing to do for:
to submit a small kernel takes as long as the kernel itself.
"""

import sys
from collections.abc import Sequence
from typing import Any

from shardwise.dataflow.cuda import CudaStream
from shardwise.dataflow.data import Copy, Data, Keeper
from shardwise.dataflow.dependencies import add_dependencies, note_task
from shardwise.dataflow.launch import Launch
from shardwise.dataflow.mover import Mover
from shardwise.dataflow.place import Place
from shardwise.dataflow.streams import Event
from shardwise.dataflow.task_errors import PLAIN, blame_task


class DirectLaunches:
    """The GPUs of a machine at which kernels may be launched at once."""

    def __init__(self, keeper: Keeper, places: Sequence[Place], mover: Mover, changed: dict[int, Data]) -> None:
        self._keeper, self._mover, self._changed = keeper, mover, changed
        self._streams = {
            place.name: (place.index, place.compute)
            for place in places
            if isinstance(place.compute, CudaStream) and place.memory.budget_bytes is None and mover.journal is None
        }

    def launch(self, launch: Launch, args: tuple[Any, ...], options: dict[str, Any], grid: Any, name: str) -> bool:
        """Launch a kernel if that can be done at once, and say whether it was. The caller's caller submitted it."""
        found = self._streams.get(name)
        if found is None or grid is None or self._mover.tape is not None:
            return False
        stores = launch.stores
        if len(args) > len(stores):
            return False
        index, stream = found
        tensors: list[Any] = list(args)
        after: list[Event] = []
        read: list[Copy] = []
        written: list[Data] = []
        for position, value in enumerate(args):
            if type(value) is not Data:
                if type(value) not in PLAIN:
                    return False
                continue
            copy = value.copies[index]
            if copy is None or not copy.valid or copy.imported is not None or value.keeper is not self._keeper:
                return False
            if stores[position]:
                if value.unwritable is not None:
                    return False
                written.append(value)
            else:
                read.append(copy)
            add_dependencies(copy, stream, after, stores[position])
            tensors[position] = copy.tensor
        for option in options.values():
            if type(option) is Data:
                return False
        if not stream.can_issue(after):
            return False
        self._mover.num_changes += 1
        try:
            event = stream.launch(launch.run, tensors, options, grid, after)
        except Exception as error:
            frame = sys._getframe(2)
            raise blame_task(launch.kernel, launch.kernel, name, frame.f_code, frame.f_lineno, error) from error
        note_task(event, index, read, written, self._changed)
        return True
