"""One comparison for all: what an engine trains to, and what the plain module does on the same batches.

    same(engine, module, batches, loss, optimizer)

holds losses, gradients and weights of the one against those of the other.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.engine.engine import Engine
from shardwise.stages.batch import cut_batch
from shardwise.stages.stage import Batch, Loss

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The loss of each step, the gradients of the first, and parameters and buffers after the last.

    Where gradients are clipped, `norms` has the norm of each step's before that.
    """

    losses: tuple[float, ...]
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    norms: tuple[float, ...] = ()

    def is_same(self, other: "Trained") -> bool:
        """Bit for bit."""
        return (
            (self.losses, self.norms) == (other.losses, other.norms)
            and _are_same(self.gradients, other.gradients)
            and _are_same(self.weights, other.weights)
        )


def _are_same(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def train_plain(
    module: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    optimizer: Make,
    *,
    num_microbatches: int = 1,
    clip: float | None = None,
    is_stale: bool = False,
) -> Trained:
    """The module as it is, on one microbatch after the other.

    Where it `is_stale` it computes with weights that are one step old, W(t-1), and the optimizer steps on W(t).
    """
    used = list(module.parameters())
    newest = [nn.Parameter(each.detach().clone(), each.requires_grad) for each in used] if is_stale else used
    steps = optimizer([each for each in newest if each.requires_grad])
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        losses.append(_plain_gradients(module, cut_batch(batch, num_microbatches), loss))
        if is_stale:
            _hand_over(used, newest)
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(newest, clip)))
        gradients = gradients or gradients_of(dict(zip(_names(module), newest, strict=True)))
        steps.step()
    _copy(newest, used)
    return Trained(losses=tuple(losses), gradients=gradients, weights=weights_of(module), norms=tuple(norms))


def _plain_gradients(module: nn.Module, microbatches: Sequence[Batch], loss: Loss) -> float:
    """Leave the gradients of a batch in the parameters and return its loss."""
    module.zero_grad()
    total, count = 0.0, 0.0
    for microbatch in microbatches:
        result = loss(module(**arguments_of(module, microbatch)), microbatch)
        share, number = result if isinstance(result, tuple) else (result, 1)
        share.backward()
        total, count = total + float(share.detach()), count + float(number)
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(count)
    return total / count


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def _hand_over(used: list[nn.Parameter], newest: list[nn.Parameter]) -> None:
    """Give the gradients of W(t-1) to W(t), which is about to become W(t+1), and let the module have W(t)."""
    for old, new in zip(used, newest, strict=True):
        new.grad, old.grad = old.grad, None
    _copy(newest, used)


@torch.no_grad()
def _copy(sources: list[nn.Parameter], targets: list[nn.Parameter]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def arguments_of(module: nn.Module, microbatch: Batch) -> dict[str, Tensor | bool]:
    """What of a batch the module takes. It keeps no keys and values: a pipeline does not either."""
    names = inspect.signature(module.forward).parameters
    given: dict[str, Tensor | bool] = {name: each for name, each in microbatch.items() if name in names}
    return {**given, "use_cache": False} if "use_cache" in names else given


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: each.grad.detach().clone() for name, each in parameters.items() if each.grad is not None}


def weights_of(module: nn.Module | Engine) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.state_dict().items()}


def train(engine: Engine, batches: Sequence[Batch]) -> Trained:
    """What an engine makes of the batches. The gradients are those of the parameters that it holds."""
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        losses.append(engine.train_step(batch))
        if engine.gradient_norm is not None:
            norms.append(engine.gradient_norm)
        if not gradients:
            # Where a step is left unfinished, so are its gradients.
            engine.flush()
            # Under ZeRO a rank has pieces of them.
            gradients = {} if engine.plan.zero else gradients_of(engine.parameters)
    return Trained(losses=tuple(losses), gradients=gradients, weights=weights_of(engine), norms=tuple(norms))


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], floor: float = 1e-4) -> tuple[float, str]:
    """The largest relative error of a tensor, ||found - expected|| / ||expected||, and whose it is.

    A tensor that is next to nothing is measured against the largest: `floor` of that one's norm, for its size.
    """
    assert found.keys() == expected.keys()
    largest = max((float(each.double().norm()) for each in expected.values()), default=0.0)
    errors = [(0.0, "")]
    for name, wanted in expected.items():
        apart = float((found[name].double() - wanted.double()).norm())
        errors.append((apart / max(float(wanted.double().norm()), floor * largest, 1e-300), name))
    return max(errors)


def assert_same(found: Trained, expected: Trained, tolerance: float = 1e-6, *, is_part: bool = False) -> None:
    """Losses, norms, gradients and weights. A rank has a part of the gradients: those that it has are compared."""
    assert _close(found.losses, expected.losses, tolerance), (found.losses, expected.losses)
    assert _close(found.norms, expected.norms, tolerance), (found.norms, expected.norms)
    gradients = expected.gradients
    if is_part:
        gradients = {name: each for name, each in gradients.items() if name in found.gradients}
    for what, ours, theirs in (
        ("the gradient", found.gradients, gradients),
        ("the weight", found.weights, expected.weights),
    ):
        error, name = worst(ours, theirs)
        assert error <= tolerance, f"{what} of {name} is off by {error:.1e}"


def _close(found: Sequence[float], expected: Sequence[float], tolerance: float) -> bool:
    pairs = zip(found, expected, strict=False)
    return len(found) == len(expected) and all(abs(one - other) <= tolerance * abs(other) for one, other in pairs)


def same(
    engine: Engine,
    module: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    optimizer: Make,
    *,
    num_microbatches: int = 1,
    clip: float | None = None,
    is_stale: bool = False,
    tolerance: float = 1e-6,
) -> None:
    """Train the engine and the plain module, which began alike, and hold one against the other."""
    expected = train_plain(
        module, batches, loss, optimizer, num_microbatches=num_microbatches, clip=clip, is_stale=is_stale
    )
    assert_same(train(engine, batches), expected, tolerance)
