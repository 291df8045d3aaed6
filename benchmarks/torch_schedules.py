"""The pipeline schedules of PyTorch beside ours: the same simulator plays both orders under the same prices.

Needs torch (`pip install 'shardwise[torch]'`). The orders of torch's schedules are asked of its own classes; no process
group is started. Printed is the time of torch's best order over ours: above 1, ours is faster.
"""

import sys
from types import SimpleNamespace

from record import record

from shardwise.schedule.instruction import Instruction, Kind
from shardwise.schedule.outcome import Outcome, make, play_out
from shardwise.schedule.placement import Placement, loop, vee
from shardwise.schedule.question import Question, make_question
from shardwise.schedule.schedule import Schedule

_KINDS = {"FORWARD": Kind.F, "BACKWARD_INPUT": Kind.I, "BACKWARD_WEIGHT": Kind.W, "FULL_BACKWARD": Kind.B}


def torch_schedule(name: str, placement: Placement, num_microbatches: int) -> Schedule:
    """The order of a schedule class of torch, in our language."""
    from torch.distributed.pipelining import schedules

    ranks = placement.num_ranks
    stand_in = SimpleNamespace(
        pp_group_size=ranks,
        num_stages=placement.num_stages,
        _num_stages=placement.num_stages,
        n_local_stages=placement.num_chunks,
        _stages=[None] * placement.num_chunks,
        _n_microbatches=num_microbatches,
        number_of_rounds=max(1, num_microbatches // ranks),
        microbatches_per_round=num_microbatches // max(1, num_microbatches // ranks),
    )
    calculate = getattr(schedules, name)._calculate_single_rank_operations
    orders = []
    for rank in range(ranks):
        order: list[Instruction] = []
        for action in calculate(stand_in, rank):
            if action is not None:
                order += [
                    Instruction(_KINDS[each.computation_type.name], each.stage_index, each.microbatch_index)
                    for each in (action.sub_actions or (action,))
                ]
        orders.append(order)
    return Schedule.of(f"torch {name}", placement, num_microbatches, orders)


def peers_of(question: Question) -> dict[str, Outcome]:
    ranks, count = question.num_ranks, question.num_microbatches
    return {
        name: play_out(torch_schedule(name, placement, count), question)
        for name, placement in (
            ("ScheduleInterleaved1F1B", loop(ranks, 2)),
            ("ScheduleZBVZeroBubble", vee(ranks)),
            ("ScheduleDualPipeV", vee(ranks)),
        )
    }


def main() -> int:
    rows = []
    for ranks, rounds, times, hop in (
        (4, 2, "1,1,1", "0"),
        (4, 3, "1,1.2,0.8", "0.05"),
        (8, 2, "1,1,1", "0"),
        (8, 3, "1,1.2,0.8", "0.05"),
        (16, 3, "1,1.2,0.8", "0.05"),
    ):
        # Ours may hold what torch's ZBV holds, and, in a second row, twice that.
        for memory in (ranks, 2 * ranks):
            free = make_question(num_ranks=ranks, num_microbatches=rounds * ranks, times=times, hop=hop)
            peers = peers_of(free)
            limited = make_question(
                num_ranks=ranks, num_microbatches=rounds * ranks, times=times, hop=hop, memory=str(memory)
            )
            ours = play_out(make("auto", limited), limited)
            fitting = {name: peer for name, peer in peers.items() if max(peer.peaks) <= memory}
            best = min(fitting, key=lambda name: peers[name].makespan)
            row = {
                "ranks": ranks,
                "microbatches": rounds * ranks,
                "times": times,
                "hop": hop,
                "memory": memory,
                "torch's best that fits": best,
                "makespan, torch": peers[best].makespan,
                "makespan, auto": ours.makespan,
                "makespan ratio": peers[best].makespan / ours.makespan,
                "span ratio": peers[best].span / ours.span,
            }
            rows.append(row)
            print(
                f"p {ranks:2d}  m {rounds * ranks:2d}  ({times}) hop {hop:4}  memory {memory:2d}  {best:24} "
                f"{peers[best].makespan:8.3f}  auto {ours.makespan:8.3f}  ratio {row['makespan ratio']:.4f}, "
                f"of spans {row['span ratio']:.4f}"
            )
    record("torch_schedules", {"rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
