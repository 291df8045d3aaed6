"""How good `auto` is: span bubble against the named schedules and the bounds, for the settings of the design's figures.

Times are (F, I, W) = (1, 1.2, 0.8) and a hop is 0.05 unless said otherwise. Every answer is proven by `verify` under
its memory limit and measured by the simulator, never by the search itself.
"""

import sys
from itertools import pairwise

from record import record

from shardwise.schedule.outcome import Outcome, make, play_out
from shardwise.schedule.question import Question, make_question


def ask(num_ranks: int, num_microbatches: int, memory: float | None, stage_times: str | None = None) -> Question:
    return make_question(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        times=None if stage_times else "1,1.2,0.8",
        stage_times=stage_times,
        hop="0.05",
        memory=None if memory is None else str(memory),
    )


def measure(name: str, question: Question) -> Outcome:
    return play_out(make(name, question), question)


def with_twice_the_memory() -> list[dict[str, object]]:
    rows = []
    for ranks in (4, 8, 16):
        question = ask(ranks, 3 * ranks, 2 * ranks)
        outcome, rival = measure("auto", question), measure("zb-h2", question)
        rows.append({"ranks": ranks, "auto": outcome.bubble, "zb-h2": rival.bubble, "limit": 0.015})
    return rows


def with_memory_of_1f1b() -> list[dict[str, object]]:
    rows = []
    for ranks in (4, 8, 16):
        question = ask(ranks, 3 * ranks, ranks)
        rivals = {name: measure(name, question).bubble for name in ("zb-h1", "zb-v")}
        rows.append({"ranks": ranks, "auto": measure("auto", question).bubble, **rivals, "limit": min(rivals.values())})
    return rows


def between_v_min_and_1f1b() -> list[dict[str, object]]:
    rows = []
    for ranks in (4, 8, 16):
        limits = range((ranks + 4) // 3, ranks + 1)
        bubbles = [measure("auto", ask(ranks, 3 * ranks, limit)).bubble for limit in limits]
        falls = all(later <= earlier + 1e-12 for earlier, later in pairwise(bubbles))
        rows.append({"ranks": ranks, "memory": list(limits), "auto": bubbles, "monotone": falls})
    return rows


def with_one_slow_stage(folder: str) -> list[dict[str, object]]:
    rows = []
    for ranks in (4, 8):
        for slow in range(ranks):
            path = f"{folder}/times-{ranks}-{slow}.csv"
            with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - a scratch file
                file.writelines("1.5,1.8,1.2\n" if rank == slow else "1,1.2,0.8\n" for rank in range(ranks))
            question = ask(ranks, 4 * ranks, 2 * ranks, path)
            bound = 4 * ranks * 4.5
            outcome = measure("auto", question)
            over = {"span": outcome.span / bound - 1, "makespan": outcome.makespan / bound - 1}
            rows.append({"ranks": ranks, "slow": slow, "over the bound": over, "limit": 0.05})
    return rows


def main() -> int:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        results = {
            "memory 2p, m = 3p": with_twice_the_memory(),
            "memory p, m = 3p": with_memory_of_1f1b(),
            "memory from V-Min's to p, m = 3p": between_v_min_and_1f1b(),
            "one stage 1.5 x slower, memory 2p, m = 4p": with_one_slow_stage(folder),
        }
    failures = 0
    for title, rows in results.items():
        print(title)
        for row in rows:
            print("  " + ", ".join(f"{key} {_show(value)}" for key, value in row.items()))
            failures += not _holds(row)
    record("auto_quality", results)
    print("all figures hold" if not failures else f"{failures} figures do not hold")
    return 1 if failures else 0


def _holds(row: dict[str, object]) -> bool:
    if "monotone" in row:
        return bool(row["monotone"])
    over = row.get("over the bound")
    value = max(over.values()) if isinstance(over, dict) else row["auto"]
    assert isinstance(value, float)
    limit = row["limit"]
    assert isinstance(limit, float)
    return value <= limit + 1e-9


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, list):
        return "[" + " ".join(map(_show, value)) + "]"
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_show(each)}" for key, each in value.items()) + ")"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
