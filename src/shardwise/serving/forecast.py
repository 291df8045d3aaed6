"""Predict serving performance with the planner's cost model, and choose a plan.

Latency and throughput need different plans: replicas give the most tokens per second, while ranks that compute a token
together (tensor parallelism) give the lowest latency. `--goal` chooses between the two. Predictions assume prompts of
one length, with all slots in use.
"""

from dataclasses import replace

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.cost.serving import WEIGHT_BYTES, serve
from shardwise.errors import ShardwiseError
from shardwise.model.load import load_model
from shardwise.model.model import Model
from shardwise.nets.hf.catalogue import config_for
from shardwise.nets.settings import Settings
from shardwise.planner.plan import Plan
from shardwise.planner.question import Question
from shardwise.planner.serving import Serving, Target, find_serving
from shardwise.serving.shards import Shard, check_shard
from shardwise.serving.summary import Forecast
from shardwise.training.machine import cluster_here
from shardwise.units import counted

GOALS = ("tokens", "latency")
#: The workload of predictions: tokens of prompts and of answers, where the model's length allows.
_PROMPT, _OUTPUT = 512, 128


def priced_model(settings: Settings) -> Model:
    """Return the model as the planner describes it. The layout of rotary pairs does not affect the cost."""
    rope = None if settings.rope is None else replace(settings.rope, interleaved=False)
    return load_model(config_for(replace(settings, rope=rope))[1])


def lengths_for(max_length: int) -> tuple[int, int]:
    """Return the lengths of the prompt and the answer used for predictions."""
    if max_length >= _PROMPT + _OUTPUT:
        return _PROMPT, _OUTPUT
    return max(max_length * 4 // 5, 1), max(max_length // 5, 1)


def forecast(
    settings: Settings, cluster: Cluster, plan: Plan, *, num_blocks: int, block_size: int, max_running: int, width: int,
    weights: str | None = None,
) -> Forecast:  # fmt: skip
    """Predict a given plan with `num_blocks` per replica and values of `width` bytes; with `weights`, the layers'
    weights are quantised to that kind."""
    prompt, output = lengths_for(min(settings.length, num_blocks * block_size))
    sequences = max(min(max_running, num_blocks // -(-(prompt + output) // block_size)), 1)
    question = Question(model=priced_model(settings), cluster=cluster, batch=1, sequence=prompt)

    def one(count: int) -> np.ndarray:
        return np.array([count])

    served = serve(
        question.model, cluster.pools[0], tp=one(plan.tp), pp=one(plan.pp), ep=one(plan.ep), sequences=one(sequences),
        prompt=prompt, output=output, software=question.software_in("fp32" if width == 4 else "bf16"), width=width,
        layer_bytes=None if weights is None else WEIGHT_BYTES[weights],
    )  # fmt: skip
    return Forecast(
        prompt=prompt,
        output=output,
        sequences=sequences,
        first_token_seconds=float(served.first_token[0]),
        each_token_seconds=float(served.each_token[0]),
        tokens_per_second=float(served.tokens_per_second[0]) * (plan.dp // plan.ep),
    )


def forecast_here(
    settings: Settings, plan: Plan | None, *, num_blocks: int, block_size: int, max_running: int, width: int,
    weights: str | None = None,
) -> Forecast | None:  # fmt: skip
    """Predict for this machine; None where the planner does not know its devices or the model."""
    plan = plan or Plan()
    try:
        return forecast(
            settings, cluster_here(plan.num_ranks), plan, num_blocks=num_blocks, block_size=block_size,
            max_running=max_running, width=width, weights=weights,
        )  # fmt: skip
    except ShardwiseError:
        return None


def choose_plan(settings: Settings, cluster: Cluster, goal: str = "tokens", max_length: int | None = None) -> Plan:
    """Return the best plan for a goal that uses all devices of a cluster, among those that this engine supports."""
    if cluster.num_devices == 1:
        return Plan()
    prompt, output = lengths_for(max_length or settings.length)
    question = Question(model=priced_model(settings), cluster=cluster, batch=1, sequence=prompt)
    found = find_serving(question, Target(output=output, goal=goal))
    able = [way for way in (found.best, *found.others) if _is_cut_so(settings, way)]
    if not able:
        raise ShardwiseError(
            f"none of the plans that are predicted to be best can be served: {found.best.plan} and"
            f" {counted(len(found.others), 'other')}",
            remedy="--plan with tp that divides the heads, or pp",
        )
    return replace(able[0].plan, precision=Plan().precision)


def _is_cut_so(settings: Settings, way: Serving) -> bool:
    try:
        check_shard(settings, Shard(tp=way.plan.tp, pp=way.plan.pp, ep=way.plan.ep))
    except ShardwiseError:
        return False
    return True


def deal_layers(num_layers: int, speeds: list[float], rooms: list[float], layer_bytes: float) -> tuple[int, ...]:
    """Return the number of layers of each stage, so that the slowest stage takes least and each fits its memory.

    Greedy: each layer goes to the stage that it delays least, among those that still have room.
    """
    counts = [0] * len(speeds)
    for _ in range(num_layers):
        able = [stage for stage, room in enumerate(rooms) if (counts[stage] + 1) * layer_bytes <= room]
        if not able:
            raise ShardwiseError(
                f"{num_layers} layers of {layer_bytes / 2**30:.2f} GiB do not fit the"
                f" {sum(rooms) / 2**30:.1f} GiB that the stages have",
                remedy="more ranks, or fewer bits: --weights int4",
            )
        counts[min(able, key=lambda stage: ((counts[stage] + 1) / speeds[stage], stage))] += 1
    if 0 in counts:  # Every stage needs a layer; without one it would only forward its input.
        counts[counts.index(max(counts))] -= counts.count(0)
        counts = [count or 1 for count in counts]
    return tuple(counts)
