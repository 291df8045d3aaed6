"""The plan for serving: how a model is split and replicated, how many sequences at once, and how many KV blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.cost.serving import BLOCK, Served, serve
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.planner.question import Question
from shardwise.planner.search.axes import divisors
from shardwise.units import counted, format_bytes, format_seconds

_MOST_SEQUENCES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is wanted of serving: `goal` is tokens or latency; the limits are seconds, and `sequences` at once. With
    `experts_over_all`, experts are shared out over all replicas or not at all (vLLM)."""

    output: int = 256
    goal: str = "tokens"
    first_token: float | None = None
    each_token: float | None = None
    sequences: int | None = None
    experts_over_all: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A way to serve: `plan.dp` replicas, each with so many sequences at once. Rates are of all replicas together."""

    plan: Plan
    sequences: int
    first_token: float
    each_token: float
    tokens_per_second: float
    weight_bytes: float
    num_blocks: int
    block_bytes: float
    used_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFindings:
    """The best way, and the best with other splits."""

    question: Question
    target: Target
    best: Serving
    others: tuple[Serving, ...]
    num_candidates: int
    num_fitting: int


def find_serving(question: Question, target: Target) -> ServingFindings:
    """The best way to serve prompts of `question.sequence` tokens."""
    columns = _candidates(question, target)
    pool = question.cluster.pools[0]
    served = serve(
        question.model, pool, tp=columns["tp"], pp=columns["pp"], ep=columns["ep"], sequences=columns["sequences"],
        prompt=question.sequence, output=target.output, software=question.software_in("bf16"),
    )  # fmt: skip
    allowed = served.fits.copy()
    if target.first_token is not None:
        allowed &= served.first_token <= target.first_token
    if target.each_token is not None:
        allowed &= served.each_token <= target.each_token
    if not allowed.any():
        raise _refusal(question, target, served)
    score = -columns["dp"] * served.tokens_per_second if target.goal == "tokens" else served.each_token
    ways, splits = [], set()
    for row in np.lexsort((-columns["dp"] * served.tokens_per_second, score)):
        split = (int(columns["tp"][row]), int(columns["pp"][row]), int(columns["ep"][row]))
        if allowed[row] and split not in splits:
            splits.add(split)
            ways.append(as_serving(question, target, columns, served, int(row)))
    return ServingFindings(
        question=question, target=target, best=ways[0], others=tuple(ways[1:4]), num_candidates=len(allowed),
        num_fitting=int(served.fits.sum()),
    )  # fmt: skip


def _candidates(question: Question, target: Target) -> dict[str, np.ndarray]:
    """Every split into equal replicas, with 1, 2, 4 and so on sequences at once in each."""
    devices = question.cluster.num_devices
    rows = []
    for tp in divisors(devices):
        for pp in divisors(devices // tp):
            if question.heads % tp or pp > question.model.num_layers:
                continue
            replicas = devices // tp // pp
            for ep in divisors(question.num_experts) if question.num_experts > 1 else (1,):
                if replicas % ep or (target.experts_over_all and ep not in (1, replicas)):
                    continue
                rows += [(replicas, tp, pp, ep, sequences) for sequences in _sequences(target, replicas)]
    names = ("dp", "tp", "pp", "ep", "sequences")
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _sequences(target: Target, replicas: int) -> Sequence[int]:
    if target.sequences is not None:
        return (max(-(-target.sequences // replicas), 1),)
    return [2**power for power in range(_MOST_SEQUENCES.bit_length())]


def as_serving(question: Question, target: Target, columns: dict[str, np.ndarray], served: Served, row: int) -> Serving:
    """One candidate of many as a way to serve."""
    replicas, sequences = int(columns["dp"][row]), int(columns["sequences"][row])
    each = float(served.each_token[row])
    total = replicas * float(served.tokens_per_second[row])
    blocks = int(served.num_blocks[row])
    plan = Plan(
        dp=replicas, tp=int(columns["tp"][row]), pp=int(columns["pp"][row]),
        ep=int(columns["ep"][row]), precision="bf16",
        reasons={
            "tp": f"{counted(int(columns['tp'][row]), 'device')} at once read the weights of a token",
            "dp": f"{counted(replicas, 'replica')} answer {total:,.0f} tokens a second",
        },
    )  # fmt: skip
    per_sequence = -(-(question.sequence + target.output) // BLOCK)
    return Serving(
        plan=plan, sequences=sequences, first_token=float(served.first_token[row]), each_token=each,
        tokens_per_second=total, weight_bytes=float(served.weight_bytes[row]), num_blocks=blocks,
        block_bytes=float(served.block_bytes[row]), used_blocks=per_sequence * sequences,
    )  # fmt: skip


def _refusal(question: Question, target: Target, served: Served) -> ShardwiseError:
    model, cluster = question.model.name, question.cluster
    if not served.fits.any():
        least = format_bytes(float(served.weight_bytes.min()))
        return ShardwiseError(
            f"{model} cannot be served on {cluster}: its weights take {least} on each device at least, of "
            f"{format_bytes(question.device.memory_bytes)}, and keys and values of {question.sequence + target.output} "
            "tokens need room too",
            remedy=f"more devices than {cluster.num_devices}, or shorter sequences",
        )
    first, each = (float(times[served.fits].min()) for times in (served.first_token, served.each_token))
    return ShardwiseError(
        f"no way to serve {model} on {cluster} keeps the limits: the soonest first token takes "
        f"{format_seconds(first)}, the soonest next one {format_seconds(each)}",
        remedy=f"--first-token {format_seconds(first * 1.1).replace(' ', '')}"
        f" --each-token {format_seconds(each * 1.1).replace(' ', '')}",
    )
