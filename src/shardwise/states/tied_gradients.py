"""Parameters that several ranks hold: their gradients are summed where the schedule says so."""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn

from shardwise.ranks.faults import Watch
from shardwise.schedule.instruction import Instruction
from shardwise.schedule.placement import Placement
from shardwise.stages.stage import Split


def names_of_ties(placement: Placement, split: Split) -> list[tuple[str, ...]]:
    """For each tie of a placement, the parameters that its stages share.

    A tie that is one parameter's (a head tied to its embedding) has that parameter; a tie of whole copies of a stage
    has all others of that stage.
    """
    count, copies = split.num_stages, len(placement.pipes)
    shared: dict[tuple[int, ...], list[str]] = {}
    for name, stages in split.ties.items():
        group = tuple(sorted(stage + copy * count for stage in stages for copy in range(copies)))
        shared.setdefault(group, []).append(name)
    found = []
    for tie in placement.ties:
        if tie in shared:
            found.append(tuple(shared[tie]))
        else:
            stage = split.stages[tie[0] % count]
            names = stage.parameters if stage is not None else ()
            found.append(tuple(name for name in names if name not in split.ties))
    return found


class TiedGradients:
    """Sums gradients over the ranks that hold a parameter, once for each tie and step.

    `parameter_of(name, step)` is the parameter whose `grad` has the gradients of a step.
    """

    def __init__(
        self,
        rank: int,
        placement: Placement,
        split: Split,
        parameter_of: Callable[[str, int], nn.Parameter],
        watch: Watch,
    ) -> None:
        # What is frozen has no gradient to sum.
        stages = [stage for stage in split.stages if stage is not None]
        trained = {name for stage in stages for name, each in stage.parameters.items() if each.requires_grad}
        self._names = [tuple(name for name in names if name in trained) for names in names_of_ties(placement, split)]
        self._parameter_of, self._watch = parameter_of, watch
        self._groups: list[dist.ProcessGroup | None] = []
        self._partners: list[int] = []
        #: Parameters that another rank counts, where all are counted once.
        self.counted_elsewhere: set[str] = set()
        for number, tie in enumerate(placement.ties):
            ranks = sorted({placement.ranks[stage] for stage in tie})
            # Every rank makes every group, in the same order, as `torch.distributed` wants it.
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            self._groups.append(group if rank in ranks else None)
            if group is not None and rank in ranks:
                watch.guard(group)
            self._partners.append(next((other for other in ranks if other != rank), rank))
            if rank in ranks[1:]:
                self.counted_elsewhere.update(self._names[number])
        # By step and tie.
        self._under_way: dict[tuple[int, int], list[dist.Work]] = {}

    def reduce(self, instruction: Instruction) -> None:
        """Start summing what the tie of a REDUCE names: the others may come to it much later.

        The stages of one rank share the parameter itself, so one sum serves them all.
        """
        step, tie = instruction.microbatch, instruction.peer
        if tie is None or (step, tie) in self._under_way or self._groups[tie] is None:
            return
        gradients = [_gradient(self._parameter_of(name, step)) for name in self._names[tie]]
        works = [dist.all_reduce(each, group=self._groups[tie], async_op=True) for each in gradients]
        self._under_way[step, tie] = [work for work in works if work is not None]

    def finish(self, step: int = 0) -> None:
        """Wait until all sums of a step are there."""
        for key in [each for each in self._under_way if each[0] == step]:
            for work in self._under_way.pop(key):
                self._watch.wait(work, f"the reduction of tie {key[1]}", self._partners[key[1]])

    def close(self) -> None:
        """Let go of the groups. They are not destroyed."""
        self._groups.clear()


def _gradient(parameter: nn.Parameter) -> Tensor:
    """A rank that has used a shared parameter nowhere in this step still takes part in its sum."""
    if parameter.grad is None:
        parameter.grad = parameter.detach().new_zeros(parameter.shape)
    return parameter.grad
