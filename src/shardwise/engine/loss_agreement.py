"""Find the kind of a loss, on one rank or on all, with the same result on all of them."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import nn

from shardwise.engine.options import Options
from shardwise.engine.row_buffers import RowBuffers, check_row_buffers, find_row_buffers
from shardwise.engine.world_check import as_if_alone, check_world
from shardwise.errors import ShardwiseError, some
from shardwise.nets.moe import MoE
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import Wires
from shardwise.stages.carried_over import find_carried
from shardwise.stages.loss_kind import LossKind, Tried
from shardwise.stages.loss_trial import at_first, try_loss
from shardwise.stages.no_collectives import CollectiveMetError
from shardwise.stages.rows import RowRule
from shardwise.stages.stage import Batch, Loss
from shardwise.stages.token_trial import try_tokens

#: The kind of a loss, and the buffers that depend on rows.
_Found = tuple[Tried, RowBuffers]


def agree_on_loss(
    module: nn.Module, plan: Plan, loss: Loss, example: Batch, rule: RowRule, options: Options, wires: Wires
) -> tuple[Tried, bool, Callable[[], AbstractContextManager[None]]]:
    """Find the kind of the loss, if batches are cut; whether it is known not to communicate; and the context for its
    trials, which hides other ranks if its code asks for them but computes the same without. Alike on all ranks."""
    if plan.dp * plan.microbatches * plan.cp * plan.pp > 1:
        _check_own_parameters(module, loss, plan)
    asks = check_world(module, plan, loss, example, rule, options, wires)
    around: Callable[[], AbstractContextManager[None]] = as_if_alone if asks else nullcontext
    tried, is_quiet = Tried(LossKind.UNTRIED), False
    is_meta = any(each.is_meta for each in (*module.parameters(), *module.buffers()))
    if plan.dp * plan.microbatches * plan.cp > 1 and options.verify and not is_meta:
        num_parts = plan.microbatches * (1 if options.is_local else plan.dp)
        # Under cp a loss has to be a pair, or a mean over labels, which are counted.
        attempt = partial(
            partial(try_loss, compares_buffers=plan.dp > 1 or options.buffers is not None) if plan.cp == 1 else
            try_tokens, meets=has_capacity(module), num_parts=num_parts, in_turn=plan.microbatches > 1,
        )  # fmt: skip
        precision = options.precision_of(plan, example)

        def try_both(*, for_all: bool = False) -> _Found:
            with around():
                found = attempt(module, loss, example, rule, precision, for_all=for_all)
                if plan.microbatches > 1 and found.problem is None and not found.failed:
                    given = module, loss, example, rule.look(example), precision
                    found = found._replace(carried=find_carried(*given, at_first(for_all)))
                looks = plan.dp > 1 and options.buffers != "first" and not found.writes_none
                if not looks:
                    return found, RowBuffers()
                return found, find_row_buffers(module, example, rule.look(example), precision)

        (tried, buffers), is_quiet = _tried(try_both, options, wires)
        is_quiet = is_quiet and not asks
        tried.check()
        check_row_buffers(buffers, plan.dp, options.buffers)
    if wires.rank == 0:
        _warn(tried, plan)
    return tried, is_quiet, around


def _warn(tried: Tried, plan: Plan) -> None:
    """Say where parts of a batch may compute something else than the whole."""
    if tried.decides is not None:
        warnings.warn(
            f"{tried.decides} decides by a number of all rows that it is given, and the loss depends on it: each of"
            f" {plan.dp * plan.microbatches * plan.cp} parts of a batch decides by its own"
            f" {'tokens' if plan.cp > 1 else 'rows'}. Decide for each row by itself, or between steps; return loss, 1"
            " says that each part's own is meant",
            stacklevel=3,
        )
    if tried.carried is not None:
        warnings.warn(
            f"a forward leaves {tried.carried} for the next one, whose loss is another with it: {plan.microbatches}"
            " microbatches are as many forwards in a step, as with gradient accumulation on one device, and not one of"
            " the whole batch. microbatches=1 has one",
            stacklevel=3,
        )


def _tried(attempt: Callable[..., _Found], options: Options, wires: Wires) -> tuple[_Found, bool]:
    """Try on the first rank, since all have the same module and example. If ranks communicate in the trial, or have
    their own examples, all of them try. Also return whether it is known not to communicate."""
    if not options.is_local:
        mine: _Found | None = Tried(LossKind.UNTRIED), RowBuffers()
        if wires.rank == 0:
            try:
                mine = attempt(for_all=True)
            except CollectiveMetError:
                mine = None
        first: _Found | None = wires.gather(mine)[0]
        if first is not None:
            return first, not first[0].failed
    mine = attempt()
    found: list[_Found] = wires.gather(mine)
    problem = next((each for each, _ in found if each.problem), None)
    tried = problem or next((each for each, _ in found if each.kind is not LossKind.UNTRIED), mine[0])
    return (tried, max(buffers for _, buffers in found)), False


def has_capacity(module: nn.Module) -> bool:
    """Whether experts of ours drop tokens where many come: those of a part, as is said of them."""
    return any(isinstance(each, MoE) and each.mixture.capacity is not None for each in module.modules())


def _check_own_parameters(module: nn.Module, loss: Loss, plan: Plan) -> None:
    """Refuse a criterion that learns itself: each part of a batch would leave it another gradient, and nobody sums."""
    owner = getattr(loss, "__self__", loss)
    known = {id(each) for each in module.parameters()}
    named = owner.named_parameters() if isinstance(owner, nn.Module) else ()
    own = [name for name, each in named if each.requires_grad and id(each) not in known]
    if own:
        raise ShardwiseError(
            f"the loss has {len(own)} parameters of its own that require a gradient ({some(own)}), which are no"
            f" parameters of the module: under {plan} ranks and microbatches would have other gradients of them",
            remedy="make the criterion a part of the module (model.criterion = criterion), and return what it needs; or"
            " criterion.requires_grad_(False)",
        )
