"""`parallelize`: an unmodified module, a plan, a loss and an optimizer, to something that trains.

The same script runs alone, where one process runs every rank; under `torchrun`; or through `spawn`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from shardwise.engine.assemble import assemble
from shardwise.engine.engine import Engine
from shardwise.engine.module_check import (
    check_frequencies,
    check_gradient_hooks,
    check_module,
    check_norms,
    check_renormed,
    check_settings,
    check_sixteen,
)
from shardwise.engine.options import Options
from shardwise.engine.plan_check import check_here
from shardwise.engine.rank_device import put_together
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.telling import making
from shardwise.ranks.wires import ManyProcesses, OneProcess, make_wires
from shardwise.sharding.context.mask import Mask
from shardwise.sharding.context.sequence_shards import Entry
from shardwise.stages.split.remembered import forgotten
from shardwise.stages.stage import Batch, Loss
from shardwise.states.parameter_group import MakeOptimizer, Share

#: How long a rank may be at one instruction where it may be compiling.
_COMPILING_SECONDS = 300.0


def parallelize(
    module: nn.Module,
    plan: Plan | str,
    *,
    loss: Loss,
    optimizer: MakeOptimizer | Sequence[Share],
    example: Batch,
    clip: float | None = None,
    compile: bool | str = False,
    seed: int = 0,
    pad: bool = False,
    through_blocks: bool = False,
    measure: bool = False,
    tensor: Mapping[str, str] | None = None,
    tensor_chunks: int | None = None,
    verify: bool = True,
    positions: str | None = "position_ids",
    entries: Mapping[str, Entry | int | None] | None = None,
    masks: Mask | None = None,
    bucket_bytes: int | None = None,
    buffers: str | None = None,
    batch: str = "same",
    kernels: bool = True,
    masters: bool = True,
    graphs: bool | Literal["auto"] = False,
    wires: OneProcess | ManyProcesses | None = None,
) -> Engine:
    """Return an engine that trains `module` under `plan`.

    `plan` may be a `Plan` or its short form, `pp=3,schedule=zb-v,microbatches=8`. `loss(output, batch)` gives a mean or
    a sum over rows or labels, or a pair of a sum and the number that it is summed over. It is tried on the example
    first, and what parts of a batch cannot tell is refused (`docs/habits.md`). A module in evaluation mode is put in
    training mode; one that is partly so stays as it is. One on the meta device gets the weights of this process's
    stages, from `seed` alone. `optimizer` makes one for all parameters, whole and as `module.parameters()` gives them,
    or several are given, each for its share of them. Each is called once.

    Gradients are clipped to a global norm of `clip`, if given. With `compile` each unit is compiled, by `inductor` or
    by the backend that it names. With `pad` the microbatches need not divide a batch: some have a row more, or, in a
    batch of too few rows, repeat one that counts for nothing. With `through_blocks` a pipeline may be cut in a block
    where whole blocks do not divide evenly; with `measure` it is cut by what units take here, not by FLOPs and bytes.

    What is not found is said: `tensor` names layers and how each is cut over tp, and `tensor_chunks` in how many chunks
    such a layer sends what it computes (`docs/tensor.md`); `positions`, `entries` and `masks` say how cp is to take the
    module and its batches (`docs/context.md`); `buffers`, "mean" or "first", what replicas are to have of buffers that
    each writes in its own forwards (`docs/habits.md`). With `verify` layers are cut in a copy first: what computes
    something else in parts is left whole, with a warning. Gradients are summed in buckets of `bucket_bytes`, if given.
    Every rank is given the same `batch`, of all rows, and takes its own; with "local" each replica (dp) is given rows
    of its own (`sw.replica_of(plan)` says which), the same on all ranks of it. On GPUs kernels compute what they
    compute alike, listed by `explain()`; with `kernels=False` plain operators do (`docs/kernels.md`). With
    `masters=False` weights of 16 bits are computed with and stepped on as they are, whatever the precision: no
    autocast, no copies in fp32. With `graphs` steps are captured as CUDA graphs where they can be (`docs/engine.md`).
    `wires` are what processes talk over, where several engines are to share it (`ranks/wires.py`). Where
    `torch.distributed` has several ranks, each of them runs one of the plan. Under `torchrun` it is started here.
    """
    options = Options(
        clip=clip, compile=compile, seed=seed, pad=pad, through_blocks=through_blocks, measure=measure, tensor=tensor,
        tensor_chunks=tensor_chunks, positions=positions, entries=entries, masks=masks, bucket_bytes=bucket_bytes,
        buffers=buffers, verify=verify, batch=batch, kernels=kernels, masters=masters, graphs=graphs,
    )  # fmt: skip
    # Over wires that others use too, what all refuse alike is no fault.
    with making(None if wires is None else wires.watch, _COMPILING_SECONDS if compile else None) as watch:
        chosen = _checked(module, plan, loss, optimizer, example, options)
        check_here(chosen, watch, compiles=bool(compile))
        _check_module(module, chosen, options)
        example = put_together(module, example, chosen.precision)
        with forgotten(module, loss):
            return assemble(
                module, chosen, loss=loss, optimizer=optimizer, example=example, options=options,
                wires=wires or make_wires(chosen, watch), owns_wires=wires is None,
            )  # fmt: skip


def _checked(module: nn.Module, plan: Plan | str, loss: Loss, optimizer: Any, example: Batch, options: Options) -> Plan:
    """The plan, if what was given is of the right kind."""
    _check_arguments(module, plan, loss, optimizer, example)
    check_settings(clip=options.clip, bucket_bytes=options.bucket_bytes, buffers=options.buffers, batch=options.batch)
    return Plan.parse(plan) if isinstance(plan, str) else plan


def _check_module(module: nn.Module, plan: Plan, options: Options) -> None:
    """Refuse what of the module cannot be trained so."""
    check_module(module)
    if not options.masters:
        check_sixteen(module)
    check_renormed(module, plan)
    check_frequencies(module, plan)
    check_norms(module, plan)
    check_gradient_hooks(module, plan)


def _check_arguments(module: Any, plan: Any, loss: Any, optimizer: Any, example: Any) -> None:
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
