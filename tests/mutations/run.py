"""Makes every seeded fault, one at a time, and says whether the tests notice.

    python -m tests.mutations.run                       all faults, in a copy of this tree
    python -m tests.mutations.run --only ring dropout   those whose ids or rooms contain one of these words
    python -m tests.mutations.run --check               only look whether every fault can be made
    python -m tests.mutations.run --json                and keep the answers in benchmarks/results/mutations.json

The tests of a fault are few and quick: those that are expected to notice. The one that noticed last time is run first,
and alone: mostly it does again. At the end, each that did must pass without any fault.
"""

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise import __version__, environment
from tests.mutations.fault import Fault, read_faults
from tests.mutations.tree import Outcome, Tree

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "mutations.json"
#: Seconds for all tests that have noticed something, one after the other, without a fault.
_LIMIT_OF_ALL = 3600.0


def main(words: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 if every fault was found."""
    options = _parse(words)
    faults = [each for each in read_faults() if not options.only or _is_wanted(each, options.only)]
    if options.check:
        return _check(faults, options.tree)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        trees = [Tree(options.tree, Path(folder) / str(number)) for number in range(options.jobs)]
        kept = _Kept(options.suite, options.tree) if options.json else None
        answers = _try_all(faults, trees, options.limit, kept, _last_finders(options.suite))
        _confirm(answers, trees[0], kept)
    left = [name for name, answer in answers.items() if answer["outcome"] != "found"]
    print(
        f"{len(answers) - len(left)} of {len(answers)} faults were found",
        *(f"  not: {name}" for name in left),
        sep="\n",
    )
    return 1 if left else 0


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations.run", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="faults whose id or room contains a word")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the library and tests to copy, if not this one")
    parser.add_argument("--suite", default="now", metavar="NAME", help="what the kept answers are called")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried at the same time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for the tests of one fault")
    parser.add_argument("--check", action="store_true", help="run nothing: look whether every fault can be made")
    parser.add_argument("--json", action="store_true", help=f"keep the answers in {RESULTS.relative_to(ROOT)}")
    return parser.parse_args(words)


def _is_wanted(fault: Fault, words: Sequence[str]) -> bool:
    return any(word in fault.id or word == fault.room for word in words)


def _check(faults: Sequence[Fault], tree: Path) -> int:
    """Name each fault whose place or whose tests are not there."""
    wrong = []
    for fault in faults:
        path = tree / fault.file
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        if source.count(fault.text) != 1:
            wrong.append(f"{fault.id}: its text is in {fault.file} {source.count(fault.text)} times")
        wrong += [f"{fault.id}: there is no {test}" for test in fault.tests if not _is_there(test, tree)]
    rooms = sorted({fault.room for fault in faults})
    print(*wrong, f"{len(faults)} faults in {len(rooms)} rooms", sep="\n")
    return 1 if wrong else 0


def _is_there(test: str, tree: Path) -> bool:
    """Whether there is a file, or a test function in it. Its parameters are pytest's to know."""
    name, _, function = test.partition("::")
    path = tree / name
    wanted = f"def {function.partition('[')[0]}("
    return path.is_file() and (not function or wanted in path.read_text(encoding="utf-8"))


def _confirm(answers: dict[str, dict[str, Any]], tree: Tree, kept: "_Kept | None") -> None:
    """Run all tests that have noticed something without any fault: one that fails then as well has proven nothing."""
    tests = sorted({answer["test"] for answer in answers.values() if answer["test"] is not None})
    if not tests:
        return
    outcome = tree.run(tests, limit_seconds=_LIMIT_OF_ALL, stops=False)
    print(f"without a fault: {'all pass' if outcome.passed else 'not all pass'} ({outcome.seconds:.0f} s)", flush=True)
    if outcome.passed:
        return
    print(outcome.tail, file=sys.stderr)
    for name, answer in answers.items():
        if answer["test"] in outcome.noticed or not outcome.failed:
            answers[name] = {**answer, "outcome": "not proven"}
            if kept is not None:
                kept.add(name, answers[name])


def _last_finders(suite: str) -> dict[str, str]:
    """For each fault that was found when it was last tried, the test that did."""
    kept = json.loads(RESULTS.read_text(encoding="utf-8"))["results"] if RESULTS.exists() else {}
    rows = kept.get(suite, {}).get("faults", {})
    return {name: row["test"] for name, row in rows.items() if row["outcome"] == "found"}


def _try_all(
    faults: Sequence[Fault],
    trees: Sequence[Tree],
    limit: float,
    kept: "_Kept | None",
    last_finders: Mapping[str, str],
) -> dict[str, dict[str, Any]]:
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def attempt(fault: Fault) -> dict[str, Any]:
        tree = free.get()
        try:
            with tree.with_fault(fault):
                outcome = None
                if fault.id in last_finders:
                    outcome = tree.run([last_finders[fault.id]], limit_seconds=limit)
                if outcome is None or not outcome.failed:
                    outcome = tree.run(fault.tests, limit_seconds=limit)
        finally:
            free.put(tree)
        answer = _answer(fault, outcome)
        if kept is not None:
            kept.add(fault.id, answer)
        by = f" by {answer['test']}" if answer["test"] else ""
        print(f"{fault.room:<10} {fault.id:<44} {answer['outcome']}{by} ({outcome.seconds:.0f} s)", flush=True)
        if answer["outcome"] == "error":
            print(outcome.tail, file=sys.stderr, flush=True)
        return answer

    with ThreadPoolExecutor(len(trees)) as pool:
        return dict(zip((fault.id for fault in faults), pool.map(attempt, faults), strict=True))


def _answer(fault: Fault, outcome: Outcome) -> dict[str, Any]:
    words = {None: "timed out", 0: "survived", 1: "found"}
    return {
        "room": fault.room,
        "wrong": fault.wrong,
        # With another status pytest has not run them: a fault that nobody can import, or a test that is not there.
        "outcome": words.get(outcome.status, "error"),
        "test": outcome.noticed[0] if outcome.failed and outcome.noticed else None,
        "seconds": round(outcome.seconds, 1),
    }


class _Kept:
    """The answers of one suite, written as they come over its last ones, beside those of others."""

    def __init__(self, suite: str, tree: Path) -> None:
        self._suite, self._one_at_a_time = suite, threading.Lock()
        self._commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
        ).stdout.strip()

    def add(self, name: str, answer: dict[str, Any]) -> None:
        with self._one_at_a_time:
            kept = json.loads(RESULTS.read_text(encoding="utf-8"))["results"] if RESULTS.exists() else {}
            today = datetime.now(UTC).date().isoformat()
            every = kept.get(self._suite, {}).get("faults", {})
            every = {**every, name: {**answer, "commit": self._commit, "date": today}}
            kept[self._suite] = {
                "found": sum(each["outcome"] == "found" for each in every.values()),
                "not_found": sorted(each for each in every if every[each]["outcome"] != "found"),
                "faults": dict(sorted(every.items(), key=lambda entry: (entry[1]["room"], entry[0]))),
            }
            run = {
                "date": today,
                "hardware": {"processor": environment.processor_name(), "cores": environment.num_cores()},
                # Whether anything else was going on: processes that wanted to run, over the last 1, 5 and 15 minutes.
                "load": [round(each, 1) for each in os.getloadavg()],
                "versions": {"shardwise": __version__, **environment.versions_of(("numpy", "torch", "pytest"))},
                "results": kept,
            }
            RESULTS.write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
