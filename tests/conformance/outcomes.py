"""What a case comes to: by the plain module, and by an engine.

An engine takes part in the matrix by a `Runner`, a function from a case to its outcome: see `in_one_process`.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from shardwise.engine.assemble import from_parts
from shardwise.engine.engine import Engine
from shardwise.engine.options import Options
from shardwise.engine.parts import Parts
from shardwise.engine.sharded import Sharded
from shardwise.execution.pipeline import schedule_of
from shardwise.ranks.wires import OneProcess
from shardwise.stages.split import split
from shardwise.stages.stage import Split
from shardwise.states.make_optimizers import make_optimizers
from tests import same
from tests.conformance.cases import Case, loss_of, make_batches, make_module, make_optimizer
from tests.same import Trained, weights_of

Runner = Callable[[Case], Trained]


def plain(case: Case) -> Trained:
    """The module as it is, on one microbatch after the other. Ranks, chunks and their order make no difference."""
    return _plain(replace(case, schedule=case.schedule if case.is_stale else "gpipe", num_ranks=1, num_chunks=None))


@cache
def _plain(case: Case) -> Trained:
    return same.train_plain(
        make_module(case.model),
        make_batches(case),
        loss_of(case.model),
        make_optimizer(case.optimizer),
        num_microbatches=case.num_microbatches,
        is_stale=case.is_stale,
    )


def train(engine: Engine, case: Case) -> Trained:
    """What an engine makes of a case."""
    return same.train(engine, make_batches(case))


def in_one_process(case: Case) -> Trained:
    """The engine that runs every rank itself."""
    module, stages, initial = _split(case.model, case.num_stages)
    module.load_state_dict(initial)
    wires, options = OneProcess(case.plan), Options()
    parts = Parts(
        module=module,
        plan=case.plan,
        split=stages,
        schedule=schedule_of(case.plan),
        loss=loss_of(case.model),
        options=options,
        sharded=Sharded(module, case.plan, wires.mesh, {}, options),
        order=tuple(name for name, _ in module.named_parameters()),
        shapes={name: each.shape for name, each in initial.items()},
        wires=wires,
        device=torch.device("cpu"),
    )
    made = make_optimizers(make_optimizer(case.optimizer), dict(module.named_parameters()))
    return train(from_parts(parts, made, owns_wires=True), case)


@cache
def _split(model: str, num_stages: int) -> tuple[nn.Module, Split, dict[str, Tensor]]:
    """A module, its stages, and the weights that it was made with. One serves all schedules."""
    module = make_module(model)
    initial = weights_of(module)
    case = Case(model=model, schedule="gpipe", num_ranks=num_stages, num_microbatches=1, lengths=(6,))
    (example,) = make_batches(case)
    return module, split(module, num_stages, example), initial
