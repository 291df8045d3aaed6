"""The dependency rule: what a task waits for, and what becomes of the copies that it uses.

It follows from the data (`data.py`), copy by copy at the task's own place:

    it reads    the copy's writer: the task or the transfer that made it          read after write
    it writes   that, and whoever still copies from there                         write after write, after read

Tasks of one place run in one stream, so among themselves they are in order anyway. A writer at another place has a
buffer of its own to write to: it waits for no reader of this one.
"""

from collections.abc import Iterable

from shardwise.dataflow.data import Copy, Data
from shardwise.dataflow.streams import Event, Stream


def add_dependencies(copy: Copy, stream: Stream, after: list[Event], writes: bool, in_order_too: bool = False) -> None:
    """Add what a task of a stream waits for before it reads or writes a copy.

    `in_order_too`: also a writer of the same stream, where a report wants to know what the task depends on.
    """
    event = copy.writer
    if event is not None and (in_order_too or event.stream is not stream):
        after.append(event)
    if writes and copy.copied:
        after += copy.copied


def note_task(
    event: Event, place: int, reads: Iterable[Copy], writes: Iterable[Data], changed: dict[int, Data]
) -> None:
    """Note that a task, which ends with an event, reads and writes: a written copy is the only valid one.

    `changed` gets the data of users' tensors that have a new value elsewhere.
    """
    for copy in reads:
        copy.reader = event
    for data in writes:
        for each in data.copies:
            if each is not None:
                if each.place == place:
                    each.written(event)
                else:
                    each.valid = False
        if data.is_imported:
            changed[data.number] = data
