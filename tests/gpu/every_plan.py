"""Every plan of docs/composition.md on the GPUs of this machine, over NCCL, against one of them.

    python -m tests.gpu.every_plan                  all of them, on 2, 4 and 8 ranks that share what GPUs there are
    python -m tests.gpu.every_plan --ranks 2 --only pp --seconds 300
    python -m tests.gpu.every_plan --write          and keep the record, from which docs/gpu.md is made

It needs nothing but what the package needs, and `transformers` for the models of Hugging Face. What is left out is
said: plans for which there was no time, and models that cannot be made here. It ends with status 1 if a plan differs
from one device or fails. Ranks stay up from one plan to the next; after a failure there are new ones.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from shardwise import environment
from shardwise.parity.compare import Kind, compare
from shardwise.parity.course import Course
from shardwise.parity.ranks import train_on_rank
from shardwise.parity.reference import train_reference
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from tests.crowd import Crowd
from tests.gpu.page import PAGE, RECORD, page
from tests.parity.cases import CASES
from tests.parity.models import HUGGING_FACE, make_problem

KINDS: tuple[Kind, ...] = ("loss", "gradient", "norm", "weight")
#: A plan that takes longer stands still.
LIMIT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """How one plan went: its worst relative errors by kind, or what went wrong."""

    ranks: int
    model: str
    plan: str
    seconds: float
    errors: dict[str, float]
    problem: str | None = None


def train(plan: Plan, model: str) -> Course:
    return train_on_rank(plan, make_problem(model, plan), looks="last step", finds_uses=False)


def try_plan(crowd: Ranks, model: str, text: str) -> Row:
    start, plan = time.perf_counter(), Plan.parse(text)
    row = Row(ranks=crowd.devices, model=model, plan=text, seconds=0.0, errors={})
    try:
        expected = train_reference(make_problem(model, plan)().on("cuda"), plan, looks="last step")
        found = crowd.run(train, plan, model, timeout_seconds=LIMIT_SECONDS)
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        return replace(row, seconds=time.perf_counter() - start, problem=f"{type(error).__name__}: {first}")
    comparison = compare(expected, found)
    problem = None if comparison.first is None else f"differs first in {comparison.first.name}"
    errors = {str(kind): comparison.worst(kind) for kind in KINDS}
    return replace(row, seconds=time.perf_counter() - start, errors=errors, problem=problem)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=list(CASES), help="how many ranks (2 4 8)")
    parser.add_argument("--only", default="", help="plans that have this in them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no plan is begun after so many")
    parser.add_argument("--write", action="store_true", help="keep the record, and write docs/gpu.md from it")
    parser.add_argument("--json", metavar="FILE", help="where the record goes")
    arguments = parser.parse_args(words)
    if not torch.cuda.is_available():
        print("no GPU was found: nothing was tried", file=sys.stderr)
        return 1
    start = time.perf_counter()
    rows: list[Row] = []
    left_out: list[str] = []
    for count in arguments.ranks:
        with Crowd(count, gpus="shared") as crowd:
            for model, text in CASES[count]:
                if arguments.only not in text:
                    continue
                if time.perf_counter() - start > arguments.seconds:
                    left_out.append(f"{text} ({model}): no time was left")
                    continue
                if model in HUGGING_FACE and not _has_transformers():
                    left_out.append(f"{text} ({model}): transformers is not installed")
                    continue
                row = try_plan(crowd, model, text)
                rows.append(row)
                told = row.problem or f"worst {max(row.errors.values()):.1e}"
                print(f"{count} ranks  {text}  {model}: {told}, {row.seconds:.1f} s", flush=True)
    data = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "versions": environment.versions_of(["torch", "triton", "transformers"]),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "rows": [asdict(row) for row in rows],
        "left_out": left_out,
    }
    files = [RECORD] if arguments.write else []
    for file in [*files, *([Path(arguments.json)] if arguments.json else [])]:
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if arguments.write:
        PAGE.write_text(page(data), encoding="utf-8")
    wrong = [row for row in rows if row.problem is not None]
    for each in left_out:
        print(f"left out: {each}")
    print(f"{len(rows) - len(wrong)} passed, {len(wrong)} failed, {len(left_out)} skipped")
    return 1 if wrong or not rows else 0


def _has_transformers() -> bool:
    from importlib.util import find_spec

    return find_spec("transformers") is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
