"""The plans that cases are drawn for, and what of a module fits one."""

import random
from collections.abc import Callable, Iterator
from typing import Any

from shardwise.planner.plan import Plan

#: How often each is drawn. Most have two ranks: what differs with four differs with two.
PLANS: dict[str, int] = {
    "dp=2": 2, "dp=2,zero=1": 3, "dp=2,zero=2": 2, "dp=2,zero=3": 4, "dp=2,microbatches=2": 2,
    "dp=2,recompute=full": 2, "dp=2,offload.optimizer=1.0": 2, "dp=2,offload.parameters=1.0": 2,
    "dp=2,offload.activations=1.0": 1, "dp=2,microbatches=2,zero=2": 1,
    "tp=2": 14, "tp=2,sp=true": 5, "tp=2,microbatches=2": 2, "tp=2,recompute=full": 2, "tp=2,offload.optimizer=1.0": 1,
    "pp=2,microbatches=2": 4, "pp=2,schedule=gpipe,microbatches=4": 2, "pp=2,schedule=zb-h1,microbatches=4": 2,
    "pp=2,microbatches=4,recompute=full": 2, "pp=2,schedule=interleaved,microbatches=4": 2,
    "pp=2,schedule=zb-v,microbatches=4": 2, "pp=2,schedule=dualpipe-v,microbatches=4": 1,
    "pp=2,microbatches=2,offload.optimizer=1.0": 1,
    "cp=2": 4, "cp=2,context=all-to-all": 2, "cp=2,zero=1": 1,
    "dp=2,ep=2": 3, "dp=2,ep=2,zero=1": 2,
    "dp=2,tp=2": 2, "dp=2,tp=2,zero=3": 2, "dp=2,tp=2,sp=true,zero=1": 1, "dp=2,pp=2,microbatches=2": 1,
    "dp=2,pp=2,microbatches=2,zero=1": 2, "tp=2,pp=2,microbatches=2": 2, "tp=4": 1, "dp=4,zero=3": 1,
    "dp=2,cp=2": 1, "tp=2,cp=2": 1, "pp=2,cp=2,microbatches=2": 1, "dp=4,ep=2": 1, "dp=2,ep=2,tp=2": 1,
}  # fmt: skip


def draw(rng: random.Random) -> str:
    (plan,) = rng.choices(list(PLANS), list(PLANS.values()))
    return plan


def num_ranks_of(plan: str) -> int:
    return Plan.parse(plan).num_ranks


def num_stages_of(plan: str) -> int:
    parsed = Plan.parse(plan)
    return 1 if parsed.pp == 1 else parsed.num_stages or parsed.pp


def kind_of(plan: str) -> str:
    """What a plan is counted as: its axes, and its ZeRO stage."""
    keys = [part.partition("=")[0] for part in plan.split(",")]
    axes = [key for key in ("dp", "tp", "pp", "cp", "ep") if key in keys]
    more: list[str] = [key for key in ("sp", "zero", "recompute") if key in keys]
    more += ["offload"] if any(key.startswith("offload") for key in keys) else []
    return " x ".join(axes) + "".join(f", {key}" for key in more)


def fitting(plan: str) -> Callable[[Any], bool]:
    """Which operations are drawn for a plan. Under cp most leave tokens to torch's attention: others are refused."""
    if "cp" not in plan:
        return lambda _: True
    count = iter(range(10**9))
    return lambda each: not each.mixes_tokens() or next(count) % 40 == 39


def simpler(plan: str) -> Iterator[str]:
    """Plans with an entry less."""
    parts = plan.split(",")
    for at in range(len(parts)):
        left = ",".join(parts[:at] + parts[at + 1 :])
        try:
            if left and num_ranks_of(left) > 1:
                yield left
        except Exception:
            continue
