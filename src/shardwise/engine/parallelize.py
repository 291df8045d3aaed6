"""`parallelize`: an unmodified module, a plan, a loss and an optimizer, to something that trains.

The same script runs alone, where one process runs every rank; under `torchrun`; or through `spawn`.
"""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from shardwise.engine.assemble import assemble
from shardwise.engine.device_check import check_example
from shardwise.engine.engine import Engine
from shardwise.engine.preflight import check_alone, check_arguments, check_bucket_bytes, check_compiles, check_module
from shardwise.engine.prepare import Options
from shardwise.engine.rank_device import batch_on, device_of_rank, put_on
from shardwise.planner.composition import check_composition
from shardwise.planner.plan import Plan
from shardwise.ranks.faults import LIMIT_SECONDS
from shardwise.ranks.mesh import agree_on
from shardwise.ranks.torchrun import join_if_launched
from shardwise.ranks.wires import ManyProcesses, OneProcess, make_wires
from shardwise.sharding.context.mask import Mask
from shardwise.sharding.context.sequence_shards import Entry
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
    positions: str | None = "position_ids",
    entries: Mapping[str, Entry | int | None] | None = None,
    masks: Mask | None = None,
    bucket_bytes: int | None = None,
    wires: OneProcess | ManyProcesses | None = None,
) -> Engine:
    """Return an engine that trains `module` under `plan`.

    `plan` may be a `Plan` or its short form, `pp=3,schedule=zb-v,microbatches=8`. `loss(output, batch)` gives the mean
    over a microbatch, or its sum and the number that it is summed over: then all of a batch weigh the same, however
    they are spread. It is tried on the example first. The module is put in training mode; one on the meta device gets
    the weights of this process's stages, from `seed` alone. `optimizer` makes one for all parameters, or several are
    given, each for its share of them.

    Gradients are clipped to a global norm of `clip`, if given. With `compile` each unit is compiled, by `inductor` or
    by the backend that it names. With `pad` the microbatches need not divide a batch: some have a row more, or, in a
    batch of too few rows, repeat one that counts for nothing. With `through_blocks` a pipeline may be cut in a block
    where whole blocks do not divide evenly; with `measure` it is cut by what units take here, which are timed first,
    and not by their FLOPs and bytes.

    What is not found is said: `tensor` names layers and how each is cut over tp, and `tensor_chunks` in how many chunks
    such a layer sends what it computes, if not as many as pay (`docs/tensor.md`); `positions`, `entries` and `masks`
    say how cp is to take the module and its batches (`docs/context.md`). Gradients are summed over replicas in buckets
    of `bucket_bytes`, if given (`docs/data_parallel.md`). `wires` are what the processes talk over, where several
    engines are to share it (`ranks/wires.py`); an engine that is given none makes its own and closes them.

    Where `torch.distributed` has several ranks, each of them runs one of the plan. Under `torchrun` it is started here.
    """
    chosen = _checked(module, plan, loss, optimizer, example, compile=bool(compile), bucket_bytes=bucket_bytes)
    options = Options(
        clip=clip,
        compile=compile,
        seed=seed,
        pad=pad,
        through_blocks=through_blocks,
        measure=measure,
        tensor=tensor,
        tensor_chunks=tensor_chunks,
        positions=positions,
        entries=entries,
        masks=masks,
        bucket_bytes=bucket_bytes,
    )
    example = _put_together(module, example)
    made = wires or make_wires(chosen, limit_seconds=_COMPILING_SECONDS if compile else LIMIT_SECONDS)
    try:
        return assemble(
            module, chosen, loss=loss, optimizer=optimizer, example=example, options=options, wires=made,
            owns_wires=wires is None,
        )  # fmt: skip
    except BaseException:
        if wires is None and made.watch is not None:
            made.watch.close()
        raise


def _put_together(module: nn.Module, example: Batch) -> Batch:
    """Have all of the module on this rank's device, and the example that is returned."""
    device = device_of_rank(module, example)
    put_on(module, device)
    example = batch_on(example, device)
    check_example(module, example)
    return example


def _checked(
    module: nn.Module,
    plan: Plan | str,
    loss: Loss,
    optimizer: MakeOptimizer | Sequence[Share],
    example: Batch,
    *,
    compile: bool,
    bucket_bytes: int | None,
) -> Plan:
    """The plan, after all that can be refused before anything is made."""
    check_arguments(module, plan, loss, optimizer, example)
    chosen = Plan.parse(plan) if isinstance(plan, str) else plan
    join_if_launched()
    are_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if are_many:
        agree_on(chosen)
        chosen.check_world(dist.get_world_size())
    check_composition(chosen)
    if are_many and compile:
        check_compiles(chosen)
    if not are_many:
        check_alone(chosen)
    check_module(module)
    check_bucket_bytes(bucket_bytes)
    return chosen
