"""Timed devices: every wait happens once, in its own instruction, and ranks run their lists in order."""

from collections import Counter

import pytest
import torch.distributed as dist

from shardwise.execution.executor import TAKES_TIME
from shardwise.execution.local import LocalExecutor
from shardwise.execution.pipeline import complete
from shardwise.execution.process import ProcessExecutor
from shardwise.ranks.faults import Watch
from shardwise.ranks.links import make_groups
from shardwise.ranks.spawn import Ranks
from shardwise.ranks.transport import ProcessTransport
from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.prices import StageTimes, stage_prices
from shardwise.schedule.schedule import Schedule
from shardwise.testing.timed import (
    Seconds,
    first_stage_waits_in_weights,
    sleep,
    square_of,
    timed_batch,
    timed_split,
)

FEW = Seconds(0.005, 0.005, 0.005)
#: What each instruction waits for; and on the first stage, which gives nobody a gradient.
WAITS = {Kind.F: "F", Kind.I: "I", Kind.W: "W", Kind.B: "IW"}
FIRST_WAITS = {Kind.F: "F", Kind.I: "", Kind.W: "IW", Kind.B: "IW"}


def expected(instruction: Instruction) -> str:
    """The kinds that an instruction waits for."""
    parts = ((FIRST_WAITS if part.stage == 0 else WAITS).get(part.kind, "") for part in instruction.parts)
    return "".join(sorted("".join(parts)))


def lowered(name: str, num_microbatches: int = 4) -> tuple[Schedule, int]:
    schedule = make_schedule(name, 2, num_microbatches)
    count = len(schedule.placement.pipes[0])
    return complete(schedule, timed_split([FEW] * count)), count


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_each_instruction_waits_once_for_what_it_computes(name: str) -> None:
    schedule, count = lowered(name)
    waits: list[str] = []
    found: list[tuple[str, str]] = []

    def note(_: int, instruction: Instruction, start: float, end: float) -> None:
        assert start <= end
        found.append(("".join(sorted(waits)), expected(instruction)))
        waits.clear()

    split = timed_split([FEW] * count, wait=lambda _, kind: waits.append(kind.value))
    LocalExecutor(schedule, split, square_of).run(timed_batch(4), record=note)
    assert sum(len(got) for got, _ in found) == 3 * 4 * count
    assert [got for got, _ in found] == [wanted for _, wanted in found]


def run_rank(schedule: Schedule, count: int) -> tuple[list[Instruction], Counter[str]]:
    """What one rank ran, in order, and how often it waited for each kind."""
    rank = dist.get_rank()
    waits: Counter[str] = Counter()

    def wait(seconds: float, kind: Kind) -> None:
        waits[kind.value] += 1
        sleep(seconds, kind)

    watch = Watch(rank, 2, name=schedule.name)
    transport = ProcessTransport(make_groups([[0, 1]]), watch=watch)
    executor = ProcessExecutor(
        rank,
        schedule,
        timed_split([FEW] * count, wait=wait),
        square_of,
        transport=transport,
        on_reduce=lambda _: None,
        watch=watch,
    )
    ran: list[Instruction] = []
    for _ in range(2):  # Receives are posted ahead once layouts are known: in the second step.
        ran.clear()
        waits.clear()
        executor.run(
            timed_batch(schedule.num_microbatches),
            signature="timed",
            record=lambda _, instruction, start, end: ran.append(instruction),  # noqa: ARG005
        )
    dist.barrier()
    transport.close()
    watch.close()
    return ran, waits


def test_processes_run_their_lists_in_order_and_wait_once(two: Ranks) -> None:
    for name in ("1f1b", "zb-v"):
        schedule, count = lowered(name)
        for rank, (ran, waits) in enumerate(two.run(run_rank, schedule, count)):
            assert ran == [each for each in schedule.orders[rank] if each.kind in TAKES_TIME]
            assert waits == Counter(dict.fromkeys("FIW", 4 * len(schedule.placement.stages[rank])))


def test_prices_of_timed_stages_move_the_first_stages_input_gradient_to_its_weights() -> None:
    schedule, count = lowered("zb-h1")
    times = StageTimes(forward=1.0, input_gradient=2.0, weight_gradient=4.0)
    prices = first_stage_waits_in_weights(stage_prices(schedule.placement, (times, times)), count)
    seconds = {(kind, stage): prices.seconds(Instruction(kind, stage, 0), stage) for kind in WAITS for stage in (0, 1)}
    assert [seconds[kind, 0] for kind in (Kind.F, Kind.I, Kind.W, Kind.B)] == [1.0, 0.0, 6.0, 6.0]
    assert [seconds[kind, 1] for kind in (Kind.F, Kind.I, Kind.W, Kind.B)] == [1.0, 2.0, 4.0, 6.0]
