"""What ranks ask of NCCL on the GPUs of this machine, against what processes on its CPUs rehearse: it must be the same.

    python -m tests.gpu.nccl_programs                   the plans in which tests make mistakes, and some of more ranks
    python -m tests.gpu.nccl_programs --ranks 2 --only pp
    python -m tests.gpu.nccl_programs --json FILE       and keep what was found

Ranks share what GPUs there are, over NCCL. Compared is everything that a rank issues, in its order: groups made,
communicators, kinds, sizes, types, peers. What GPUs were asked for is proven too, by the same checker. It ends with
status 1 if something differs.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import torch

from shardwise.nccl.check import prove
from shardwise.nccl.program import Event, Kind, Program
from shardwise.parity.programs import STALL_SECONDS, record_on_rank
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from tests.crowd import Crowd
from tests.nccl.mistakes import PLANS
from tests.parity.models import make_problem

MORE = [
    ("tied", "tp=2,pp=2,schedule=zb-h1,microbatches=4,sp=true"),
    ("untied", "dp=2,pp=2,schedule=interleaved,chunks=2,microbatches=2,zero=2"),
    ("3 key heads", "dp=2,tp=2,microbatches=2,zero=3,offload.parameters=1"),
]


def asked(program: Program) -> list[str]:
    """What a rank asks for, in order, without where its memory is."""
    return [_told(event) for event in program.events if event.kind in (Kind.MAKE, Kind.ISSUE)]


def _told(event: Event) -> str:
    if event.communicator is not None:
        made = event.communicator
        return f"make {made.number} of {' '.join(map(str, made.members))} over {made.backend}"
    operation = event.operation
    assert operation is not None, "an issue has an operation"
    # Of a state that is gathered on the host a rehearsal does not know so: on a CPU all numbers are of the host.
    where = "on the host, " if operation.on_host and event.step != "the gathering of the state" else ""
    # A pickled object: what a GPU is called is longer than a CPU's nothing. And how many tokens go to which expert is
    # decided by roundings; that both sides of an exchange have the same numbers is proven of each machine by itself.
    if (operation.on_host and operation.dtype == "uint8") or operation.sent:
        operation = replace(operation, count=0)
    return f"{operation} {where}on {operation.communicator}"


def first_difference(gpus: Sequence[Program], rehearsed: Sequence[Program]) -> str | None:
    """Where a rank asks a GPU's NCCL for something else than was rehearsed."""
    for one, other in zip(gpus, rehearsed, strict=True):
        for place, (found, expected) in enumerate(zip_longest(asked(one), asked(other))):
            if found != expected:
                return f"rank {one.rank}, {place}: on a GPU {found}, rehearsed {expected}"
    return None


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4], help="how many ranks (2 4)")
    parser.add_argument("--only", default="", help="plans that have this in them")
    parser.add_argument("--json", metavar="FILE", help="where what was found goes")
    arguments = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("no GPU was found: nothing was tried", file=sys.stderr)
        return 1
    rows = []
    cases = [(model, text) for model, text in (*PLANS.values(), *MORE) if arguments.only in text]
    for count in arguments.ranks:
        mine = [(model, text) for model, text in cases if Plan.parse(text).num_ranks == count]
        if not mine:
            continue
        with Crowd(count, gpus="shared") as on_gpus, Crowd(count, gpus="none") as on_cpus:
            for model, text in mine:
                rows.append(_try(on_gpus, on_cpus, model, text))
                print(f"{count} ranks  {text}  {model}: {rows[-1]['found']}, {rows[-1]['seconds']:.1f} s", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    wrong = [row for row in rows if not row["is_same"]]
    print(f"{len(rows) - len(wrong)} the same, {len(wrong)} not")
    return 1 if wrong or not rows else 0


def _try(on_gpus: Ranks, on_cpus: Ranks, model: str, text: str) -> dict[str, object]:
    start, plan = time.perf_counter(), Plan.parse(text)
    row: dict[str, object] = {"plan": text, "model": model, "is_same": False}
    try:
        given = (record_on_rank, plan, make_problem(model, plan), STALL_SECONDS)
        gpus: list[Program] = on_gpus.run(*given, False, timeout_seconds=90)
        rehearsed: list[Program] = on_cpus.run(*given, True, timeout_seconds=90)
    except Exception as error:
        found = f"{type(error).__name__}: {str(error)[:2000]}"
    else:
        proof, difference = prove(gpus), first_difference(gpus, rehearsed)
        row |= {"is_same": difference is None and proof.is_right, "operations": proof.operations}
        row |= {"problems": [str(each) for each in proof.problems[:8]], "difference": difference}
        counted = f"{proof.operations} operations, the same"
        found = difference or "; ".join(str(each) for each in proof.problems[:2]) or counted
    return row | {"found": found, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
