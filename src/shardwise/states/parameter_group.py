"""The assignment of parameters to optimizers, and whether an optimizer can work on pieces of them.

    optimizer=lambda parameters: AdamW(parameters, lr=3e-4)

    optimizer=[
        Share(make=lambda parameters: Muon(parameters, lr=0.02), takes=is_hidden_matrix),
        Share(make=lambda parameters: AdamW(parameters, lr=3e-4)),
    ]

An elementwise optimizer (AdamW, SGD) works on any piece of a parameter. One that works on matrices (Muon, Adafactor)
must see them whole. For known optimizers this is known; for others the user states it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError
from shardwise.states.compact_adamw import CompactAdamW
from shardwise.states.muon import Muon
from shardwise.states.optimizer_copy import copy_with, leaving_no_trace

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

#: Optimizers that treat every element separately.
ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam,
        optim.RMSprop, optim.Rprop, optim.SGD, CompactAdamW,
    }
)  # fmt: skip
#: Optimizers that must see each parameter whole.
MATRIXWISE: frozenset[type[Optimizer]] = frozenset({optim.Adafactor, optim.Muon, Muon})

# The probe's size along each dim: state for a matrix's rows and columns is then half an element for each of its own.
_PROBED = 4


def everything(name: str, parameter: nn.Parameter) -> bool:  # noqa: ARG001 - a rule that takes all
    """Take every parameter that is left."""
    return True


def is_hidden_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Take matrices between hidden layers, for Muon. Embeddings and heads are recognised by their names."""
    ends = ("embed", "wte", "wpe", "head", "position")
    return parameter.dim() == 2 and not any(word in name for word in ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """An optimizer for some parameters: those for which `takes` is true and that no earlier share takes.

    `whole`: whether it must see parameters whole; None for known optimizers.
    """

    make: MakeOptimizer
    takes: Callable[[str, nn.Parameter], bool] = everything
    whole: bool | None = None


def shares_of(optimizer: MakeOptimizer | Sequence[Share]) -> tuple[Share, ...]:
    """Return a user's optimizer or shares as shares."""
    return (Share(make=optimizer),) if callable(optimizer) else tuple(optimizer)


def sort_out(shares: Sequence[Share], parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Return the names that each share takes. Every parameter must be taken."""
    taken: list[list[str]] = [[] for _ in shares]
    for name, parameter in parameters.items():
        number = next((number for number, share in enumerate(shares) if share.takes(name, parameter)), None)
        if number is None:
            raise ShardwiseError(
                f"no optimizer takes {name} of shape {tuple(parameter.shape)}",
                remedy="a last Share without takes, or parameter.requires_grad_(False)",
            )
        taken[number].append(name)
    return taken


def number_bytes_of(make: MakeOptimizer, weights: Sequence[nn.Parameter]) -> float:
    """Return the bytes of state per element, measured by a step on small weights like these.

    Counts of steps, which are single numbers, are ignored. For state of rows and columns the result is an upper bound.
    """
    probes = _probes_of(weights)
    with torch.random.fork_rng(devices=[]):
        return _stepped_bytes(make(probes), probes)


def state_bytes_of(optimizer: Optimizer) -> float:
    """Return the same for an existing optimizer, measured on a copy."""
    probes = [_probes_of(group["params"]) for group in optimizer.param_groups]
    with torch.random.fork_rng(devices=[]), leaving_no_trace(optimizer):
        return _stepped_bytes(copy_with(optimizer, probes), [each for some in probes for each in some])


def _probes_of(weights: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return a small weight for each number of dims among the weights."""
    dims = sorted({each.dim() for each in weights} or {1})
    device = weights[0].device if weights else torch.device("cpu")
    return [nn.Parameter(torch.zeros([_PROBED] * dim, device=device)) for dim in dims]


def _stepped_bytes(optimizer: Optimizer, probes: Sequence[nn.Parameter]) -> float:
    for each in probes:
        each.grad = torch.zeros_like(each)
    optimizer.step()
    return max((_state_bytes(optimizer, each) / each.numel() for each in probes), default=0.0)


def _state_bytes(optimizer: Optimizer, weight: nn.Parameter) -> int:
    state = optimizer.state.get(weight, {})
    return sum(each.nbytes for each in state.values() if isinstance(each, Tensor) and each.dim())
