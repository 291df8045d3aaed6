"""The plan for serving: how a model is split and replicated, how many sequences at once, and how many KV blocks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import gcd

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.cost.serving import BLOCK, WEIGHT_BYTES, Served, serve
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan, largest_divisor
from shardwise.planner.question import Question
from shardwise.planner.search.axes import divisors
from shardwise.planner.search.nowhere import doubled
from shardwise.planner.search.simplicity import AXIS, ODDITY
from shardwise.units import counted, format_bytes, format_percent, format_seconds

_MOST_SEQUENCES = 4096
# Ways to serve whose predictions differ by less than this share count as equally fast.
_SAME = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The goal of serving: `goal` is tokens or latency; limits are in seconds; `sequences` run at once. With
    `experts_over_all`, experts are spread over all replicas or not at all (vLLM), and each replica has its own
    sequences. Else experts are cut by tp alone: in our engine, ranks that spread experts all have the same sequences,
    and gain nothing over tp."""

    output: int = 256
    goal: str = "tokens"
    first_token: float | None = None
    each_token: float | None = None
    sequences: int | None = None
    experts_over_all: bool = False
    #: Quantisation of layers' weights: a key of `WEIGHT_BYTES`.
    weights: str | None = None

    @property
    def layer_bytes(self) -> float | None:
        return None if self.weights is None else WEIGHT_BYTES[self.weights]


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A way to serve: `plan.dp` replicas, each with `sequences` at once. Rates are sums over all replicas."""

    plan: Plan
    sequences: int
    first_token: float
    each_token: float
    tokens_per_second: float
    weight_bytes: float
    num_blocks: int
    block_bytes: float
    used_blocks: int

    @property
    def mean_token(self) -> float:
        """Mean seconds between two tokens of a sequence, with prefills of other sequences in between."""
        return self.plan.dp * self.sequences / self.tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFindings:
    """The best way to serve, and the best with other splits; `fastest` if another is predicted faster; reasons."""

    question: Question
    target: Target
    best: Serving
    others: tuple[Serving, ...]
    fastest: Serving | None
    reasons: tuple[str, ...]
    num_candidates: int
    num_fitting: int


def find_serving(question: Question, target: Target) -> ServingFindings:
    """Return the best way to serve prompts of `question.sequence` tokens."""
    if target.output < 1:
        raise ShardwiseError(f"answers of {target.output} tokens: they have at least 1", remedy="--output 256")
    columns = _candidates(question, target)
    served = _served(question, target, columns)
    allowed = served.fits.copy()
    if target.first_token is not None:
        allowed &= served.first_token <= target.first_token
    if target.each_token is not None:
        allowed &= served.each_token <= target.each_token
    if not allowed.any():
        raise _refusal(question, target, served)
    total = columns["dp"] * served.tokens_per_second
    seconds = 1.0 / total if target.goal == "tokens" else served.each_token
    ways, splits, fastest = [], set(), int(np.where(allowed, seconds, np.inf).argmin())
    for row in np.lexsort((-total, seconds * _handicap(columns, question.cluster))):
        split = (int(columns["tp"][row]), int(columns["pp"][row]), int(columns["ep"][row]))
        if allowed[row] and split not in splits:
            splits.add(split)
            ways.append((int(row), as_serving(question, target, columns, served, int(row))))
    chosen, best = ways[0]
    faster = seconds[fastest] < seconds[chosen] * (1.0 - _SAME)
    return ServingFindings(
        question=question, target=target, best=best, others=tuple(way for _, way in ways[1:4]),
        fastest=as_serving(question, target, columns, served, fastest) if faster else None,
        reasons=_reasons(question, target, [way for _, way in ways]), num_candidates=len(allowed),
        num_fitting=int(served.fits.sum()),
    )  # fmt: skip


def _served(question: Question, target: Target, columns: dict[str, np.ndarray]) -> Served:
    """Price each candidate. With several pools, it is as slow as on the slowest, and must fit all of them."""
    each = [
        serve(
            question.model, pool, tp=columns["tp"], pp=columns["pp"], ep=columns["ep"], sequences=columns["sequences"],
            prompt=question.sequence, output=target.output, software=question.software_in("bf16"),
            layer_bytes=target.layer_bytes,
        )
        for pool in question.cluster.pools
    ]  # fmt: skip
    return Served(
        first_token=np.max([one.first_token for one in each], axis=0),
        each_token=np.max([one.each_token for one in each], axis=0),
        tokens_per_second=np.min([one.tokens_per_second for one in each], axis=0),
        weight_bytes=each[0].weight_bytes,
        block_bytes=each[0].block_bytes,
        num_blocks=np.min([one.num_blocks for one in each], axis=0),
        fits=np.all([one.fits for one in each], axis=0),
    )


def _handicap(columns: dict[str, np.ndarray], cluster: Cluster) -> np.ndarray:
    """Return the handicap of each candidate, as in training: an axis must gain 3 %, and so must every doubling of tp
    beyond the fast links; experts over only some of the replicas must gain 1 %."""
    domain = min(pool.domain for pool in cluster.pools)
    axes = (columns["tp"] > 1).astype(float) + (columns["pp"] > 1) + np.log2(np.maximum(columns["tp"] / domain, 1.0))
    odd = (columns["ep"] > 1) & (columns["ep"] < columns["dp"])
    return np.asarray((1.0 + AXIS) ** axes * (1.0 + ODDITY) ** odd)


def _reasons(question: Question, target: Target, ways: Sequence[Serving]) -> tuple[str, ...]:
    """Return the reasons for the first way, as sentences: what had to be cut, and what other splits would lose."""
    best, found = ways[0], []
    plan, room = best.plan, question.device.memory_bytes
    weights = _all_weights(question, target)
    link = question.cluster.pools[0].node.link.name
    if plan.tp * plan.pp > 1 and weights > room:
        found.append(f"weights of {format_bytes(weights)} do not fit one device of {format_bytes(room)}")
    if plan.tp > 1:
        found.append(f"{counted(plan.tp, 'device')} at once read the weights of a token, and sum up over {link}")
    if plan.pp > 1:
        found.append(f"{counted(plan.pp, 'stage')} send little to each other; sums over {plan.tp * plan.pp} cost more")
    less_cut = next((way for way in ways if way.plan.tp * way.plan.pp < plan.tp * plan.pp), None)
    piped = next((way for way in ways if way.plan.pp > plan.pp), None)
    if less_cut is not None and target.goal == "tokens":
        found.append(
            f"{_named(less_cut.plan)} would leave room for {less_cut.plan.dp * less_cut.sequences:,} sequences at "
            f"once, not {plan.dp * best.sequences:,}: {_compared(less_cut, best)}"
        )
    if piped is not None and target.goal == "tokens":
        found.append(
            f"a {'longer ' * (plan.pp > 1)}pipeline ({_named(piped.plan)}) waits for the group of sequences that has "
            f"most prompts to read: {_compared(piped, best)}"
        )
    return tuple(found)


def _all_weights(question: Question, target: Target) -> float:
    """Return the bytes of the whole model."""
    in_layers = sum(block.num_parameters * count for block, count in question.model.kinds if block.stack)
    saved = 0.0 if target.layer_bytes is None else (2.0 - target.layer_bytes) * in_layers
    return 2.0 * question.model.num_parameters - saved


def _compared(way: Serving, best: Serving) -> str:
    lost = 1.0 - way.tokens_per_second / best.tokens_per_second
    return f"{format_percent(lost)} fewer tokens" if lost > _SAME else "about as many tokens"


def _named(plan: Plan) -> str:
    """Return the plan's text without its precision, which is the same for all."""
    return str(plan).replace(f",precision={plan.precision}", "")


def _candidates(question: Question, target: Target) -> dict[str, np.ndarray]:
    """Return every split into equal replicas, with 1, 2, 4 and so on sequences at once in each."""
    devices = question.cluster.num_devices
    rows = []
    for tp in divisors(devices):
        for pp in divisors(devices // tp):
            if question.heads % tp or pp > question.model.num_layers:
                continue
            replicas = devices // tp // pp
            for ep in {1, replicas} if target.experts_over_all else {1}:
                if max(question.num_experts, 1) % ep:
                    continue
                split = {"dp": replicas, "tp": tp, "pp": pp, "ep": ep}
                if all(question.fixed.get(axis, size) == size for axis, size in split.items()):
                    rows += [(*split.values(), sequences) for sequences in _sequences(target, replicas)]
    names = ("dp", "tp", "pp", "ep", "sequences")
    if not rows:
        said = ",".join(f"{axis}={size}" for axis, size in question.fixed.items())
        raise ShardwiseError(
            f"no way to serve {question.model.name} on the {counted(devices, 'device')} of {question.cluster} has "
            f"{said}: dp x tp x pp is {devices}, and tp divides {question.heads} heads",
            remedy=f"--fix tp={largest_divisor(gcd(devices, question.heads), devices)}",
        )
    return {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _sequences(target: Target, replicas: int) -> Sequence[int]:
    if target.sequences is not None:
        return (max(-(-target.sequences // replicas), 1),)
    return [2**power for power in range(_MOST_SEQUENCES.bit_length())]


def as_serving(question: Question, target: Target, columns: dict[str, np.ndarray], served: Served, row: int) -> Serving:
    """Return one candidate as a way to serve."""
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
        least = float(served.weight_bytes.min())
        larger = next(
            (each for each in doubled(cluster) if _could_serve(replace(question, cluster=each), target)), None
        )
        more = f"more devices than {cluster.num_devices}" if larger is None else f"--cluster {larger}"
        narrower = [kind for kind in WEIGHT_BYTES if target.weights is None and not target.experts_over_all]
        found = (kind for kind in narrower if _could_serve(question, replace(target, weights=kind)))
        more = ", or ".join((more, *(f"--weights {kind}" for kind in islice(found, 1))))
        said = "in bf16" if target.weights is None else f"with layers in {target.weights}"
        return ShardwiseError(
            f"{model} cannot be served on {cluster}: its weights {said} take {format_bytes(least)} on each device at "
            f"least, of {format_bytes(question.device.memory_bytes)}, and keys and values of "
            f"{question.sequence + target.output} tokens need room too",
            remedy=more if least > question.device.memory_bytes else f"{more}, or shorter sequences",
        )
    first, each = (float(times[served.fits].min()) for times in (served.first_token, served.each_token))
    return ShardwiseError(
        f"no way to serve {model} on {cluster} keeps the limits: the soonest first token takes "
        f"{format_seconds(first)}, the soonest next one {format_seconds(each)}",
        remedy=f"--first-token {format_seconds(first * 1.1).replace(' ', '')}"
        f" --each-token {format_seconds(each * 1.1).replace(' ', '')}",
    )


def _could_serve(question: Question, target: Target) -> bool:
    """Whether any way fits, whatever was decided of the split."""
    free = replace(question, fixed={})
    return bool(_served(free, target, _candidates(free, target)).fits.any())
