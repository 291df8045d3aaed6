"""Whether the losses of two parts determine that of the whole."""

from shardwise.stages.loss_kind import LossKind
from shardwise.stages.trial_rows import FIRST, NUM_ROWS
from shardwise.stages.trial_run import Run


def fits_by(
    weight: float, other: float, whole: Run, large: Run, small: Run, *, slack: float = 1.0, over: float | None = None
) -> bool:
    """Whether the whole is the mean of the parts with these weights, up to rounding; `slack` scales the tolerance. The
    weighted sum is divided by the sum of the weights, or by what it is `over`."""
    if not weight + other:
        return False
    wanted = (weight * large.total + other * small.total) / (weight + other if over is None else over)
    most = max(abs(each.total) for each in (whole, large, small))
    return abs(whole.total - wanted) <= slack * whole.tolerance * most


def fits(kind: LossKind, whole: Run, large: Run, small: Run) -> bool:
    """Whether the parts give the whole as this kind says, up to rounding."""
    if kind is LossKind.SUM:
        return fits_by(1, 1, whole._replace(total=whole.total / 2), large, small)
    weight, other = (large.counts[0], small.counts[0]) if kind is LossKind.LABELS else (FIRST, 1)
    return fits_by(weight, other, whole, large, small)


def is_mean(weight: float, other: float, whole: Run, large: Run, small: Run) -> bool:
    """Whether the whole is a mean of the parts and no sum: with these weights, or over labels and nearer to a mean."""
    if not whole.counts:
        return fits_by(weight, other, whole, large, small)
    middle = (large.total + small.total) / 2
    return abs(whole.total - middle) < abs(whole.total - 2 * middle)


def mismatch(whole: Run, large: Run, small: Run, number: int = NUM_ROWS, first: int = FIRST) -> str:
    return (
        f"the loss of {number} rows is {whole.total:.6g}, of {first} of them {large.total:.6g} and of the other"
        f" {small.total:.6g}: it is neither their mean by rows nor their sum, so parts of a batch do not tell its loss"
    )
