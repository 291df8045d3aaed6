"""What the mover of bytes costs and reaches: on a GPU where there is one, else the same script on CPU places.

- A chain of 100 small Triton kernels: microseconds added for each task, eagerly, and a replay beside a hand-written
  CUDA graph of the same kernels. Without a GPU there are 10, run by Triton's interpreter, and no graph.
- A chain of 1,000 small torch functions on one CPU place.
- Copies between the host and the device, each direction alone and both at once.
- The six reference flows: their bytes, their bits against one CPU place, and their makespans on simulated links.
- Random programs on random budgets (`--operations`, 100,000 unless said otherwise).

    python benchmarks/dataflow.py                       about 4 minutes
    python benchmarks/dataflow.py --operations 2000     under a minute
    python benchmarks/dataflow.py --only-chain          a few seconds
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch
import triton
import triton.language as tl
from record import record

from shardwise.dataflow.links import Link
from shardwise.dataflow.machine import Machine
from shardwise.testing.flows import FLOWS, SIZE
from shardwise.testing.rehearsal import Rehearsal

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Read when a kernel is made.

TASKS, NUMBERS, BLOCK = 100 if HAS_GPU else 10, 4096, 1024
GRID = (NUMBERS // BLOCK,)
ROUNDS = 50 if HAS_GPU else 3
REPLAYS = 200 if HAS_GPU else 3
COPY_BYTES = 2**30 if HAS_GPU else 2**26
MOST_ADDED_MICROSECONDS, MOST_REPLAY_RATIO = 10.0, 1.03
DEVICE = "cuda:0" if HAS_GPU else "cpu:0"
FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


@triton.jit
def scale(x_ptr, y_ptr, n, factor, BLOCK: tl.constexpr):  # noqa: N803
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) * factor, mask=mask)


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def seconds_of(run: Callable[[], object], rounds: int) -> float:
    """The median of some rounds, each to its end."""
    found = []
    for _ in range(rounds):
        synchronize()
        start = perf_counter()
        run()
        synchronize()
        found.append(perf_counter() - start)
    return median(found)


def chain() -> dict[str, object]:
    """100 kernels by hand and as tasks; then as a CUDA graph by hand and as a program."""
    device = torch.device(DEVICE if HAS_GPU else "cpu")
    plain = [torch.zeros(NUMBERS, device=device) for _ in range(TASKS + 1)]
    plain[0].fill_(1.0)

    def by_hand() -> None:
        for number in range(TASKS):
            scale[GRID](plain[number], plain[number + 1], NUMBERS, 1.0001, BLOCK=BLOCK)

    with Machine([DEVICE]) as machine:
        first = machine.data(torch.ones(NUMBERS), name="x")
        values = [machine.empty((NUMBERS,), name=f"y{number}") for number in range(TASKS)]

        def as_tasks() -> None:
            value = first
            for made in values:
                machine.submit(scale, value, made, NUMBERS, 1.0001, grid=GRID, BLOCK=BLOCK, place=DEVICE)
                value = made
            if not HAS_GPU:
                machine.wait()

        by_hand()
        as_tasks()
        # They take turns, so that a machine that becomes slower becomes it for both.
        pairs = [(seconds_of(by_hand, 1), seconds_of(as_tasks, 1)) for _ in range(ROUNDS)]
        hand, tasks = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
        submitted = submit_seconds(as_tasks) if HAS_GPU else None
        results: dict[str, object] = {
            "microseconds_each_by_hand": round(hand / TASKS * 1e6, 2),
            "microseconds_each_as_task": round(tasks / TASKS * 1e6, 2),
            "microseconds_added": round((tasks - hand) / TASKS * 1e6, 2),
            "microseconds_to_submit": None if submitted is None else round(submitted / TASKS * 1e6, 2),
            "same_bits": torch.equal(values[-1].get(), plain[-1].cpu()),
        }
        program = machine.record(as_tasks if HAS_GPU else lambda: submit_all(machine, first, values))
        program.replay()
        results |= {"replay_kind": program.kind, "replay_problem": str(program.problem) if program.problem else None}
        if HAS_GPU:
            results |= replays(by_hand, program.replay)
        else:
            results["microseconds_a_replayed_task"] = round(
                seconds_of(lambda: (program.replay(), machine.wait()), REPLAYS) / TASKS * 1e6, 2
            )
        results["same_bits_after_replay"] = torch.equal(values[-1].get(), plain[-1].cpu())
    return results


def submit_all(machine: Machine, value: Any, values: list[Any]) -> None:
    for made in values:
        machine.submit(scale, value, made, NUMBERS, 1.0001, grid=GRID, BLOCK=BLOCK, place=DEVICE)
        value = made


def submit_seconds(as_tasks: Callable[[], None]) -> float:
    """What the host alone takes: without waiting for the GPU."""
    found = []
    for _ in range(ROUNDS):
        synchronize()
        start = perf_counter()
        as_tasks()
        found.append(perf_counter() - start)
    return median(found)


def replays(by_hand: Callable[[], None], replay: Callable[[], None]) -> dict[str, object]:
    """One graph by hand and the program, one replay to its end and many in a row, in turns."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        by_hand()
    one = [(seconds_of(graph.replay, 1), seconds_of(replay, 1)) for _ in range(REPLAYS)]
    rows = [(seconds_of(lambda: many(graph.replay), 1), seconds_of(lambda: many(replay), 1)) for _ in range(10)]
    results: dict[str, object] = {}
    for name, pairs, count in (("one", one, 1), ("in_a_row", rows, 50)):
        hand, ours = (median(pair[side] for pair in pairs) / count for side in (0, 1))
        results |= {
            f"graph_microseconds_{name}": round(hand * 1e6, 2),
            f"replay_microseconds_{name}": round(ours * 1e6, 2),
            f"replay_ratio_{name}": round(ours / hand, 4),
        }
    return results


def many(run: Callable[[], object]) -> None:
    for _ in range(50):
        run()


def functions() -> dict[str, object]:
    """Microseconds of one small torch function: by hand, and as a task of a CPU place, from submitting to its end."""
    values = [torch.ones(64) for _ in range(2)]

    def by_hand() -> None:
        for number in range(1000):
            torch.mul(values[number % 2], 1.0, out=values[(number + 1) % 2])

    with Machine(["cpu:0"]) as machine:
        data = [machine.data(each.clone()) for each in values]

        def as_tasks() -> None:
            for number in range(1000):
                one, other = data[number % 2], data[(number + 1) % 2]
                machine.submit(torch.mul, one, 1.0, out=other, reads=[one], writes=[other], place="cpu:0")
            machine.wait()

        pairs = [(seconds_of(by_hand, 1), seconds_of(as_tasks, 1)) for _ in range(10)]

        def repeated() -> None:
            one, other = data
            for _ in range(1000):
                machine.submit(torch.mul, one, 1.0, out=other, reads=[one], writes=[other], place="cpu:0")

        program = machine.record(repeated)
        replayed = seconds_of(lambda: (program.replay(), machine.wait()), 10)
    hand, tasks = (median(pair[side] for pair in pairs) * 1000 for side in (0, 1))
    return {
        "microseconds_each_by_hand": round(hand, 2),
        "microseconds_each_as_task": round(tasks, 2),
        "microseconds_each_replayed": round(replayed * 1000, 2),
    }


def copies() -> dict[str, object]:
    """Gigabytes a second between the host and the device, by `Machine.copy`."""
    with Machine([DEVICE]) as machine:
        near = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE if HAS_GPU else "cpu") for _ in range(2)]
        far = [machine.pinned((COPY_BYTES,), torch.uint8) for _ in range(2)]
        for tensor in (*near, *far):
            tensor.fill_(1)
        synchronize()

        def inward() -> None:
            machine.copy(near[0], far[0], to=DEVICE).wait()

        def outward() -> None:
            machine.copy(far[1], near[1], of=DEVICE).wait()

        def both() -> None:
            events = [machine.copy(near[0], far[0], to=DEVICE), machine.copy(far[1], near[1], of=DEVICE)]
            for event in events:
                event.wait()

        found = {"inward": inward, "outward": outward, "both_each": both}
        return {name: round(COPY_BYTES / seconds_of(run, 5) / 1e9, 2) for name, run in found.items()}


def flows() -> dict[str, object]:
    """Each flow: bytes by hand, bits, and the part of the best possible makespan that is reached."""
    results: dict[str, object] = {}
    for flow in FLOWS:
        with Machine(["cpu:0"]) as machine:
            expected = [data.get() for data in flow.run(machine, ["cpu:0"], 1.0)]
        with Machine(FOUR) as machine:
            made = flow.run(machine, FOUR, 1.0)
            arrived: dict[int, int] = {}
            for (_, target), size in machine.mover.moved_bytes.items():
                arrived[target] = arrived.get(target, 0) + size
            same = all(torch.equal(data.get(), value) for data, value in zip(made, expected, strict=True))
        reached = {}
        for ratio in (0.1, 0.5, 1.0, 2.0):
            with Machine(FOUR, links=Link(bytes_per_second=4 * SIZE * SIZE / ratio)) as machine:
                flow.run(machine, FOUR, 1.0)
                reached[str(ratio)] = round(machine.report().efficiency, 4)
        one: dict[str, object] = {
            "bytes_as_by_hand": arrived == flow.arriving_bytes,
            "same_bits_on_four_cpu_places": same,
            "part_of_best_makespan_by_copy_over_task": reached,
        }
        if HAS_GPU:
            one |= on_gpu(flow, expected)
        results[flow.name] = one
    return results


def on_gpu(flow: Any, expected: list[torch.Tensor]) -> dict[str, object]:
    """The flow on the GPU: its check (tasks one by one), and how far it is from the CPU's bits."""
    with Machine(["cuda:0"]) as machine:
        machine.check(lambda: flow.run(machine, ["cuda:0"], 1.0))
    with Machine(["cuda:0"]) as machine:
        found = [data.get() for data in flow.run(machine, ["cuda:0"], 1.0)]
    with Machine(["cuda:0", "cpu:0"]) as machine:
        places = ["cuda:0", "cpu:0", "cuda:0", "cpu:0"]
        mixed = [data.get() for data in flow.run(machine, places, 1.0)]
    largest = max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))
    apart = max(float((one - other).abs().max()) for one, other in zip(mixed, expected, strict=True))
    return {"check_on_gpu": True, "largest_difference_to_cpu": largest, "largest_difference_half_on_cpu": apart}


def rehearsals(num_operations: int) -> dict[str, object]:
    """Random programs, some of them with the GPU among their places. A mistake ends the benchmark."""
    each, start = 500, perf_counter()
    num_programs = max(1, num_operations // each)
    for seed in range(num_programs):
        devices = ["cuda:0", "cpu:0", "cpu:1"] if HAS_GPU and seed % 4 == 0 else FOUR
        rehearsal = Rehearsal(seed, devices=devices)
        rehearsal.run(each)
        rehearsal.close()
    return {"operations": num_programs * each, "mistakes": 0, "seconds": round(perf_counter() - start, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--only-chain", action="store_true", help="the chain of kernels, printed and not kept")
    arguments = parser.parse_args()
    results: dict[str, object] = {"device": torch.cuda.get_device_name() if HAS_GPU else "cpu"}
    chained = chain()
    results["chain_of_100"] = chained
    print(json.dumps(results, indent=2), flush=True)
    if arguments.only_chain:
        return 0
    parts = {"functions_on_a_cpu_place": functions, "copies_gb_per_second": copies, "flows": flows}
    for name, run in parts.items():
        results[name] = run()
        print(json.dumps({name: results[name]}, indent=2), flush=True)
    results["rehearsals"] = rehearsals(arguments.operations)
    print(json.dumps({"rehearsals": results["rehearsals"]}, indent=2), flush=True)
    record("dataflow", results)
    print(json.dumps(results))
    if not HAS_GPU:
        return 0
    is_right = chained["microseconds_added"] <= MOST_ADDED_MICROSECONDS
    is_right &= chained["replay_kind"] == "graphs"
    is_right &= max(chained["replay_ratio_in_a_row"], chained["replay_ratio_one"]) <= MOST_REPLAY_RATIO
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
