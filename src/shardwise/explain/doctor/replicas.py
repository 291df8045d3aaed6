"""Exposed communication: gradient reductions over replicas, gathers of weights, and collectives inside layers."""

from collections.abc import Iterator

from shardwise.explain.doctor.case import GRADIENT_SUM, Case, Finding
from shardwise.trace.stretches import Part
from shardwise.units import format_bytes

_MUCH_EXPOSED = 0.05
_SMALL_BUCKET = 256 * 1024
_USUAL_BUCKET = 32 * 2**20
_MANY_BUCKETS = 8
_GATHER, _NORM = "a gather of parameters", "the norm of the gradients"
_IN_LAYERS = ("all_reduce of", "all_gather of", "reduce_scatter of", "all_to_all of", "send of")


def find_exposed_sum(case: Case) -> Iterator[Finding]:
    """Gradients whose sums over replicas are not hidden behind the backward."""
    exposed = case.waits(GRADIENT_SUM)
    if exposed < _MUCH_EXPOSED * case.step_seconds:
        return
    evidence = f"ranks stand still for {case.time(exposed)} each ({case.share(exposed)}) while gradients are summed"
    # Layers that are cut have sums of their own, and traffic does not say whose a sum is.
    if all(case.size(axis) == 1 for axis in ("tp", "cp", "ep")):
        sums = [each for each in case.trace.traffic if each.kind in ("all_reduce", "reduce_scatter")]
        num_calls = sum(each.num_messages for each in sums) / case.trace.num_ranks
        num_bytes = sum(each.num_bytes for each in sums) / case.trace.num_ranks
        mean_bytes = num_bytes / num_calls if num_calls else 0.0
        if num_calls:
            evidence += f": on each, {num_calls:.0f} sums of {format_bytes(mean_bytes)} on average in a step"
        if num_calls > _MANY_BUCKETS and mean_bytes < _SMALL_BUCKET:
            needed = max(1.0, num_bytes / _USUAL_BUCKET)
            yield Finding(
                kind="small buckets",
                problem="gradients are summed in buckets that are too small",
                evidence=evidence,
                fix=_larger_buckets(case),
                gain_seconds=exposed * (1 - needed / num_calls),
            )
            return
    yield Finding(
        kind="exposed sum",
        problem="the sum of the gradients over replicas is not hidden",
        evidence=evidence,
        fix=f"microbatches={2 * case.num_microbatches} and --set batch={_twice_the_batch(case)}: one sum for twice the"
        " tokens",
        gain_seconds=exposed / 2,
    )


def _larger_buckets(case: Case) -> str:
    """Return what to type for larger buckets. With zero=3 a bucket is one layer, so that is zero=2."""
    if case.plan.get("zero") == "3":
        return "zero=2"
    return f"--set bucket_bytes={_USUAL_BUCKET}   (in a script: parallelize(..., bucket_bytes={_USUAL_BUCKET}))"


def _twice_the_batch(case: Case) -> str:
    """Return twice the batch, as a number if the run records its rows."""
    rows = case.run.facts.get("batch", "")
    return str(2 * int(rows)) if rows.isdecimal() else "ROWS, twice as many as now"


def find_exposed_gather(case: Case) -> Iterator[Finding]:
    """Sharded weights that are waited for."""
    exposed = case.waits(_GATHER)
    zero = case.size("zero") if "zero" in case.plan else 0
    replicas = case.size("dp") * case.size("cp")
    # zero=2 keeps weights where they were gathered; zero=0 has no gathers, and every replica updates all weights.
    fewer = 2 if zero >= 3 else 0
    owners = ("parameters",) if fewer else ("optimizer",)
    more_bytes = (replicas - 1) * max((sum(map(peak.get, owners, [0.0])) for peak in case.held), default=0.0)
    gain = exposed if fewer else exposed - (replicas - 1) * case.mean(Part.OPTIMIZER)
    if exposed >= _MUCH_EXPOSED * case.step_seconds and case.is_worth(gain) and case.has_room(more_bytes):
        yield Finding(
            kind="exposed gather",
            problem="weights are waited for",
            evidence=f"ranks stand still for {case.time(exposed)} each ({case.share(exposed)}) for gathers of weights",
            fix=f"zero={fewer}",
            gain_seconds=gain,
        )


def find_exposed_layers(case: Case) -> Iterator[Finding]:
    """Tensor, context and expert parallel ranks that wait for each other inside of layers."""
    exposed = case.waits(*_IN_LAYERS)
    if exposed < 2 * _MUCH_EXPOSED * case.step_seconds or not case.has_room(case.fullest_bytes):
        return
    axis = next((axis for axis in ("tp", "cp", "ep") if case.size(axis) > 1), "tp")
    size = max(case.size(axis), 2)
    half = size // 2
    less = 1 - (half - 1) / half / ((size - 1) / size)
    fix = f"{axis}={half}" if axis == "ep" else f"{axis}={half},dp={case.size('dp') * (size // half)}"
    if axis == "tp" and half == 1 and case.plan.get("sp", "").lower() == "true":
        fix += ",sp=false"
    yield Finding(
        kind="exposed layers",
        problem=f"ranks wait for each other inside of layers ({axis}={size})",
        evidence=f"they stand still for {case.time(exposed)} each, {case.share(exposed)} of the step, in collectives",
        fix=fix,
        gain_seconds=exposed * less,
    )


def find_synchronisation(case: Case) -> Iterator[Finding]:
    """Yield a sum over all ranks between the backward and the step, which clipping requires."""
    exposed = case.waits(_NORM, by_all=True)
    if exposed >= _MUCH_EXPOSED * case.step_seconds:
        yield Finding(
            kind="synchronisation",
            problem="all ranks wait for the norm of the gradients",
            evidence=f"clipping wants it, and it takes {case.time(exposed)}, {case.share(exposed)} of the step",
            fix="--set optimizer.clip=0",
            gain_seconds=exposed,
        )
