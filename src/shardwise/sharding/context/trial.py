"""Test a module on parts of sequences before training: a part must give the numbers that the whole gives there.

Attention sees the tokens of all ranks. Any other operation that mixes tokens (a shift, a mean over them, positions
counted in the forward) would silently mix only those of one rank. So a copy with random weights (`stand_in.py`) is run
on a few tokens: whole on every rank, then by all ranks together, each on its part. The outputs of modules, the loss and
its gradients are compared: a hook may mix tokens only in the backward. So is the loss with the outputs of one rank's
tokens scaled up: of the hardest tokens, each rank may have half by chance. Dropout is off in all runs.

What holds for these sequences may not hold for others. So the loss is compared for longer ones, for padded ones, and
for ones whose pieces have another length: `x[:, ::2]` takes every other token of a piece.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.nets.moe import MoE
from shardwise.ranks.collectives import Group
from shardwise.sharding.block_watch import BlockWatch
from shardwise.sharding.context.parallel import ContextParallel, Unfit
from shardwise.sharding.context.trial_course import Losses, SequenceCourse, run_course
from shardwise.sharding.stand_in import another, converted, fitting, stand_in, tensors_in
from shardwise.sharding.zigzag import zigzag_shard
from shardwise.stages.batch import home_of
from shardwise.stages.split.arguments import Signature
from shardwise.stages.split.meta import Guesses, meta_twin
from shardwise.stages.split.python_state import leaves_classes
from shardwise.stages.stage import Batch, Loss
from shardwise.torch_private import pytree
from shardwise.units import format_percent

_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
#: About how many tokens of a sequence are tried.
_TOKENS = 12
#: Longer sequences are tried with at most about this many products of a parameter and a token: seconds, or less.
_PRODUCTS = {"cpu": 2**33, "cuda": 2**38}
#: Gradients are sums of more numbers than outputs are: the factor on the tolerance.
_SLACK = 10.0
#: The outputs of the first rank's tokens are multiplied by this.
_LARGER = 8.0


class Alike(NamedTuple):
    """Whether a module could be tried on parts of sequences; and which sequences cannot be cut into parts."""

    is_tried: bool
    unfit: Unfit = Unfit()


@leaves_classes
def try_parts(module: nn.Module, make: Callable[[], ContextParallel], batch: Batch, loss: Loss | None) -> Alike:
    """Refuse a module whose result on parts of sequences differs from that on whole ones.

    Padding is tried as well: `x.flip(1)` maps the pieces of one rank onto each other, but not if the last one is
    padded. That is no reason to refuse a module whose sequences never need it; and so for pieces of another length.
    `make` returns a context like the one that the module will have, and `batch` is a microbatch. All ranks of the group
    call this alike.
    """
    device, dtypes = fitting(module, lambda _: None, home_of(batch))
    passing = _passing(module, batch)
    # A forward or a loss may read what a block leaves, and then none may be skipped.
    losses = [None if loss is None else Losses(loss, module), None]
    ways = list(product(losses, (passing, {})))
    for example, (tried, skipped), dtype in product((make().shortened(batch, _TOKENS), batch), ways, dtypes):
        given = converted(example, dtype, device)
        try:
            twin = stand_in(module, lambda _: None, skipped, dtype=dtype, device=device, seed=1)
            _leave_balance_out(twin)
            whole = run_course(another(twin), given, tried, larger=_larger(make(), given))
            if whole.raised is not None:
                continue
        except Exception:  # It may run in another dtype, or with more tokens.
            continue
        most = _TOLERANCE[dtype]
        _compare(another(twin), make(), given, tried, whole, most)
        longer = converted(batch, dtype, device)
        _try_longer(twin, make, longer, given, tried, most)
        return Alike(True, _unfit(twin, make, longer, given, tried, most))
    return Alike(False)


def _try_longer(
    twin: nn.Module,
    make: Callable[[], ContextParallel],
    batch: Batch,
    tried: Batch,
    loss: Losses | None,
    most: float,
) -> None:
    """Refuse a module that behaves differently for longer sequences than were tried: `if x.shape[1] > 100:`."""
    rows = max((len(each) for each in tensors_in(batch) if each.dim()), default=1)
    products = _PRODUCTS.get(home_of(batch).type, _PRODUCTS["cpu"])
    longest = products // max(1, rows * sum(each.numel() for each in twin.parameters()))
    if longest > make().num_tokens(tried) and loss is not None:
        longer = make().shortened(batch, longest)
        if make().num_tokens(longer) > make().num_tokens(tried):
            error = _refused(twin, make, longer, loss, most)
            if error is not None:
                raise error


def _unfit(
    twin: nn.Module, make: Callable[[], ContextParallel], longer: Batch, batch: Batch, loss: Losses | None, most: float
) -> Unfit:
    """Compare the loss of sequences that are a token shorter, and so are padded, and of those whose pieces are."""
    num_tokens, num_pieces = make().num_tokens(batch), 2 * make().group.size
    padded = make().padded(batch)
    if padded is None and make().num_tokens(longer) > num_pieces:  # Those that are tried have one token in each piece.
        is_whole = make().num_tokens(longer) < 2 * num_pieces
        padded = longer if is_whole else make().padded(make().shortened(longer, 2 * num_pieces))
    if loss is None or num_tokens % num_pieces:
        return Unfit()
    others = make().shortened(batch, num_tokens - num_pieces) if num_tokens > num_pieces else None
    return Unfit(
        padded=None if padded is None else _refused(twin, make, padded, loss, most),
        others=None if others is None else _refused(twin, make, others, loss, most),
        piece=num_tokens // num_pieces,
    )


def _refused(
    twin: nn.Module, make: Callable[[], ContextParallel], batch: Batch, loss: Losses, most: float
) -> ShardwiseError | None:
    """Return why these sequences cannot be cut into parts; None if they can."""
    try:
        whole = run_course(another(twin), batch, loss)
    except Exception:
        return None
    if whole.raised is None:
        try:
            _compare(another(twin), make(), batch, loss, whole, most)
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


def _larger(context: ContextParallel, batch: Batch) -> Tensor:
    """Return factors for the tokens of a sequence and its padding: larger ones for those of the first rank."""
    size = context.group.size
    factors = torch.ones(-(-context.num_tokens(batch) // (2 * size)) * 2 * size, device=home_of(batch))
    factors[zigzag_shard(torch.arange(len(factors)), 0, 0, size).to(factors.device)] = _LARGER
    return factors


def _compare(
    twin: nn.Module,
    context: ContextParallel,
    batch: Batch,
    loss: Losses | None,
    whole: SequenceCourse,
    most: float,
) -> None:
    """Run this rank's part, and refuse the module if any rank's result differs."""
    context.draws = context.is_strict = False
    context.attach(twin)
    part = context.cut(batch)
    try:
        with context.running(part):
            course = run_course(twin, part, loss, larger=_part_of_larger(whole, context, batch))
            gradient, far = _far_gradient(whole, course, context.group, most)
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
        _agree(twin, wrong, apart, whole, course, group, most)
        if gradient:
            raise _difference(f"the gradient of {gradient} of {type(twin).__name__}", far, group)
    except ShardwiseError:
        raised = course.raised
        if raised is None:
            raise
        what = f"with a part of a sequence its loss raises {type(raised).__name__}: {raised}"
        raise _refusal(type(twin).__name__, what, group) from raised


def _part_of_larger(whole: SequenceCourse, context: ContextParallel, batch: Batch) -> Tensor | None:
    if whole.gradients is None and whole.moved is None:
        return None
    return zigzag_shard(_larger(context, batch), 0, context.group.rank, context.group.size)


def _far_gradient(whole: SequenceCourse, part: SequenceCourse, group: Group, most: float) -> tuple[str, float]:
    """Return the parameter whose gradient the parts of all ranks do not give, and by how much; "" if they give all."""
    expected = whole.gradients
    if expected is None or group.size == 1:
        return "", 0.0
    has_graph = torch.tensor([float(part.total is not None)], dtype=torch.float64, device=expected.products.device)
    _wait(group.all_reduce(has_graph, dist.ReduceOp.MIN))
    if not has_graph:  # The others would wait in their backward for a rank without one.
        return "", 0.0
    found = part.gradients
    products = torch.full_like(expected.products, math.inf) if found is None else found.products
    _wait(group.all_reduce(products, dist.ReduceOp.SUM))
    errors = (products - expected.products).abs() / expected.sizes.clamp_min(1e-30)
    largest = int(errors.argmax())
    error = float(errors[largest])
    return (expected.names[largest], error) if error > _SLACK * most else ("", 0.0)


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
    twin: nn.Module, wrong: str, error: float, whole: SequenceCourse, part: SequenceCourse, group: Group, most: float
) -> None:
    """Refuse the module on all ranks if it is wrong on one."""
    losses = [part.loss or (0.0, 0.0), part.moved or (0.0, 0.0)]
    device = next((each.device for each in whole.output), torch.device("cpu"))
    sums = torch.tensor([*losses[0], *losses[1], float(part.moved is not None)], dtype=torch.float64, device=device)
    worst = torch.tensor([error], dtype=torch.float64, device=device)
    for each, kind in ((sums, dist.ReduceOp.SUM), (worst, dist.ReduceOp.MAX)):
        if group.size > 1:
            _wait(group.all_reduce(each, kind))
    total, count, moved, moved_count, num_moved = sums.tolist()
    apart = _apart(total, count, whole.loss)
    largest = max(float(worst), apart if apart > most else 0.0)
    name = type(twin).__name__
    if largest:
        if not float(worst) and _is_compared(whole, part, group):
            raise _mixing_loss(f"the loss of {name}", apart, group)
        raise _difference(f"{wrong} of {name}" if wrong else name, largest, group)
    apart = _apart(moved, moved_count, whole.moved) if num_moved == group.size else 0.0
    if apart > most:
        raise _mixing_loss(f"the loss of {name}, with other outputs", apart, group)


def _is_compared(whole: SequenceCourse, part: SequenceCourse, group: Group) -> bool:
    """Whether this rank's part of all that the module returns is known."""
    tokens = [pair for pair in zip(whole.output, part.output, strict=False) if pair[0].dim()]
    return bool(tokens) and all(
        each.shape != mine.shape and _part_of(each, mine, _num_tokens(each, mine), group) is not None
        for each, mine in tokens
    )


def _num_tokens(whole: Tensor, part: Tensor) -> int:
    """Return how long the first dim is along which a part is shorter."""
    return next((size for size, mine in zip(whole.shape, part.shape, strict=False) if size != mine), 0)


def _apart(total: float, count: float, whole: tuple[float, float] | None) -> float:
    """Return the difference between a sum over all ranks, divided by its count, and that of the whole."""
    if not whole or not count or not whole[1]:
        return 0.0
    return abs(total / count - whole[0] / whole[1]) / max(abs(whole[0] / whole[1]), 1e-30)


def _difference(place: str, largest: float, group: Group) -> ShardwiseError:
    by = format_percent(min(largest, 9.99))
    return _refusal(place, f"a part of a sequence gives other numbers than the whole, by {by}", group)


def _mixing_loss(place: str, largest: float, group: Group) -> ShardwiseError:
    """Return the refusal of a loss that reads other tokens, of outputs that are the same."""
    return ShardwiseError(
        f"{place}: a part of a sequence gives other numbers than the whole, by {format_percent(min(largest, 9.99))},"
        f" though the module returns the same for each token. cp={group.size} gives each rank a part, and the loss"
        " reads other tokens than its own: it shifts labels or outputs, for example",
        remedy="labels of their own tokens, shifted in the batch and not in the loss:"
        " {'input_ids': ids[:, :-1], 'labels': ids[:, 1:]} and"
        " cross_entropy(logits.flatten(0, 1), batch['labels'].flatten()); or cp=1",
    )


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def _refusal(place: str, what: str, group: Group) -> ShardwiseError:
    return ShardwiseError(
        f"{place}: {what}, and cp={group.size} gives each rank a part; tokens see those of other ranks in torch's"
        " scaled_dot_product_attention alone",
        remedy="torch.nn.functional.scaled_dot_product_attention in the module, positions from position_ids, or cp=1",
    )
