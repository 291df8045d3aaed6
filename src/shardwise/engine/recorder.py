"""Record steps: exchange the spans of each process's ranks with all processes, on one clock."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor

from shardwise.execution.collector import StreamCollector
from shardwise.execution.interpreter import Interpreter
from shardwise.execution.recording import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    RankTrace,
    Recording,
    clock_of,
    memory_by_owner,
)
from shardwise.ranks.collectives import Group
from shardwise.ranks.collectives import Traffic as GroupTraffic
from shardwise.ranks.wires import Wires
from shardwise.schedule.garbage import collection_paused
from shardwise.schedule.schedule import Schedule
from shardwise.stages.activation_bytes import KeptBytes
from shardwise.states.data_parallel import DataParallel
from shardwise.states.host import Host
from shardwise.trace.activities import Activity
from shardwise.trace.events import Trace, Traffic

#: The purpose of each collective between replicas.
_OF_REPLICAS = {
    "all_reduce": "a sum of gradients",
    "reduce_scatter": "a sum of gradients",
    "all_gather": "a gather of parameters",
}


class Recorder:
    """Records steps of an engine. `sent` counts messages and bytes to each rank of the pipeline.

    `trace` is the trace of the last recorded step.
    """

    def __init__(
        self,
        schedule: Schedule,
        wires: Wires,
        interpreters: Sequence[Interpreter],
        *,
        sent: dict[int, list[int]],
        data: DataParallel,
        host: Host | None,
        held: Sequence[Tensor],
    ) -> None:
        self._schedule, self._wires, self._interpreters, self._sent = schedule, wires, interpreters, sent
        self._data, self._host, self._held = data, host, held
        self._recording: Recording | None = None
        self._trace: Trace | None = None
        #: The bytes that forwards keep, for batches of each signature.
        self._kept: dict[Hashable, KeptBytes] = {}
        self._sent_before: list[tuple[Group, GroupTraffic]] = []

    @property
    def trace(self) -> Trace | None:
        """The trace of all ranks of the last recorded step."""
        if self._recording is not None:
            self._trace, self._recording = self._recording.trace(), None
        return self._trace

    def start(self) -> Recording:
        """Begin to record a step."""
        return Recording(self._schedule, self._wires.mesh.pipelines, clock=clock_of(self._held))

    @contextmanager
    def listening(self, recording: Recording | None, signature: Hashable) -> Iterator[None]:
        """Connect a recording with the inside of instructions; count the bytes that forwards keep, if still unknown."""
        if recording is None:
            yield
            return
        watch, groups, of_replicas = self._wires.watch, self._groups(), set(map(id, self._replicas()))
        self._sent_before = [(each, each.traffic.copy()) for each in groups]
        self._sent.clear()
        try:
            for interpreter in self._interpreters:
                interpreter.note_again = recording.note_again
                # Ranks that take turns in one process record no bytes.
                counts = len(self._interpreters) == 1
                interpreter.kept_bytes = self._kept.setdefault(signature, {}) if counts else None
            if watch is not None:
                watch.note, watch.note_beside = recording.note_wait, recording.note_beside
            for group in groups:
                assert group.handle is not None, "one rank alone waits for nobody"
                among = " ".join(map(str, dist.get_process_group_ranks(group.handle)))
                group.note = partial(recording.note_collective, among)
                group.traffic.heard = partial(_launched, recording, among, is_of_replicas=id(group) in of_replicas)
            yield
        finally:
            for group in groups:
                group.note = group.traffic.heard = None
            for interpreter in self._interpreters:
                interpreter.note_again = interpreter.kept_bytes = None
            if watch is not None:
                watch.note = watch.note_beside = None

    def end(
        self,
        recording: Recording,
        signature: Hashable,
        *,
        step: tuple[float, float],
        begin: float,
        data_wait: float,
        streams: StreamCollector | None = None,
    ) -> None:
        """End a recorded step: exchange the spans with all processes. `step` is the start and end of its update."""
        for rank in self._wires.ranks:
            recording.note_step(rank, *step)
        # Before `settle`, so by the host's clock: an activity is assigned to an instruction by its launch time.
        handed_over = recording.ran_by(self._wires.ranks[0])
        if streams is not None:
            streams.stop()
        recording.settle()
        # So many small objects at once would trigger garbage collections over all of torch's objects.
        with self._wires.told_to_all(), collection_paused():
            seen = [] if streams is None else streams.activities(self._wires.rank, handed_over, recording.launches)
            self._share(recording, (begin, step[1]), data_wait, self._kept.get(signature, {}), seen)
        self._recording = recording

    def _share(
        self,
        recording: Recording,
        window: tuple[float, float],
        data_wait: float,
        kept: KeptBytes,
        seen: Sequence[Activity],
    ) -> None:
        ranks = self._wires.ranks
        if len(ranks) > 1:
            # Ranks of one process take turns, so they have no window of their own.
            for rank in ranks:
                recording.take(rank, recording.told_by(rank))
            return
        rank, begin = self._wires.rank, window[0] - data_wait
        held = memory_by_owner(rank, recording.ran_by(ranks[0]), begin=begin, state=self._state_bytes(), kept=kept)
        sent = self._traffic(rank, recording)
        mine = recording.told_by(ranks[0], window, data_wait=data_wait, holdings=held, traffic=sent, activities=seen)
        for other, told in enumerate(self._wires.gather(mine.by_clock(self._wires.clock_correction()).packed())):
            recording.take(other, RankTrace.unpacked(told))

    def _traffic(self, rank: int, recording: Recording) -> Iterator[Traffic]:
        """Yield the traffic of this rank in the step."""
        pipeline = recording.pipeline_of(rank)
        for target, (num_messages, num_bytes) in self._sent.items():
            yield Traffic(rank, pipeline[target], "values", num_messages, num_bytes)
        for group, before in self._sent_before:
            for kind, count in (group.traffic.calls - before.calls).items():
                yield Traffic(rank, None, kind, count, group.traffic.bytes[kind] - before.bytes[kind])

    def _groups(self) -> list[Group]:
        """Return all groups that this rank communicates in, except its pipeline."""
        every = [*self._wires.mesh.groups.values(), *self._replicas()]
        return list({id(each): each for each in every if each.handle is not None}.values())

    def _replicas(self) -> list[Group]:
        """Return the groups in which gradients are reduced and parameters gathered."""
        pairs = [bucket.key.replicas for bucket in self._data.buckets]
        return [each for pair in pairs for each in (pair.shard, pair.copies)]

    def _state_bytes(self) -> dict[str, int]:
        """Return the bytes of model state that this process holds on its device, by owner."""
        held = self._data.held()
        in_buckets = {id(each) for bucket in self._data.buckets for each in bucket.weights.parameters}
        others = sum(each.nbytes for each in self._held if id(each) not in in_buckets)
        on_host = 0 if self._host is None or self._host.states is None else self._host.states.num_bytes
        return {PARAMETERS: held.parameters + others, GRADIENTS: held.gradients, OPTIMIZER: held.optimizer - on_host}


def _launched(recording: Recording, among: str, kind: str, *, is_of_replicas: bool) -> None:
    """Record a launch. Collectives between replicas have a purpose (gradients, parameters); others only their kind."""
    recording.note_launch(among, _OF_REPLICAS.get(kind) if is_of_replicas else None, kind)
