"""How many queues ranks may have under MPS: sums of 4 MB, and a pipeline, with some numbers of ranks and queues.

python -m tests.gpu.mps_trial                   2 x 32, 4 x 16, 4 x 24, 8 x 8, 8 x 12
python -m tests.gpu.mps_trial 2x32 8x8
"""

import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.parity.ranks import train_on_rank
from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.testing.mps import shared_at_once
from tests.parity.models import make_problem

_PLANS = {
    2: "pp=2,schedule=zb-v,microbatches=4",
    4: "dp=2,pp=2,ep=2,schedule=zb-v,microbatches=2",
    8: "tp=2,pp=2,cp=2,ep=2,sp=true,microbatches=2",
}
_USUAL = ["2x32", "4x16", "4x24", "8x8", "8x12"]


def add_up() -> float:
    """Milliseconds of a sum of 4 MB."""
    numbers = torch.ones(2**20, device="cuda")
    for _ in range(3):
        dist.all_reduce(numbers)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(numbers)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 100


def train(text: str) -> float:
    plan = Plan.parse(text)
    model = "experts" if plan.ep > 1 else "tied"
    start = time.perf_counter()
    train_on_rank(plan, make_problem(model, plan), looks="never", finds_uses=False)
    return time.perf_counter() - start


def main(words: Sequence[str]) -> int:
    if not torch.cuda.is_available():
        print("no GPU was found: nothing was tried", file=sys.stderr)
        return 1
    torch.zeros(1, device="cuda")  # Before MPS: this process outlives it.
    for word in words or _USUAL:
        count, queues = map(int, word.split("x"))
        start = time.perf_counter()
        with shared_at_once(queues) as at_once, Ranks(count, gpus="shared") as ranks:
            told = [f"{count} ranks x {queues} queues", "MPS" if at_once else "MPS could not be started"]
            try:
                told.append(f"4 MB in {max(ranks.run(add_up, timeout_seconds=60)):.1f} ms")
                for turn in ("first", "again"):
                    seconds = max(ranks.run(train, _PLANS[count], timeout_seconds=60))
                    told.append(f"{_PLANS[count]} {turn} {seconds:.1f} s")
            except Exception as error:
                told.append(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")
        print(", ".join(told), f"({time.perf_counter() - start:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
