"""`parallelize`: turn an unmodified module, a plan, a loss and an optimizer into an engine that trains.

The same script runs as a single process, which then runs every rank; under `torchrun`; or through `spawn`.
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

#: How long a rank may spend on one instruction if it may be compiling.
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

    `plan` is a `Plan` or its short form, `pp=3,schedule=zb-v,microbatches=8`. `loss(output, batch)` returns a mean or a
    sum over rows or labels, or a pair of a sum and its number of terms. It is tried on the example first; a loss that
    cannot be computed from parts of a batch is refused (`docs/habits.md`). A module in evaluation mode is put in
    training mode; one with mixed modes stays as it is. A module on the meta device gets the weights of this process's
    stages, determined by `seed` alone. `optimizer` makes one optimizer for all parameters, whole and in the order of
    `module.parameters()`; or several are given, each for its share of the parameters. Each is called once.

    `clip` clips gradients to a global norm. `compile` compiles each unit with `inductor` or the named backend. With
    `pad`, the number of microbatches need not divide a batch: some have a row more, or, if a batch has too few rows,
    repeat a row with weight 0. With `through_blocks`, a pipeline may be cut inside a block if whole blocks do not
    divide evenly. With `measure`, it is cut by measured times of units, not by FLOPs and bytes.

    Arguments for what is not detected: `tensor` names layers and how each is cut over tp; `tensor_chunks` is the number
    of chunks in which such a layer sends its result (`docs/tensor.md`); `positions`, `entries` and `masks` describe the
    module and its batches to cp (`docs/context.md`); `buffers`, "mean" or "first", is how replicas agree on buffers
    that each writes in its own forwards (`docs/habits.md`). With `verify`, layers are cut in a copy first: a layer that
    computes something else in parts is left whole, with a warning. `bucket_bytes` is the size of gradient buckets.
    Every rank is given the same `batch` of all rows, and takes its own; with "local", each replica (dp) is given its
    own rows (`sw.replica_of(plan)` says which), the same on all its ranks. On GPUs, kernels replace operators with the
    same result, as listed by `explain()`; `kernels=False` uses plain operators (`docs/kernels.md`). With
    `masters=False`, 16-bit weights are used and updated as they are, whatever the precision: no autocast, no fp32
    copies. With `graphs`, steps are captured as CUDA graphs where possible (`docs/engine.md`). `wires` are the
    connections between processes, if several engines share them (`ranks/wires.py`). If `torch.distributed` has several
    ranks, each runs one rank of the plan. Under `torchrun`, it is initialized here.
    """
    options = Options(
        clip=clip, compile=compile, seed=seed, pad=pad, through_blocks=through_blocks, measure=measure, tensor=tensor,
        tensor_chunks=tensor_chunks, positions=positions, entries=entries, masks=masks, bucket_bytes=bucket_bytes,
        buffers=buffers, verify=verify, batch=batch, kernels=kernels, masters=masters, graphs=graphs,
    )  # fmt: skip
    # On shared wires, a refusal that all ranks raise alike is not a failure of a rank.
    with making(None if wires is None else wires.watch, _COMPILING_SECONDS if compile else None) as watch:
        chosen = _checked(module, plan, loss, optimizer, example, options)
        check_here(chosen, watch, compiles=bool(compile))
        _check_module(module, chosen, options)
        example = put_together(module, example, chosen.precision)
        with forgotten(module, loss):
            return assemble(
                module, chosen, loss=loss, optimizer=optimizer, example=example, options=options,
                wires=wires or make_wires(chosen, watch, for_engine=True), owns_wires=wires is None,
            )  # fmt: skip


def _checked(module: nn.Module, plan: Plan | str, loss: Loss, optimizer: Any, example: Batch, options: Options) -> Plan:
    """Check the types of the arguments, and return the plan."""
    _check_arguments(module, plan, loss, optimizer, example)
    check_settings(clip=options.clip, bucket_bytes=options.bucket_bytes, buffers=options.buffers, batch=options.batch)
    return Plan.parse(plan) if isinstance(plan, str) else plan


def _check_module(module: nn.Module, plan: Plan, options: Options) -> None:
    """Refuse a module that cannot be trained under the plan."""
    check_module(module)
    if not options.masters:
        check_sixteen(module)
    check_renormed(module, plan)
    check_frequencies(module, plan)
    check_norms(module, plan)
    check_gradient_hooks(module, plan)


def _check_arguments(module: Any, plan: Any, loss: Any, optimizer: Any, example: Any) -> None:
    """Refuse arguments of the wrong type, before they fail somewhere inside."""
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
