"""Find what a forward leaves for the next one, where the next one computes another loss with it: the vectors of a
spectral norm, a codebook that follows its rows, a warm-up that counts forwards.

Microbatches are forwards of one step, so each computes with what the one before has left, as with gradient accumulation
on one device. One forward of the whole batch would compute something else.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardwise.errors import some
from shardwise.stages.moved_weights import moved_weights
from shardwise.stages.no_collectives import CollectiveMetError
from shardwise.stages.rows import Seen
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.python_state import PythonState
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.steady_draws import steady_for
from shardwise.stages.trial_rows import three_rows
from shardwise.stages.trial_run import Context, Trial, is_finite


def find_carried(
    module: nn.Module, loss: Loss, example: Batch, seen: Seen, precision: Context, at_first: Context
) -> str | None:
    """Describe what forwards in training mode leave, if the loss of the same rows is another after a forward of them.

    They are run with other weights too: the vectors of a spectral norm begin as those of its weight. Batch norms are
    left out: what they leave is not read in training mode.
    """
    three = three_rows(example, seen)
    found = _left(Trial(module, loss, precision, at_first=at_first), three)
    if found is not None:
        return found
    with moved_weights(module) as is_moved:
        return _left(Trial(module, loss, precision, at_first=at_first), three) if is_moved else None


def _left(trial: Trial, three: Batch) -> str | None:
    module = trial.module
    left: dict[str, str] = {}

    @contextmanager
    def steadily() -> Iterator[None]:
        with steady_for(module):
            yield

    @contextmanager
    def after_another() -> Iterator[None]:
        with steady_for(module):
            kept = PythonState(module, with_buffers=True)
            args, kwargs = Signature(module).arguments(three)
            module(*args, **kwargs)
            left.update(kept.changed())
            yield

    try:
        one, next_one = (trial.run(three, training=True, within=each) for each in (steadily, after_another))
    except CollectiveMetError:
        raise
    except Exception:  # If something is wrong, the run of the whole example will report it.
        return None
    is_told = is_finite(one) and is_finite(next_one) and not (one.has_drawn or next_one.has_drawn)
    if not left or not is_told or abs(next_one.total - one.total) <= one.tolerance * abs(one.total):
        return None
    return some([f"{name} ({words})" for name, words in left.items()])
