"""Every plan of docs/composition.md on the GPUs of this machine, over NCCL, against one of them.

    python -m tests.gpu.every_plan                  all of them, on 2, 4 and 8 ranks that share what GPUs there are
    python -m tests.gpu.every_plan --precision fp32 bf16
    python -m tests.gpu.every_plan --families       one model of each family of Hugging Face, under three plans
    python -m tests.gpu.every_plan --ranks 2 --only pp --seconds 300
    python -m tests.gpu.every_plan --write          and keep the record, from which docs/gpu.md is made

It needs nothing but what the package needs, and `transformers` for the models of Hugging Face. What is left out is
said: plans for which there was no time, and models that cannot be made here. It ends with status 1 if a plan differs
from one device or fails, and with 3 if there was no time for all: called again, it goes on where it was (`record.py`).
Ranks stay up from one plan to the next; after a failure there are new ones. In fp32 a plan is held to 1e-5, in bf16 to
what one device's bf16 is off by (`parity/rounding.py`).
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from shardwise.parity.compare import Kind, compare
from shardwise.parity.course import Course
from shardwise.parity.problem import MakeProblem
from shardwise.parity.ranks import train_on_rank
from shardwise.parity.reference import train_reference
from shardwise.parity.rounding import MOST_DRAWS, judge, nudge
from shardwise.planner.plan import Plan
from shardwise.ranks.gpus import Gpus
from shardwise.ranks.spawn import Ranks
from shardwise.testing.mps import shared_at_once
from tests.crowd import Crowd
from tests.gpu import commands, families
from tests.gpu.page import PAGE, RECORD, page
from tests.gpu.record import FILE, ROOT, Record
from tests.parity.cases import CASES
from tests.parity.models import HUGGING_FACE, make_problem

KINDS: tuple[Kind, ...] = ("loss", "gradient", "norm", "weight")
#: A plan that takes longer stands still.
LIMIT_SECONDS = 60.0
#: New ranks begin with what they import and with CUDA: 33 to 60 s on 16 cores that do much else.
START_SECONDS = 60.0
NOT_ALL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one plan went: its worst relative errors by kind, or what went wrong. In bf16 the means against fp32, and one
    device's beside them."""

    ranks: int
    model: str
    plan: str
    precision: str
    seconds: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    alone: dict[str, float] = field(default_factory=dict)
    problem: str | None = None

    @property
    def name(self) -> str:
        return f"{'families' if families.is_family(self.model) else 'plans'}: {self.precision} {self.plan} {self.model}"


def problem_of(model: str, plan: Plan) -> MakeProblem:
    return families.make_family_problem(model, plan) if families.is_family(model) else make_problem(model, plan)


def train(plan: Plan, model: str) -> Course:
    return train_on_rank(plan, problem_of(model, plan), looks="last step", finds_uses=False)


@lru_cache(maxsize=1)
def _exact_reference(model: str, plan: str, device: str) -> Course:
    """One device in fp32. A plan's rows in fp32 and in bf16 come one after the other, and are held against the same."""
    exact = Plan.parse(plan)
    return train_reference(problem_of(model, exact)().on(device), exact, looks="last step")


def try_plan(crowd: Ranks, row: Row, device: str = "cuda") -> Row:
    """Train a plan and one device, and compare them."""
    start = time.perf_counter()
    plan = replace(Plan.parse(row.plan), precision=row.precision)
    make = problem_of(row.model, plan)
    try:
        expected = _exact_reference(row.model, row.plan, device)
        limit = LIMIT_SECONDS + (0.0 if crowd.process_ids else START_SECONDS)
        found = crowd.run(train, plan, row.model, timeout_seconds=limit)
        if row.precision != "fp32":
            draws: list[Course] = []
            for seed in range(MOST_DRAWS):
                draws.append(train_reference(nudge(make().on(device), seed), plan, looks="last step"))
                judged = judge(expected, draws, found)
                if judged.problem is None:
                    break
            row = replace(row, errors=judged.plan, alone=judged.alone, problem=judged.problem)
        else:
            comparison = compare(expected, found)
            first = comparison.first
            problem = None if first is None else f"differs first in {first.name}"
            row = replace(row, errors={str(kind): comparison.worst(kind) for kind in KINDS}, problem=problem)
    except Exception as error:
        first_line = str(error).splitlines()[0] if str(error) else ""
        row = replace(row, problem=f"{type(error).__name__}: {first_line}")
    return replace(row, seconds=time.perf_counter() - start)


def run(
    record: Record, wanted: Sequence[Row], deadline: float, *, device: str = "cuda", connections: int = 0
) -> tuple[list[Row], list[str]]:
    """Run what the record does not have yet, and say what was left out. With MPS if it is given `connections`."""
    rows, left_out = [], []
    gpus: Gpus = "shared" if device == "cuda" else "none"
    for count in sorted({row.ranks for row in wanted}):
        todo = []
        for row in (each for each in wanted if each.ranks == count):
            if row.name in record.rows:
                rows.append(Row(**record.rows[row.name]))
            elif _needs_transformers(row.model) and not _has_transformers():
                left_out.append(f"{row.plan} ({row.model}): transformers is not installed")
            else:
                todo.append(row)
        if not todo:
            continue
        sharing = shared_at_once(connections) if connections else nullcontext(False)
        with sharing as at_once, Crowd(count, gpus=gpus) as crowd:
            for row in todo:
                if time.monotonic() > deadline:
                    left_out.append(f"{row.plan} ({row.model}, {row.precision}): no time was left")
                    continue
                done = try_plan(crowd, row, device)
                rows.append(done)
                record.add(done.name, asdict(done))
                told = done.problem or f"worst {max(done.errors.values()):.1e}{_beside(done)}"
                print(
                    f"{count} ranks{' (MPS)' if at_once else ''}  {done.precision}  {done.plan}  {done.model}: {told},"
                    f" {done.seconds:.1f} s",
                    flush=True,
                )
    return rows, left_out


def _beside(row: Row) -> str:
    return f" (one device {max(row.alone.values()):.1e})" if row.alone else ""


def wanted_rows(
    *,
    with_families: bool,
    counts: Sequence[int],
    precisions: Sequence[str],
    only: str = "",
    share: tuple[int, int] = (0, 1),
) -> list[Row]:
    """What was asked for, in the order in which it is run. `share` (0, 2) is the first of two halves: every other plan,
    so that both take about as long."""
    cases = families.CASES if with_families else CASES
    first, step = share
    return [
        Row(ranks=count, model=model, plan=text, precision=precision)
        for count in counts
        for model, text in cases.get(count, [])[first::step]
        for precision in precisions
        if only in text or only in model
    ]


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(CASES), help="how many ranks (2 4 8)")
    parser.add_argument("--precision", nargs="*", choices=("fp32", "bf16"), default=["fp32"], help="(fp32)")
    parser.add_argument("--families", action="store_true", help="models of Hugging Face, one of each family")
    parser.add_argument("--only", default="", help="plans and models that have this in them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no plan is begun after so many")
    parser.add_argument("--anew", action="store_true", help="run also what has been recorded already")
    parser.add_argument("--write", action="store_true", help="keep the record, and write docs/gpu.md from it")
    parser.add_argument("--json", metavar="FILE", help="where the record goes")
    parser.add_argument("--mps", type=int, default=0, metavar="N", help="share GPUs by MPS, with N queues a rank")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: over gloo, to try these tests")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    arguments = parse(words)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no GPU was found: nothing was tried", file=sys.stderr)
        return 1
    start = time.monotonic()
    record = Record(Path(arguments.json) if arguments.json else FILE, anew=arguments.anew)
    wanted = wanted_rows(
        with_families=arguments.families, counts=arguments.ranks, precisions=arguments.precision, only=arguments.only
    )
    if arguments.device == "cuda":
        torch.zeros(1, device="cuda")  # Before MPS: this process outlives it.
    rows, left_out = run(record, wanted, start + arguments.seconds, device=arguments.device, connections=arguments.mps)
    if arguments.write:
        write(record)
    wrong = [row for row in rows if row.problem is not None]
    for each in left_out:
        print(f"left out: {each}")
    print(f"{len(rows) - len(wrong)} passed, {len(wrong)} failed, {len(left_out)} skipped")
    for row in wrong:
        print(f"failed: {row.precision} {row.plan} ({row.model}): {row.problem}")
    unfinished = any("no time" in each for each in left_out)
    return 1 if wrong or not rows else NOT_ALL if unfinished else 0


def write(record: Record) -> None:
    """Keep what was recorded, and write the page. What was not run this time stays as it was."""
    kept: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    kept.pop("note", None)  # It says by hand which rows are of another state of the source.
    kept |= {key: value for key, value in record.about.items() if key != "source"}
    for kind, precision, key in (("plans", "fp32", "rows"), ("plans", "bf16", "bf16"), ("families", "", "families")):
        found = [row for row in record.of(kind) if precision in ("", row["precision"])]
        order = {row.name: place for place, row in enumerate(_all_rows())}
        wanted = [name for name in order if name.startswith(f"{kind}: {precision}")]
        if kind == "plans" and len(found) < len(wanted):
            print(
                f"{len(found)} of {len(wanted)} plans were run in {precision}: the page keeps those of an earlier run"
            )
        elif found:
            kept[key] = sorted(found, key=lambda row: order.get(Row(**row).name, len(order)))
    faults = record.of("faults")
    if faults:
        kept["faults"] = faults
    others = [
        {"part": part, "name": name.removeprefix(f"{part}: "), **row}
        for part in ("nccl", "input", "pytest")
        for name, row in record.rows.items()
        if name.startswith(f"{part}: ")
    ]
    others += commands.row_of_all(record)
    if others:
        kept["shares_processes"] = True
        kept["others"] = others + _left_from_before(kept.get("others", []), {row["name"] for row in others})
    # Errors are told with their files: where these lie on this machine is nobody's business.
    RECORD.write_text(json.dumps(kept, indent=1).replace(f"{ROOT}/", "") + "\n", encoding="utf-8")
    PAGE.write_text(page(kept), encoding="utf-8")


def _left_from_before(before: list[dict[str, Any]], names: set[str]) -> list[dict[str, Any]]:
    """What an earlier run did and this one had no time for, marked so. Test files that are gone are left out."""
    kept = [
        row for row in before if row["name"] not in names and (row["part"] != "pytest" or (ROOT / row["name"]).exists())
    ]
    return [{**row, "since": "in an earlier run, not in this one"} for row in kept]


def _all_rows() -> list[Row]:
    both = ("fp32", "bf16")
    return [
        row
        for with_families in (False, True)
        for row in wanted_rows(with_families=with_families, counts=list(CASES), precisions=both, only="")
    ]


def _needs_transformers(model: str) -> bool:
    return model in HUGGING_FACE or families.is_family(model)


def _has_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
