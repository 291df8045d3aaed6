"""What the engines can run today, of a module and of a world. What plans compose is in `planner.composition`."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.states.parameter_group import Share


def check_arguments(module: Any, plan: Any, loss: Any, optimizer: Any, example: Any) -> None:
    """Refuse what is of another kind than `parallelize` takes, before it fails somewhere inside."""
    are_shares = isinstance(optimizer, Sequence) and bool(optimizer) and all(isinstance(o, Share) for o in optimizer)
    for name, given, is_right, wanted in (
        ("module", module, isinstance(module, nn.Module), "an nn.Module"),
        ("plan", plan, isinstance(plan, (Plan, str)), 'a Plan, or its short form "dp=2,tp=2"'),
        ("loss", loss, callable(loss), "a function loss(output, batch)"),
        ("example", example, isinstance(example, Mapping), 'a dictionary like {"input_ids": ids, "labels": labels}'),
        (
            "optimizer",
            optimizer,
            are_shares or (callable(optimizer) and not isinstance(optimizer, Optimizer)),
            "what makes one: lambda parameters: AdamW(parameters, lr=3e-4), or a list of Share",
        ),
    ):
        if not is_right:
            kind = f"the class {given.__name__}" if isinstance(given, type) else f"of type {type(given).__name__}"
            raise ShardwiseError(f"{name} is {kind}, and not what parallelize takes", remedy=f"{name}: {wanted}")


def check_alone(plan: Plan) -> None:
    """Refuse a plan that one process cannot run by itself: of a pipeline it can run every rank."""
    if plan.num_ranks > plan.pp:
        axes = ",".join(f"{axis}={getattr(plan, axis)}" for axis in ("dp", "tp", "cp") if getattr(plan, axis) > 1)
        raise ShardwiseError(
            f"{axes} needs processes: one alone runs all ranks of a pipeline (pp), and of no other axis",
            remedy=f"sw.spawn(fn, devices={plan.num_ranks}), or torchrun --nproc-per-node {plan.num_ranks}",
        )


def check_module(module: nn.Module) -> None:
    """Refuse a module with nothing to train."""
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ShardwiseError(
            f"none of the {len(parameters)} parameters of {type(module).__name__} requires a gradient, so there is"
            " nothing to train",
            remedy="module.requires_grad_()",
        )


def check_bucket_bytes(bucket_bytes: int | None) -> None:
    """Refuse buckets that hold nothing."""
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ShardwiseError(
            f"bucket_bytes={bucket_bytes}: a bucket holds at least one number", remedy="bucket_bytes=16 * 2**20"
        )


def check_compiles(plan: Plan) -> None:
    """Refuse to compile what talks to other ranks inside of a block."""
    axes = ",".join(f"{axis}={getattr(plan, axis)}" for axis in ("tp", "cp", "ep") if getattr(plan, axis) > 1)
    if axes:
        raise ShardwiseError(
            f"compile with {axes}: ranks talk to each other inside of a block, and a compiled block cannot yet",
            remedy="compile=False, or a plan of dp and pp, with any zero",
        )
