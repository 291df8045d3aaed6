"""Programs of users under tensor parallelism: what people write in modules and losses, each against plain torch.

A program is a module, a batch and a loss, trained for two steps on one rank and on two. `PROGRAMS` has all of them by
name, and what is to become of each: everything cut that can be, some layers left whole, or a refusal.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import make_wires
from shardwise.stages.stage import Loss
from tests.habits import tensor_blocks, tensor_layers, tensor_scores, tensor_widths
from tests.habits.tensor_models import PROGRAMS, Program
from tests.stages.small import small_matrices

#: The files that fill the table.
FILES = (tensor_widths, tensor_layers, tensor_scores, tensor_blocks)


@dataclass
class Verdict:
    """What came of a program: how far it is from one rank, what was said, which layers are whole."""

    worst: float = -1.0
    where: str = ""
    refused: str = ""
    error: str = ""
    #: Parameters of which this rank has all, and a part.
    whole: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def plainly(each: Program, num_steps: int) -> tuple[list[float], dict[str, Tensor], nn.Module]:
    """The program in plain torch."""
    module, batch = _made(each), each.batch()
    loss_of, steps = each.loss(module), optimizer(module.parameters())
    losses = []
    for _ in range(num_steps):
        steps.zero_grad()
        loss = loss_of(_called(module, batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        steps.step()
        losses.append(loss.item())
    return losses, {name: each.detach() for name, each in module.state_dict().items()}, module


def _made(each: Program) -> nn.Module:
    torch.manual_seed(0)
    return each.make().train()


def _called(module: nn.Module, batch: dict[str, Tensor]) -> Any:
    names = ("ids", "input_ids", "decoder_input_ids", "x")
    return module(**{key: value for key, value in batch.items() if key in names})


def judged(name: str, num_steps: int, wires: Any) -> Verdict:
    """The program on this rank of several, against one."""
    each, verdict = PROGRAMS[name], Verdict()
    losses, expected, reference = plainly(each, num_steps)
    module = _made(each)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            engine = parallelize(
                module, each.plan, loss=cast(Loss, each.loss(module)), optimizer=optimizer, example=each.batch(),
                wires=wires, **each.options,
            )  # fmt: skip
        verdict.warned = tuple(str(one.message) for one in warned)
        with engine:
            found = [engine.train_step(each.batch()) for _ in range(num_steps)]
            state = engine.state_dict()
            shapes = {name: tuple(one.shape) for name, one in engine.module.named_parameters(remove_duplicate=False)}
            verdict.whole = tuple(name for name, one in expected.items() if shapes.get(name) == tuple(one.shape))
            verdict.cut = tuple(name for name in shapes if name not in verdict.whole)
            _compare(verdict, dict(zip(map(str, range(num_steps)), losses, strict=True)), found, expected, state)
            if each.left is not None:
                each.left(reference, engine)
    except ShardwiseError as error:
        verdict.refused = str(error)
    except Exception as error:  # A verdict too: the ranks are needed for others.
        verdict.error = f"{type(error).__name__}: {error}"
    return verdict


def _compare(
    verdict: Verdict, losses: dict[str, float], found: list[float], expected: dict[str, Tensor], state: dict[str, Any]
) -> None:
    verdict.worst = 0.0
    pairs = [(f"loss {step}", torch.tensor(each), torch.tensor(found[int(step)])) for step, each in losses.items()]
    if missing := set(expected) ^ set(state):
        verdict.worst, verdict.where = math.inf, f"names: {sorted(missing)}"
        return
    pairs += [(name, each, state[name]) for name, each in expected.items()]
    for name, whole, mine in pairs:
        if whole.shape != mine.shape:
            verdict.worst, verdict.where = math.inf, name
            return
        if whole.is_floating_point():
            error = float((whole - mine.cpu()).abs().max() / (whole.abs().max() + 1e-6))
            if not error <= verdict.worst:
                verdict.worst, verdict.where = error, name


def judge(names: list[str], num_steps: int = 2) -> dict[str, Verdict]:
    """Several programs on this rank. Those of one plan share their wires."""
    found: dict[str, Verdict] = {}
    with small_matrices():
        for plan in dict.fromkeys(PROGRAMS[name].plan for name in names):
            wires = make_wires(Plan.parse(plan), limit_seconds=60)
            for name in names:
                if PROGRAMS[name].plan == plan:
                    found[name] = judged(name, num_steps, wires)
            if wires.watch is not None:
                wires.watch.close()
    return found
