"""The dependencies of instructions: what must have finished before one may start, for every interpreter of schedules.

    F of stage s        the F of each stage whose value it reads; where that stage lies on another rank, the RECV_F;
                        the STEP that made its weights
    I, B                its own F (and its RELOAD, if it was offloaded); the I of each stage that read its value, or
                        the RECV_B
    W                   its I                       (B makes both I and W)
    SEND_F, SEND_B      the F, the I
    RECV_F, RECV_B      the matching SEND
    REDUCE              each W of its stage in the step; of a tie, each W of every tied stage
    STEP                each W of its stage in the step, and each REDUCE
    OFFLOAD, RELOAD     the F, the OFFLOAD
    anything computed   the last GATHER of its stage before it on its rank

On a rank, the list itself is the order: computations run one after the other. An instruction that runs beside
computation is issued when the computation before it has finished.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from shardwise.schedule.instruction import BACKWARD, Instruction, Kind
from shardwise.schedule.schedule import Schedule

#: A result without its microbatch: kind, stage, and the peer of a transfer or the tie of a reduction.
Made = tuple[Kind, int, int | None]

_USES_PARAMETERS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
_OF_A_STEP = frozenset({Kind.REDUCE, Kind.STEP})


class Alike(NamedTuple):
    """Nodes that differ only in their microbatch, and the microbatch of each."""

    nodes: list[int]
    microbatches: list[int]


class Needs:
    """The dependency graph of one schedule. Its nodes are the instructions, numbered rank by rank.

    A schedule may hold millions of instructions, but they are a few hundred, repeated for every microbatch. So
    everything that does not depend on the microbatch is computed once for all nodes that differ only in it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.nodes: list[Instruction] = [instruction for order in schedule.orders for instruction in order]
        self.first_node: list[int] = []
        self.rank: list[int] = []
        for rank, order in enumerate(schedule.orders):
            self.first_node.append(len(self.rank))
            self.rank.extend([rank] * len(order))
        #: Instructions that occur in the schedule more than once: (the later node, the earlier node).
        self.repeated: list[tuple[int, int]] = []
        #: Dependencies that no instruction provides: (node, the instruction that it needs).
        self.missing: list[tuple[int, Instruction]] = []
        #: Nodes grouped by their result without its microbatch. A pair is in `alike` by its forward, in `beside` by its
        #: backward.
        self.alike: dict[Made, Alike] = defaultdict(lambda: Alike([], []))
        self.beside: dict[Made, Alike] = defaultdict(lambda: Alike([], []))
        for node, (kind, stage, microbatch, peer, back) in enumerate(self.nodes):
            nodes, microbatches = self.alike[kind, stage, peer]
            nodes.append(node)
            microbatches.append(microbatch)
            if back is not None:
                nodes, microbatches = self.beside[back.kind, back.stage, back.peer]
                nodes.append(node)
                microbatches.append(back.microbatch)
        #: For each result, the node that makes it for each microbatch.
        self._makers: dict[Made, dict[int, int]] = {}
        self._find_makers()
        #: For each node, the nodes that must have finished before it starts.
        self.before: list[tuple[int, ...]] = [()] * len(self.nodes)
        self._resolve()

    def find(self, kind: Kind, stage: int, microbatch: int, peer: int | None = None) -> int | None:
        """Return the node that makes this result; a `B` makes those of `I` and `W`."""
        makers = self._makers.get((kind, stage, peer))
        return None if makers is None else makers.get(microbatch)

    def _find_makers(self) -> None:
        claims: dict[Made, Alike] = defaultdict(lambda: Alike([], []))
        for (kind, stage, peer), (nodes, microbatches) in chain(self.alike.items(), self.beside.items()):
            for made in _made_by(kind, stage, peer):
                claims[made].nodes.extend(nodes)
                claims[made].microbatches.extend(microbatches)
        for made, (nodes, microbatches) in claims.items():
            self._makers[made] = dict(zip(microbatches, nodes, strict=True))
            if len(self._makers[made]) < len(nodes):
                self._settle(made, claims[made])
        self.repeated.sort(key=itemgetter(0))

    def _settle(self, made: Made, claims: Alike) -> None:
        """If several nodes make the same result, take the first as its maker and note the others as repeated."""
        last_to_first = sorted(zip(claims.nodes, claims.microbatches, strict=True), reverse=True)
        makers = self._makers[made] = {microbatch: node for node, microbatch in last_to_first}
        earliest = [(node, makers[microbatch]) for node, microbatch in last_to_first]
        self.repeated += [(node, earlier) for node, earlier in earliest if earlier != node]

    def _resolve(self) -> None:
        """Look up the makers of all that each node needs."""
        for (kind, stage, peer), alike in chain(self.alike.items(), self.beside.items()):
            if kind in _OF_A_STEP:
                for node in alike.nodes:
                    self._add(node, self._made_for_step(self.nodes[node]))
            else:
                self._resolve_alike(alike, self._made_for(kind, stage, peer))
        kinds = {kind for kind, _, _ in self.alike}
        if self.schedule.num_steps > 1 or not kinds.isdisjoint({Kind.GATHER, Kind.OFFLOAD}):
            self._resolve_weights()
        self.missing.sort(key=itemgetter(0))

    def _resolve_alike(self, alike: Alike, wanted: Sequence[Made]) -> None:
        """Look up the same needs for many nodes at once; one by one only if something is missing."""
        nodes, microbatches = alike
        try:
            columns = [map(self._makers[made].__getitem__, microbatches) for made in wanted]
            found = list(zip(*columns, strict=True))
        except KeyError:
            for node, microbatch in zip(nodes, microbatches, strict=True):
                self._add(node, [(made, microbatch) for made in wanted])
        else:
            for node, makers in zip(nodes, found, strict=bool(wanted)):
                self.before[node] += makers if node not in makers else tuple(each for each in makers if each != node)

    def _add(self, node: int, wanted: Iterable[tuple[Made, int]]) -> None:
        """Let a node wait for results, each of a microbatch. A pair does not wait for itself."""
        found = []
        for (kind, stage, peer), microbatch in wanted:
            maker = self.find(kind, stage, microbatch, peer)
            if maker is None:
                self.missing.append((node, Instruction(kind, stage, microbatch, peer)))
            elif maker != node:
                found.append(maker)
        self.before[node] += tuple(found)

    def _made_for(self, kind: Kind, stage: int, peer: int | None) -> list[Made]:
        """Return the results of its own microbatch that an instruction needs."""
        placement = self.schedule.placement
        if kind is Kind.F:
            return [
                (Kind.RECV_F, stage, source) if self._is_received(source, stage) else (Kind.F, source, None)
                for source in placement.sources[stage]
            ]
        if kind in BACKWARD:
            return [(Kind.F, stage, None)] + [
                (Kind.RECV_B, stage, target) if self._is_received(target, stage) else (Kind.I, target, None)
                for target in placement.targets[stage]
            ]
        if kind is Kind.W or kind is Kind.SEND_B:
            return [(Kind.I, stage, None)]
        if kind is Kind.SEND_F or kind is Kind.OFFLOAD:
            return [(Kind.F, stage, None)]
        if kind is Kind.RELOAD:
            return [(Kind.OFFLOAD, stage, None)]
        if kind is Kind.RECV_F or kind is Kind.RECV_B:
            assert peer is not None, f"a {kind} of stage {stage} names no peer"
            return [(Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B, peer, stage)]
        return []

    def _is_received(self, maker: int, reader: int) -> bool:
        ranks = self.schedule.placement.ranks
        return self.schedule.communicates and ranks[maker] != ranks[reader]

    def _made_for_step(self, instruction: Instruction) -> list[tuple[Made, int]]:
        """Return the results that a REDUCE or STEP needs: all gradients of its step; for a STEP also the reductions."""
        kind, stage, step, tie, _ = instruction
        placement, count = self.schedule.placement, self.schedule.num_microbatches
        wanted: list[tuple[Made, int]] = [
            ((Kind.W, member, None), microbatch)
            for member in ((stage,) if tie is None else placement.ties[tie])
            for microbatch in range(step * count, (step + 1) * count)
            if member in placement.pipe(microbatch)
        ]
        if kind is Kind.STEP:
            reductions: list[Made] = [(Kind.REDUCE, stage, tie) for tie in (None, *range(len(placement.ties)))]
            wanted += [(made, step) for made in reductions if step in self._makers.get(made, ())]
        return wanted

    def _resolve_weights(self) -> None:
        """Add the other needs of a computation: its weights (gathered, or stepped), and reloads of offloaded values."""
        gathered: dict[int, int] = {}
        for node, instruction in enumerate(self.nodes):
            if instruction.kind is Kind.GATHER:
                gathered[instruction.stage] = node
            for kind, stage, microbatch, _, _ in instruction.parts:
                if kind in _USES_PARAMETERS and stage in gathered:
                    self.before[node] += (gathered[stage],)
                version = self.schedule.step_of(microbatch) - 1 - self.schedule.staleness
                if kind is Kind.F and version >= 0:
                    self._add(node, [((Kind.STEP, stage, None), version)])
                if kind in BACKWARD and self.find(Kind.OFFLOAD, stage, microbatch) is not None:
                    self._add(node, [((Kind.RELOAD, stage, None), microbatch)])


def _made_by(kind: Kind, stage: int, peer: int | None) -> tuple[Made, ...]:
    """Return the results of an instruction: a full backward makes both gradients."""
    return ((Kind.I, stage, None), (Kind.W, stage, None)) if kind is Kind.B else ((kind, stage, peer),)
