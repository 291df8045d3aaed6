"""Random modules under random plans, each held against plain torch: equal, refused with a sentence, or a failure.

    python -m tests.habits.random_modules --seeds 0:2000 --json

A seed gives a module, what hangs on it, an optimizer, a loss and a plan (`drawn/cases.py`). It is trained for four
steps by plain torch and on ranks that stay up. A failure is made smaller, as long as it fails in the same way, and is
printed.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.crowd import Crowds, import_once
from tests.habits.drawn.cases import Case, draw, program_of, smaller
from tests.habits.drawn.judge import FAILS, Verdict, judge
from tests.habits.drawn.plans import kind_of

#: How many cases ranks are given at a time.
_AT_A_TIME = 20
_MOST_STEPS = 60
#: Ranks that take longer than this, and twenty seconds for a case, are lost.
_START_SECONDS = 300

Judge = Callable[[Sequence[Case]], list[Verdict]]


class Bench:
    """Ranks that judge cases. Where ranks are lost over one, the others are judged one by one."""

    def __init__(self, crowds: Crowds) -> None:
        self._crowds = crowds

    def judge(self, cases: Sequence[Case]) -> list[Verdict]:
        """A verdict for each case, all of which have one number of ranks."""
        try:
            crowd = self._crowds.of(cases[0].num_ranks)
            found: list[Verdict] = crowd.run(judge, list(cases), timeout_seconds=_START_SECONDS + 20 * len(cases))[0]
        except Exception as error:
            if len(cases) == 1:
                return [Verdict("crash", f"the ranks were lost: {error}")]
            return [verdict for case in cases for verdict in self.judge([case])]
        return found

    def judge_all(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Verdict]]:
        """As they come, those of one plan after each other."""
        for num_ranks in sorted({each.num_ranks for each in cases}):
            alike = sorted((each for each in cases if each.num_ranks == num_ranks), key=lambda each: each.plan)
            for at in range(0, len(alike), _AT_A_TIME):
                some = alike[at : at + _AT_A_TIME]
                yield from zip(some, self.judge(some), strict=True)
                print(f"{num_ranks} ranks: {at + len(some)} of {len(alike)}", file=sys.stderr, flush=True)

    def shrink(self, case: Case, verdict: Verdict) -> tuple[Case, Verdict]:
        """The smallest case found that fails in the same way."""
        steps = 0
        is_smaller = True
        while is_smaller and steps < _MOST_STEPS:
            is_smaller = False
            for each in smaller(case):
                steps += 1
                (found,) = self.judge([each])
                if found.kind == verdict.kind:
                    case, verdict, is_smaller = each, found, True
                    break
                if steps >= _MOST_STEPS:
                    break
        return case, verdict


def reason_of(said: str) -> str:
    """A refusal without its names and numbers, so that those of one kind are counted together."""
    first = said.splitlines()[0]
    words = [word if not any(sign in word for sign in "0123456789_.[]=<>") else "…" for word in first.split()]
    return " ".join(words)[:160]


def summary(judged: Sequence[tuple[Case, Verdict]], accepted: Callable[[Case], bool]) -> dict[str, Any]:
    """Counts by kind of plan, and refusals by reason. `accepted`: whether plain dp takes a case that was refused."""
    by_plan: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    for case, verdict in judged:
        kind = verdict.kind
        if kind == "refused" and not accepted(case):
            kind = "refused by dp too"
        if kind == "refused":
            reasons[f"{kind_of(case.plan)}: {reason_of(verdict.said)}"] += 1
        by_plan[kind_of(case.plan)][kind] += 1
    total = sum(by_plan.values(), Counter())
    asked = sum(count for kind, count in total.items() if kind not in ("unfit", "refused by dp too"))
    return {
        "total": dict(total), "refused": round(total["refused"] / max(asked, 1), 4),
        "by plan": {plan: dict(count) for plan, count in sorted(by_plan.items())},
        "reasons": dict(reasons.most_common()),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", default="0:100", help="from the first to before the last: 0:2000")
    parser.add_argument("--plan", help="this plan for all")
    parser.add_argument("--only", default="", help="seeds whose plan has this in it")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--no-shrink", action="store_true", help="print failures as they were drawn")
    parser.add_argument("--with-crossing", action="store_true", help="numbers that are no tensors between stages, too")
    parser.add_argument(
        "--with-losses", action="store_true", help="losses that are no mean of means of equal parts, too"
    )
    parser.add_argument("--show", action="store_true", help="print every refusal")
    given = parser.parse_args(arguments)
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    more = {"with_crossing": given.with_crossing, "with_losses": given.with_losses}
    cases = [draw(seed, given.plan, **more) for seed in seeds]
    cases = [each for each in cases if given.only in each.plan]
    import_once()
    crowds = Crowds()
    bench = Bench(crowds)
    try:
        judged = []
        for case, verdict in bench.judge_all(cases):
            judged.append((case, verdict))
            if verdict.kind in FAILS or (given.show and verdict.kind in ("refused", "unfit")):
                _tell(bench, case, verdict, shrinks=verdict.kind in FAILS and not given.no_shrink)
        refused = [replace(case, plan=f"dp={case.num_ranks}") for case, verdict in judged if verdict.kind == "refused"]
        plainly = {case.seed: verdict.kind for case, verdict in bench.judge_all(refused)}
    finally:
        crowds.close()
    found = summary(judged, lambda case: plainly[case.seed] == "equal")
    print(json.dumps(found, indent=1) if given.json else found)
    return 1 if any(verdict.kind in FAILS for _, verdict in judged) else 0


def _tell(bench: Bench, case: Case, verdict: Verdict, *, shrinks: bool) -> None:
    if shrinks:
        case, verdict = bench.shrink(case, verdict)
    print(f"--- {verdict.kind}: {program_of(case, with_source=shrinks)}\n{verdict.said}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
