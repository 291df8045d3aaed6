"""Weights whose state is on the host, updated while the last backwards of a step go on and while the next forward does.

    compute   ... backward of 3 | of 2 | of 1 | of 0 | forward of 0 | of 1 | of 2 | of 3
    update                        3      2      1      0

A gradient is final when the last backward of its stage has added to it. Then nothing is waited for but what the whole
batch decides: the number that its sums are divided by, and whether its loss is finite. Both are known when the last
forward has been run, on all ranks. Where gradients are clipped their norm decides too, and updates begin at the end.

A unit's forward waits for its own weights and for no others. Gradients of weights that live on the host go there from
every backward, and are divided on the way out of the last.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ShardwiseError
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.schedule import Schedule
from shardwise.stages.stage import Call, Stage, Wrappable
from shardwise.states.tiers.host_states import HostStates
from shardwise.states.tiers.host_weights import HostWeights
from shardwise.states.unit_prefetch import named_in

_MAKES_GRADIENTS = (Kind.B, Kind.W)

#: What a step's sums of gradients are divided by, as soon as that is known and they are to be used at all. It is asked
#: for again and again, for ranks only know of each other's losses if all of them ask in time.
FindCount = Callable[[], float | None]


class Early:
    """Updates of one process, which runs some ranks of a pipeline: `stages` are theirs, by number in the schedule.

    `apart` are the names of parameters whose gradients are added to after the backwards. `waits`: updates wait for the
    step's end, for there is more to be known.
    """

    def __init__(
        self,
        states: HostStates,
        weights: HostWeights | None,
        module: nn.Module,
        stages: Mapping[int, Stage],
        schedule: Schedule,
        *,
        apart: Collection[str] = (),
        find_count: FindCount,
        waits: bool = False,
    ) -> None:
        self._states, self._find_count, self._waits = states, find_count, waits
        self._weights = weights
        lodged = {} if weights is None else weights.weights
        #: Parameters whose gradients have been divided.
        self.divided: set[nn.Parameter] = set()
        self._last = _last_backwards(schedule)
        self._closing: int | None = None
        self._count: float | None = None
        #: Those that wait for the count.
        self._final: dict[nn.Parameter, None] = {}
        self._loose = {number: self._wait_in_units(stage, module) for number, stage in stages.items()}
        self._handles: list[RemovableHandle] = []
        for number, stage in stages.items():
            for name, parameter in stage.parameters.items():
                is_early = not waits and parameter in states.weights and name not in apart
                if parameter.requires_grad and (is_early or parameter in lodged):
                    arrived = partial(self._arrived, number, name)
                    handle = parameter.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
                    self._handles.append(handle)

    def begin_step(self) -> None:
        """Nothing is final yet."""
        self._closing = self._count = None
        self._final.clear()
        self.divided.clear()

    def before(self, instruction: Instruction) -> None:
        """Something is about to be computed."""
        self._look()
        if self._weights is not None:
            self._weights.before(instruction)
        if instruction.kind is Kind.F:
            self._states.follow(self._loose[instruction.stage])
        elif instruction.kind in _MAKES_GRADIENTS:
            self._closing = instruction.stage if instruction in self._last else None

    def close(self) -> None:
        """Let go of the parameters' hooks."""
        for handle in self._handles:
            handle.remove()

    def _wait_in_units(self, stage: Stage, module: nn.Module) -> list[nn.Parameter]:
        """Have each unit of a stage wait for its weights, and return those that are used outside of units."""
        in_units: set[nn.Parameter] = set()
        in_glue = named_in(module, stage.in_glue) if isinstance(stage, Wrappable) else set()

        def around(unit: str, call: Call) -> Call:
            own = [each for each in module.get_submodule(unit).parameters() if each in self._states.weights]
            in_units.update(own)

            def run(*args: Any, **kwargs: Any) -> Any:
                self._states.follow(own)
                return call(*args, **kwargs)

            return run if own else call

        if isinstance(stage, Wrappable):
            stage.wrap(around)
        return [each for each in stage.parameters.values() if each not in in_units or each in in_glue]

    def _look(self) -> None:
        if self._count is None and self._handles:
            self._count = self._find_count()

    @torch.no_grad()
    def _arrived(self, stage: int, name: str, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter), "a hook of a parameter"
        is_offloaded = self._weights is not None and parameter in self._weights.weights
        if stage != self._closing:
            if self._weights is not None and is_offloaded:
                self._weights.send(parameter)
            return
        if parameter in self.divided or parameter in self._final:
            raise ShardwiseError(
                f"the gradient of {name} was added to after it was complete: a backward inside of another has made it",
                remedy="torch.utils.checkpoint with use_reentrant=False, or no offload",
            )
        self._look()
        if self._weights is not None and is_offloaded:
            self._weights.send(parameter, self._count, measures=self._waits)
            if self._count is not None:
                self._update([parameter])
            return
        self._final[parameter] = None
        if self._count is not None:
            for each in self._final:
                assert each.grad is not None, "it has arrived"
                each.grad.div_(self._count)
            self._update(list(self._final))
            self._final.clear()

    def _update(self, parameters: list[nn.Parameter]) -> None:
        """These gradients are divided, and perhaps that is all."""
        self.divided.update(parameters)
        if not self._waits:
            self._states.ready(parameters)


def _last_backwards(schedule: Schedule) -> frozenset[Instruction]:
    """The last of each stage: of a step that has one after the other, not of one that never ends."""
    last: dict[int, Instruction] = {}
    for order in schedule.orders:
        for part in [part for instruction in order for part in instruction.parts]:
            if part.kind in _MAKES_GRADIENTS:
                last[part.stage] = part
    return frozenset(last.values())


def can_be_early(schedule: Schedule) -> bool:
    """Whether the gradients of a step are final with its last backwards: no other copy of the model adds to them."""
    return schedule.staleness == 0 and len(schedule.placement.pipes) == 1


def stages_here(schedule: Schedule, ranks: Sequence[int], stages: Sequence[Stage | None]) -> dict[int, Stage]:
    """The stages of some ranks, by number in the schedule."""
    every = [number for rank in ranks for number in schedule.placement.stages[rank]]
    found = {number: stages[number % len(stages)] for number in every}
    return {number: stage for number, stage in found.items() if stage is not None}
