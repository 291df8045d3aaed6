"""Test a module on parts of sequences before training: a part must give the numbers that the whole gives there.

Attention sees the tokens of all ranks. Any other operation that mixes tokens (a shift, a mean over them, positions
counted in the forward) would silently mix only those of one rank. So a copy with random weights (`stand_in.py`) is run
on a few tokens: whole on every rank, then by all ranks together, each on its part. The outputs of modules and the loss
are compared. Dropout is off in both runs.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.nets.moe import MoE
from shardwise.ranks.collectives import Group
from shardwise.sharding.block_watch import BlockWatch
from shardwise.sharding.context.parallel import ContextParallel
from shardwise.sharding.stand_in import another, converted, fitting, stand_in, tensors_in
from shardwise.sharding.zigzag import zigzag_shard
from shardwise.stages.batch import home_of
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.meta import Guesses, meta_twin
from shardwise.stages.split.python_state import leaves_classes, left_as_it_was
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.steady_draws import SteadyDraws, SteadyDropout, sets_seed
from shardwise.torch_private import pytree
from shardwise.units import format_percent

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
#: About how many tokens of a sequence are tried.
_TOKENS = 12


@dataclass(kw_only=True)
class _Course:
    """The results of a forward: the output of each module in order of completion, the output, and the loss."""

    made: list[tuple[str, Tensor]] = field(default_factory=list)
    output: list[Tensor] = field(default_factory=list)
    #: The loss as a sum and its count; or the exception that the loss raised.
    loss: tuple[float, float] | None = None
    raised: Exception | None = None
    #: Integer buffers, which may count tokens.
    counted: dict[str, Tensor] = field(default_factory=dict)


class Alike(NamedTuple):
    """Whether a module could be tried on parts of sequences; and why it cannot have padded ones, if it cannot."""

    is_tried: bool
    padded: ShardwiseError | None = None


@leaves_classes
def try_parts(module: nn.Module, make: Callable[[], ContextParallel], batch: Batch, loss: Loss | None) -> Alike:
    """Refuse a module whose result on parts of sequences differs from that on whole ones.

    Padding is tried as well: `x.flip(1)` maps the pieces of one rank onto each other, but not if the last one is
    padded. That is no reason to refuse a module whose sequences never need it. `make` returns a context like the one
    that the module will have, and `batch` is a microbatch. All ranks of the group call this alike.
    """
    device, dtypes = fitting(module, lambda _: None, home_of(batch))
    passing = _passing(module, batch)
    for example in (make().shortened(batch, _TOKENS), batch):
        for dtype in dtypes:
            for tried in (loss, None):
                given = converted(example, dtype, device)
                try:
                    twin = stand_in(module, lambda _: None, passing, dtype=dtype, device=device, seed=1)
                    _leave_balance_out(twin)
                    whole = _run(another(twin), given, tried)
                    if whole.raised is not None:
                        continue
                except Exception:  # It may run in another dtype, or with more tokens.
                    continue
                _compare(another(twin), make(), given, tried, whole, _TOLERANCE[dtype])
                return Alike(True, _refused_padded(twin, make, given, tried, _TOLERANCE[dtype]))
    return Alike(False)


def _refused_padded(
    twin: nn.Module, make: Callable[[], ContextParallel], batch: Batch, loss: Loss | None, most: float
) -> ShardwiseError | None:
    """Compare the loss of sequences that are a token shorter, so that they are padded."""
    shorter = make().padded(batch)
    if shorter is None or loss is None:
        return None
    try:
        whole = _run(another(twin), shorter, loss)
    except Exception:
        return None
    if whole.raised is None:
        try:
            _compare(another(twin), make(), shorter, loss, whole, most)
        except ShardwiseError as error:
            return error.with_traceback(None)  # Its frames hold the copy of the module.
    return None


def _leave_balance_out(twin: nn.Module) -> None:
    """Remove the capacity of our experts and make their balancing loss negligible. Both depend on the tokens of all
    ranks, which layers see only after this trial (`expert/shard.py`). A weight of 0 would change what they return."""
    for each in twin.modules():
        if isinstance(each, MoE):
            each.mixture = replace(each.mixture, capacity=None, auxiliary=1e-12 if each.mixture.auxiliary else 0.0)


def _passing(module: nn.Module, batch: Batch) -> Mapping[str, Hashable]:
    """Return the blocks that need not be run, as found in a run on the meta device."""
    twin = meta_twin(module)
    watch = BlockWatch(twin)
    args, kwargs = pytree.tree_map(
        lambda each: each.detach().to("meta") if isinstance(each, Tensor) else each, Signature(twin).arguments(batch)
    )
    try:
        with torch.no_grad(), Guesses(), watch:
            twin(*args, **kwargs)
    except Exception:
        return {}
    return watch.passing


def _run(module: nn.Module, batch: Batch, loss: Loss | None) -> _Course:
    course = _Course()
    args, kwargs = Signature(module).arguments(batch)
    draws = SteadyDraws(has_seed=sets_seed(module))
    with torch.no_grad(), _noting(module, course.made), SteadyDropout(), draws:
        output = module(*args, **kwargs)
        course.counted = {name: each.clone() for name, each in module.named_buffers() if _may_count(name, each)}
        course.output = [_whole(each).detach().clone() for each in tensors_in(output)]
        if loss is not None:
            try:
                with left_as_it_was(loss):
                    total, count = loss(output, copy(batch))
                course.loss = float(total), float(count)
            except Exception as error:  # Perhaps on this rank only: the others wait for it, so go on.
                course.raised = error
    return course


def _may_count(name: str, buffer: Tensor) -> bool:
    """Whether a buffer may count tokens. The `load` of our routers does not matter: it is summed over ranks."""
    return not buffer.is_floating_point() and not buffer.is_complex() and name.rpartition(".")[2] != "load"


def _whole(each: Tensor) -> Tensor:
    """Gather logits that are sharded over tp."""
    gather = getattr(each, "whole", None)
    return each if gather is None else gather()


@contextmanager
def _noting(module: nn.Module, made: list[tuple[str, Tensor]]) -> Iterator[None]:
    def note(name: str, returned: Any) -> None:
        if type(returned) is Tensor:
            made.append((name, returned.detach().clone()))

    with ExitStack() as hooks:
        for name, each in module.named_modules():
            handle = each.register_forward_hook(lambda _, __, returned, name=name: note(name, returned))
            hooks.callback(handle.remove)
        yield


def _compare(
    twin: nn.Module, context: ContextParallel, batch: Batch, loss: Loss | None, whole: _Course, most: float
) -> None:
    """Run this rank's part, and refuse the module if any rank's result differs."""
    context.draws = context.is_strict = False
    context.attach(twin)
    part = context.cut(batch)
    try:
        with context.running(part):
            course = _run(twin, part, loss)
    except ShardwiseError:
        raise
    except Exception as error:
        raise _refusal(
            type(twin).__name__, f"with a part of a sequence it raises {type(error).__name__}: {error}", context.group
        ) from error
    finally:
        context.detach()
    length, group = part.tokens.num_real, context.group
    pairs = [
        (name, expected, found)
        for (name, expected), (other, found) in zip(whole.made, course.made, strict=False)
        if name == other
    ]
    wrong, apart = "", 0.0 if course.raised is None else math.inf
    if course.raised is None and len(whole.made) == len(course.made) and part.tokens.length == length:
        wrong, apart = _first_difference(pairs, length, group, most)
        outputs = [("what it returns", *pair) for pair in zip(whole.output, course.output, strict=False)]
        wrong, apart = (wrong, apart) if wrong else _first_difference(outputs, length, group, most)
    for name, expected in whole.counted.items():
        found = course.counted.get(name)
        if not wrong and found is not None and found.shape == expected.shape and not torch.equal(found, expected):
            wrong, apart = f"the buffer {name}", math.inf
    try:
        _agree(twin, wrong, apart, whole.loss, course.loss, group, home_of(batch), most)
    except ShardwiseError:
        raised = course.raised
        if raised is None:
            raise
        what = f"with a part of a sequence its loss raises {type(raised).__name__}: {raised}"
        raise _refusal(type(twin).__name__, what, group) from raised


def _first_difference(
    pairs: list[tuple[str, Tensor, Tensor]], length: int, group: Group, most: float
) -> tuple[str, float]:
    for name, expected, found in pairs:
        mine = _part_of(expected, found, length, group)
        if mine is not None and mine.is_floating_point() and mine.numel():
            error = float((mine - found).abs().max() / mine.abs().max().clamp_min(1e-30))
            if error > most:
                return name, error
    return "", 0.0


def _part_of(whole: Tensor, part: Tensor, length: int, group: Group) -> Tensor | None:
    """Return this rank's part of a result over all tokens; None if it cannot be determined."""
    if whole.dim() != part.dim() or not whole.dim():
        return None
    differ = [dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim]]
    if not differ:
        return whole if length not in whole.shape[1:] else None
    if len(differ) > 1 or whole.shape[differ[0]] != length:
        return None
    mine = zigzag_shard(whole, differ[0], group.rank, group.size)
    # A data-dependent selection of tokens, an expert's for example, may be as long as a sequence by chance.
    return mine if mine.shape == part.shape else None


def _agree(
    twin: nn.Module, wrong: str, error: float, whole: tuple[float, float] | None, part: tuple[float, float] | None,
    group: Group, device: torch.device, most: float,
) -> None:  # fmt: skip
    """Refuse the module on all ranks if it is wrong on one."""
    total, count = part or (0.0, 0.0)
    sums = torch.tensor([total, count], dtype=torch.float64, device=device)
    worst = torch.tensor([error], dtype=torch.float64, device=device)
    for each, kind in ((sums, dist.ReduceOp.SUM), (worst, dist.ReduceOp.MAX)):
        work = group.all_reduce(each, kind) if group.size > 1 else None
        if work is not None:
            work.wait()
    total, count = sums.tolist()
    apart = abs(total / count - whole[0] / whole[1]) / max(abs(whole[0] / whole[1]), 1e-30) if whole and count else 0.0
    largest = max(float(worst), apart if apart > most else 0.0)
    if largest:
        place = f"{wrong} of {type(twin).__name__}" if wrong else type(twin).__name__
        raise _refusal(
            place,
            f"a part of a sequence gives other numbers than the whole, by {format_percent(min(largest, 9.99))}",
            group,
        )


def _refusal(place: str, what: str, group: Group) -> ShardwiseError:
    return ShardwiseError(
        f"{place}: {what}, and cp={group.size} gives each rank a part; tokens see those of other ranks in torch's"
        " scaled_dot_product_attention alone",
        remedy="torch.nn.functional.scaled_dot_product_attention in the module, positions from position_ids, or cp=1",
    )
