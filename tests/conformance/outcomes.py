"""What a case comes to: by the plain module, and by an engine.

An engine takes part in the matrix by a `Runner`, a function from a case to its outcome: see `in_one_process`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from shardwise.engine.assemble import from_split
from shardwise.engine.engine import Engine
from shardwise.engine.make_states import Original
from shardwise.engine.prepare import Options
from shardwise.engine.sharded import Sharded
from shardwise.execution.pipeline import schedule_of
from shardwise.ranks.wires import OneProcess
from shardwise.stages.batch import cut_batch
from shardwise.stages.split import split
from shardwise.stages.stage import Split
from tests.conformance.cases import Case, loss_of, make_batches, make_module, make_optimizer


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The loss of each step, the gradients of the first, and parameters and buffers after the last."""

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]

    def is_same(self, other: "Outcome") -> bool:
        """Bit for bit."""
        return (
            self.losses == other.losses
            and _are_same(self.gradients, other.gradients)
            and _are_same(self.weights, other.weights)
        )


def _are_same(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


Runner = Callable[[Case], Outcome]


def plain(case: Case) -> Outcome:
    """The module as it is, on one microbatch after the other. Ranks, chunks and their order make no difference."""
    return _plain(replace(case, schedule=case.schedule if case.is_stale else "gpipe", num_ranks=1, num_chunks=None))


@cache
def _plain(case: Case) -> Outcome:
    module, loss = make_module(case.model), loss_of(case.model)
    used = list(module.parameters())
    # The module computes with weights that are one step old, W(t-1); the optimizer steps on W(t).
    newest = [nn.Parameter(each.detach().clone()) for each in used] if case.is_stale else used
    optimizer = make_optimizer(case.optimizer)(newest)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in make_batches(case):
        module.zero_grad()
        total, count = 0.0, 0.0
        for microbatch in cut_batch(batch, case.num_microbatches):
            result = loss(module(**_arguments(module, microbatch)), microbatch)
            share, number = result if isinstance(result, tuple) else (result, 1)
            share.backward()  # type: ignore[no-untyped-call]
            total, count = total + float(share.detach()), count + float(number)
        for parameter in used:
            if parameter.grad is not None:
                parameter.grad.div_(count)
        losses.append(total / count)
        gradients = gradients or gradients_of(dict(module.named_parameters()))
        if case.is_stale:
            _hand_over(used, newest)
        optimizer.step()
    _copy(newest, used)
    return Outcome(losses=tuple(losses), gradients=gradients, weights=weights_of(module))


def _hand_over(used: list[nn.Parameter], newest: list[nn.Parameter]) -> None:
    """Give the gradients of W(t-1) to W(t), which is about to become W(t+1), and let the module have W(t)."""
    for old, new in zip(used, newest, strict=True):
        new.grad, old.grad = old.grad, None
    _copy(newest, used)


@torch.no_grad()
def _copy(sources: list[nn.Parameter], targets: list[nn.Parameter]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _arguments(module: nn.Module, microbatch: Mapping[str, Tensor]) -> dict[str, Tensor | bool]:
    names = inspect.signature(module.forward).parameters
    given: dict[str, Tensor | bool] = {name: each for name, each in microbatch.items() if name in names}
    return {**given, "use_cache": False} if "use_cache" in names else given


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Every gradient. None is as good as one of zeros: an expert that nobody chose has either."""
    return {
        name: torch.zeros_like(each) if each.grad is None else each.grad.clone() for name, each in parameters.items()
    }


def weights_of(module: nn.Module | Engine) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.state_dict().items()}


def train(engine: Engine, case: Case) -> Outcome:
    """What an engine makes of a case. The gradients are those of the parameters that it holds."""
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in make_batches(case):
        losses.append(engine.train_step(batch))
        if not gradients:
            # Where a step is left unfinished, so are its gradients.
            engine.flush()
            gradients = gradients_of(engine.parameters)
    return Outcome(losses=tuple(losses), gradients=gradients, weights=weights_of(engine))


def in_one_process(case: Case) -> Outcome:
    """The engine that runs every rank itself."""
    module, stages, initial = _split(case.model, case.num_stages)
    module.load_state_dict(initial)
    wires, options = OneProcess(case.plan), Options()
    engine = from_split(
        module,
        case.plan,
        stages,
        schedule_of(case.plan),
        loss=loss_of(case.model),
        optimizer=make_optimizer(case.optimizer),
        device=torch.device("cpu"),
        options=options,
        callers=(),
        sharded=Sharded(module, case.plan, wires.mesh, {}, options),
        original=Original.of(module),
        wires=wires,
        owns_wires=True,
    )
    return train(engine, case)


@cache
def _split(model: str, num_stages: int) -> tuple[nn.Module, Split, dict[str, Tensor]]:
    """A module, its stages, and the weights that it was made with. One serves all schedules."""
    module = make_module(model)
    initial = weights_of(module)
    case = Case(model=model, schedule="gpipe", num_ranks=num_stages, num_microbatches=1, lengths=(6,))
    (example,) = make_batches(case)
    return module, split(module, num_stages, example), initial


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 1e-4) -> tuple[float, str]:
    """The largest relative error of a tensor, ||found - expected|| / ||expected||, and whose it is.

    A tensor that is next to nothing is measured against the largest: `floor` of that one's norm, for its size.
    """
    assert found.keys() == expected.keys()
    largest = max(float(each.double().norm()) for each in expected.values())
    errors = []
    for name, wanted in expected.items():
        apart = float((found[name].double() - wanted.double()).norm())
        errors.append((apart / max(float(wanted.double().norm()), floor * largest), name))
    return max(errors)
