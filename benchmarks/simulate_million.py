"""How long a schedule of a million instructions takes: its transfers inserted, then played."""

import sys
from time import perf_counter

from record import record

from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.passes.lower import lower
from shardwise.schedule.prices import StageTimes, stage_prices
from shardwise.schedule.simulate import play

_LIMIT_SECONDS = 10.0


def measure(name: str, num_ranks: int, num_microbatches: int) -> dict[str, object]:
    schedule = make_schedule(name, num_ranks, num_microbatches)
    start = perf_counter()
    complete = lower(schedule)
    inserted = perf_counter()
    trace = play(complete, stage_prices(complete.placement, [StageTimes()] * num_ranks, hops=[0.05]))
    played = perf_counter()
    return {
        "schedule": name,
        "ranks": num_ranks,
        "microbatches": num_microbatches,
        "instructions": complete.num_instructions,
        "seconds to insert transfers": inserted - start,
        "seconds to simulate": played - inserted,
        "makespan": trace.makespan,
    }


def main() -> int:
    rows = [measure("1f1b", 8, 22_728), measure("zb-v", 16, 5_300)]
    for row in rows:
        insert, seconds = row["seconds to insert transfers"], row["seconds to simulate"]
        what = f"{row['schedule']:5} {row['instructions']:>9,} instructions"
        print(f"{what}: insert {insert:.2f} s, simulate {seconds:.2f} s")
    record("simulate_million", {"limit": _LIMIT_SECONDS, "rows": rows})
    return 0 if all(float(str(row["seconds to simulate"])) <= _LIMIT_SECONDS for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
