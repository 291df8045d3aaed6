"""Activation recomputation: layers are computed again in the backward, one at a time; only their inputs are kept.

    recompute=full         a layer keeps its inputs
    recompute=selective    and the outputs of its matmuls, convolutions and attention: only the rest is recomputed

              forward                              backward
    kept      in 0 | in 0, in 1 | in 0, in 1, in 2
    made                                           2 again, back 2 | 1 again, back 1 | 0 again, back 0

So apart from the inputs, the activations of only one layer exist at a time. Activations before and after the layers
(embeddings, the head, the loss) are kept: there is one of each, and the head is expensive. `torch.utils.checkpoint`
does the work, with the random numbers, buffers and rows of the first forward.

A backward in two halves traverses its graph many times, and would recompute everything each time. Under such a schedule
a stage is recomputed whole, once, before its first half (`execution/compute_policy.py`).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, copy_context
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from shardwise.stages.held_parameters import Held
from shardwise.stages.left_in_arguments import has_containers, with_own_containers
from shardwise.stages.recalled import DEAR, recalling
from shardwise.stages.split.module_stage import ModuleStage
from shardwise.stages.split.switch import Inner
from shardwise.stages.stage import Split
from shardwise.stages.written_arguments import WrittenArguments
from shardwise.torch_private import gradient_hooks, is_in_checkpoint, pytree, remove_hooks_but


def choose(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Tell torch's compiler whether to keep the output of an operation."""
    return CheckpointPolicy.MUST_SAVE if operation in DEAR else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_units(
    split: Split, *, selective: bool, num_layers: int | None, is_compiled: bool, stops_early: bool
) -> None:
    """Recompute the layers of this process's stages in backwards; of each stage the first `num_layers`, if given.

    A compiled unit is recomputed as a whole. If it keeps some of its activations, torch's compiler has to know: then
    this comes before compilation, and takes care of random numbers only. `stops_early`: a second forward ends as soon
    as it has everything that its backward needs. Ranks that communicate within a layer must run it to the end.
    """
    for stage in split.stages:
        if isinstance(stage, ModuleStage):
            chosen = set(layers_of(stage, split)[:num_layers])
            around = _inside if selective and is_compiled else partial(_outside, stage, selective, stops_early)
            stage.wrap(partial(_for_some, chosen, around))


def _for_some(chosen: Collection[str], around: Callable[[str, Inner], Inner], unit: str, call: Inner) -> Inner:
    return around(unit, call) if unit in chosen else call


def layers_of(stage: ModuleStage, split: Split) -> list[str]:
    """Return the units of a stage that are layers: of a class with several units. If there are none, all are."""
    called = dict.fromkeys(call.partition("#")[0] for calls in split.units for call in calls)
    kinds = {unit: type(stage.unit(unit)) for unit in called}
    counts = Counter(kinds.values())
    repeated = {unit for unit, kind in kinds.items() if counts[kind] > 1} or set(kinds)
    return [unit for unit in stage.unit_names if unit in repeated]


_chosen = partial(create_selective_checkpoint_contexts, choose)


def _inside(_unit: str, call: Inner) -> Inner:
    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(call, *args, use_reentrant=False, context_fn=_chosen, **kwargs)

    return run


def _outside(stage: ModuleStage, selective: bool, stops_early: bool, unit: str, call: Inner) -> Inner:
    held, written = Held(), WrittenArguments(unit)

    def run(*args: Any, **kwargs: Any) -> Any:
        # The module checkpoints this part itself, so its activations are not kept anyway.
        is_theirs = is_in_checkpoint() or _recomputes_itself(stage.unit(unit))
        if stage.moment is None or not torch.is_grad_enabled() or is_theirs:
            return call(*args, **kwargs)
        again, counted = stage.moment(stage.unit(unit))
        computed = _with_arguments_kept(call, args, kwargs) if has_containers((*args, *kwargs.values())) else call
        computed, args, kwargs = written.kept(_in_its_context(computed), args, kwargs)
        as_it_was = held.now(stage.unit(unit))

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            if not selective:
                return nullcontext(), _both(again(), as_it_was())
            first, second = recalling(counted)
            return first, _both(_both(again(), as_it_was()), second)

        with set_checkpoint_early_stop(stops_early):
            # `again` restores random numbers as well as buffers.
            return checkpoint(
                computed, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
            )

    return run


def _in_its_context(call: Inner) -> Inner:
    """Wrap a call so that its second run has the context variables of its first.

    A hook that it registers on its input is that of the first run once more, and is removed.
    """
    then: Context | None = None

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal then
        if then is None:
            then = copy_context()
            return call(*args, **kwargs)
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        before = [(each, list(gradient_hooks(each))) for each in given]
        try:
            return then.copy().run(call, *args, **kwargs)
        finally:
            for each, kept in before:
                remove_hooks_but(each, kept)

    return run


def _with_arguments_kept(call: Inner, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inner:
    """Wrap a call so that its second run finds the same contents in dictionaries, lists and objects as its first."""
    kept_args, kept_kwargs = with_own_containers(args), with_own_containers(kwargs)
    has_run = False

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_run
        if has_run:
            args, kwargs = with_own_containers(kept_args), with_own_containers(kept_kwargs)
        has_run = True
        return call(*args, **kwargs)

    return run


def _recomputes_itself(layer: Any) -> bool:
    """Whether a layer of transformers checkpoints inside its own forward (since 5.23), which cannot be seen from
    outside the call. Recognised by class name, since transformers may not be installed."""
    is_one = any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(layer).__mro__)
    return is_one and layer.gradient_checkpointing and layer.training


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield
