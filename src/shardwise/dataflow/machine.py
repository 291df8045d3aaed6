"""A machine: many devices, one program. Tasks are submitted in order and run where and when their data allow.

    with Machine(["cuda:0", "cuda:1"]) as machine:
        x, y = machine.data(tensor), machine.empty((1024,))
        machine.submit(double_kernel, x, y, 1024, grid=(8,), BLOCK=128, place="cuda:1")
        print(y.get())

`submit` looks up what the task reads and writes, fetches the missing inputs, and puts the task behind its dependencies.
It does not block. The results equal those of running the tasks one after another, whatever ran in parallel.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from shardwise.dataflow.check import Checked, check
from shardwise.dataflow.choice import measure_links
from shardwise.dataflow.data import Data
from shardwise.dataflow.dispatch import Dispatcher
from shardwise.dataflow.journal import Work
from shardwise.dataflow.links import Link
from shardwise.dataflow.place import Kind, Place
from shardwise.dataflow.program import Program, record
from shardwise.dataflow.report import Report, make_report
from shardwise.dataflow.streams import Event, as_it_is
from shardwise.errors import ShardwiseError
from shardwise.trace.events import Lane


class Machine(Dispatcher):
    """All or some devices of a computer, with its host and its disk."""

    def prefetch(self, data: Data, place: str) -> Event | None:
        """Fetch a value to a place ahead of its use. Returns the event that is reached when it has arrived."""
        self._drop_forgotten()
        self._raise_failure()
        return self.mover.fetch(data, self.place(place)).writer

    def record(self, fn: Callable[[], object]) -> Program:
        """Run a function once and keep the tasks that it submits, for replay."""
        return record(self, fn)

    def check(self, fn: Callable[[], object]) -> Checked:
        """Run a function, then its tasks one by one on the first place, and compare bit for bit."""
        return check(self, fn)

    def report(self, name: str = "dataflow") -> Report:
        """Wait, and report everything since the machine was made. Needs `trace=True` or given links."""
        return make_report(self, name)

    def measure(self) -> dict[tuple[str, str], Link]:
        """Measure every link except the disk's by copying, and return the links."""
        if self.mover.reckoned is None:
            measure_links(self.mover)
        names = self.place_names
        return {(names[one], names[other]): link for (one, other), link in self.mover.routes.links.items()}

    def pinned(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a plain tensor in host memory, pinned where there is a GPU, outside of all budgets."""
        return self.imports.pinned(torch.empty(tuple(shape), dtype=dtype, device="meta"))

    def copy(
        self,
        target: Tensor,
        source: Tensor,
        *,
        to: str | None = None,
        of: str | None = None,
        after: Sequence[Event] = (),
    ) -> Event:
        """Copy one plain tensor into another on a copy stream. Both must stay alive until the event is reached.

        A tensor's place is found from its device. CPU places have no torch device of their own: name them.
        """
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ShardwiseError(
                f"{list(source.shape)} of {source.dtype} cannot be copied into {list(target.shape)} of {target.dtype}",
                remedy="two tensors of the same shape and dtype",
            )
        at, by = self._place_of(target, to), self._place_of(source, of)
        return self.mover.copy(target, at, source, by, after, "tensor")

    def mark(self, place: str) -> Event:
        """Return an event behind all compute work submitted to a place so far."""
        return self._note(place, "mark", ())

    def follow(self, place: str, event: Event) -> None:
        """Order all later compute work of a place after an event.

        The host does not wait, except where a GPU is to follow a thread, such as a host function: a GPU cannot wait
        for a thread.
        """
        found = self.place(place)
        if found.kind is Kind.GPU:
            # Work that the user puts on the GPU's stream directly comes after this only if this has been issued.
            for each in (event, found.compute.last):
                if each is not None:
                    each.stream.wait_issued(each)
        self._note(place, "follow", (event,))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _note(self, place: str, name: str, after: Sequence[Event]) -> Event:
        found = self.place(place)
        work = Work(name=name, lane=Lane.STEP, place=found.index)
        return self.mover.put(found.compute, _nothing, after, as_it_is, work)

    def _place_of(self, tensor: Tensor, name: str | None) -> Place:
        if name is not None:
            return self.place(name)
        for place in self.places:
            if place.kind is Kind.GPU and place.device == tensor.device:
                return place
        if tensor.device.type != "cpu":
            raise ShardwiseError(
                f"{tensor.device} is not a place of this machine", remedy=f'Machine(["{tensor.device}"])'
            )
        return self.host


def _nothing() -> None:
    """Do nothing: only the event matters."""
