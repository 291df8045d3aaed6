"""What must have finished before an instruction may start: one relation, for every interpreter of the language.

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

Order on a rank is the list itself: computation runs one after the other, and what runs beside it is issued when the
computation before it has finished.
"""

from shardwise.schedule.instruction import BACKWARD, Instruction, Kind
from shardwise.schedule.schedule import Schedule

#: What is made, without its microbatch: kind, stage, and the peer of a transfer or the tie of a reduction.
Made = tuple[Kind, int, int | None]

_USES_PARAMETERS = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
_OF_A_STEP = frozenset({Kind.REDUCE, Kind.STEP})


class Needs:
    """The relation, resolved for one schedule. Its nodes are the instructions, numbered rank by rank."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.nodes: list[Instruction] = [instruction for order in schedule.orders for instruction in order]
        self.first_node: list[int] = []
        self.rank: list[int] = []
        for rank, order in enumerate(schedule.orders):
            self.first_node.append(len(self.rank))
            self.rank.extend([rank] * len(order))
        #: Instructions that stand in the schedule more than once: (the later node, the earlier node).
        self.repeated: list[tuple[int, int]] = []
        #: What is needed and made by nobody: (node, the instruction that it needs).
        self.missing: list[tuple[int, Instruction]] = []
        # Makers are looked up by one whole number: that of what is made, times the microbatches, plus the microbatch.
        self._numbers: dict[Made, int] = {}
        self._stride = 1 + max(
            (part.microbatch for node in self.nodes for part in (node, node.beside) if part is not None), default=0
        )
        self._makers: dict[int, int] = {}
        self._find_makers()
        #: For each node, the nodes that must have finished before it starts.
        self.before: list[list[int]] = self._resolve()

    def find(self, kind: Kind, stage: int, microbatch: int, peer: int | None = None) -> int | None:
        """The node that does this; a `B` does both `I` and `W`."""
        return self._makers.get(self._number((kind, stage, peer)) + microbatch)

    def _number(self, made: Made) -> int:
        return self._numbers.setdefault(made, len(self._numbers) * self._stride)

    def _find_makers(self) -> None:
        makers, number = self._makers, self._number
        for node, (kind, stage, microbatch, peer, beside) in enumerate(self.nodes):
            if kind is Kind.B:
                self._add(number((Kind.I, stage, None)) + microbatch, node)
                self._add(number((Kind.W, stage, None)) + microbatch, node)
                continue
            key = number((kind, stage, peer)) + microbatch
            if makers.setdefault(key, node) != node:
                self.repeated.append((node, makers[key]))
            if beside is not None:
                self._add(number((Kind.I, beside.stage, None)) + beside.microbatch, node)
                if beside.kind is Kind.B:
                    self._add(number((Kind.W, beside.stage, None)) + beside.microbatch, node)

    def _add(self, key: int, node: int) -> None:
        earlier = self._makers.setdefault(key, node)
        if earlier != node:
            self.repeated.append((node, earlier))

    def _resolve(self) -> list[list[int]]:
        """Look up who makes what each node needs; what it needs of its own microbatch is the same for each of them."""
        before: list[list[int]] = []
        makers = self._makers
        recipes: dict[Made, tuple[int, ...]] = {}
        gathered: dict[int, int] = {}
        offloads = any(kind is Kind.OFFLOAD for kind, _, _ in self._numbers)
        plain = self.schedule.num_steps == 1 and not offloads
        for node, instruction in enumerate(self.nodes):
            kind, stage, microbatch, peer, beside = instruction
            if kind in _OF_A_STEP:
                before.append(self._resolve_step(node, instruction))
                continue
            recipe = recipes.get((kind, stage, peer))
            if recipe is None:
                recipe = tuple(self._number(made) for made in self._made_for(kind, stage, peer))
                recipes[kind, stage, peer] = recipe
            found = []
            for number in recipe:
                maker = makers.get(number + microbatch)
                if maker is None:
                    self._note_missing(node, number, microbatch)
                else:
                    found.append(maker)
            if kind is Kind.GATHER:
                gathered[stage] = node
            if beside is not None:
                found += [maker for maker in self._resolve_part(node, beside) if maker != node]
            if gathered or not plain:
                found += self._resolve_weights(node, instruction, gathered)
            before.append(found)
        return before

    def _made_for(self, kind: Kind, stage: int, peer: int | None) -> list[Made]:
        """What an instruction needs of its own microbatch."""
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

    def _resolve_part(self, node: int, part: Instruction) -> list[int]:
        return self._look_up(node, self._made_for(part.kind, part.stage, part.peer), part.microbatch)

    def _resolve_weights(self, node: int, instruction: Instruction, gathered: dict[int, int]) -> list[int]:
        """What a computation needs besides its microbatch's values: its weights, and saved values that were put away."""
        found: list[int] = []
        for kind, stage, microbatch, _, _ in instruction.parts:
            if kind in _USES_PARAMETERS and stage in gathered:
                found.append(gathered[stage])
            version = self.schedule.step_of(microbatch) - 1 - self.schedule.staleness
            if kind is Kind.F and version >= 0:
                found += self._look_up(node, [(Kind.STEP, stage, None)], version)
            if kind in BACKWARD and self.find(Kind.OFFLOAD, stage, microbatch) is not None:
                found += self._look_up(node, [(Kind.RELOAD, stage, None)], microbatch)
        return found

    def _resolve_step(self, node: int, instruction: Instruction) -> list[int]:
        kind, stage, step, tie, _ = instruction
        placement, count = self.schedule.placement, self.schedule.num_microbatches
        found: list[int] = []
        for member in (stage,) if tie is None else placement.ties[tie]:
            for microbatch in range(step * count, (step + 1) * count):
                if member in placement.pipe(microbatch):
                    found += self._look_up(node, [(Kind.W, member, None)], microbatch)
        if kind is Kind.STEP:
            reductions = [self.find(Kind.REDUCE, stage, step, tie) for tie in (None, *range(len(placement.ties)))]
            found += [reduction for reduction in reductions if reduction is not None]
        return found

    def _look_up(self, node: int, wanted: list[Made], microbatch: int) -> list[int]:
        found = []
        for made in wanted:
            number = self._number(made)
            maker = self._makers.get(number + microbatch)
            if maker is None:
                self._note_missing(node, number, microbatch)
            else:
                found.append(maker)
        return found

    def _note_missing(self, node: int, number: int, microbatch: int) -> None:
        kind, stage, peer = next(made for made, known in self._numbers.items() if known == number)
        self.missing.append((node, Instruction(kind, stage, microbatch, peer)))
