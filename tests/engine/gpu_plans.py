"""Small plans on one GPU, held against plain torch there."""

from collections.abc import Sequence

from shardwise.ranks.gpus import Gpus
from shardwise.ranks.spawn import Ranks
from tests.engine import gpu_ranks


def differences(num_ranks: int, gpus: Gpus, plans: Sequence[str]) -> list[str]:
    """What is wrong with which plan: its losses and weights differ, or it fails."""
    losses, weights = gpu_ranks.train_plain()
    wrong: list[str] = []
    left = list(plans)
    while left:
        # After a failure there are new ranks, and the plans after it are tried all the same.
        with Ranks(num_ranks, gpus=gpus) as ranks:
            try:
                found = ranks.run(gpu_ranks.train_plans, left, timeout_seconds=500)
            except Exception as error:
                found = [{left[0]: f"{type(error).__name__}: {error}"}]
        for plan, told in found[0].items():
            left.remove(plan)
            if isinstance(told, str):
                wrong.append(f"{plan}: {told}")
                continue
            worst = max(abs(ours - theirs) for ours, theirs in zip(told[0], losses, strict=True))
            apart = max(float((told[1][name] - each).abs().max()) for name, each in weights.items())
            if worst > 1e-5 or apart > 1e-5:
                wrong.append(f"{plan}: losses are {worst:.2g} apart, weights {apart:.2g}")
    return wrong
