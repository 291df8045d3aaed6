"""Low-rank adapters (LoRA): a model with frozen weights, and beside each adapted one two narrow, trained matmuls.

    x ── W (frozen) ─────────┬── + ──        W: k x n, no gradient, no optimizer state
      └─ A (k x r) ── B (r x n) ┘            A, B: trained; of qkv one A for each of its parts (Hu et al. 2021, PEFT)

Tensor parallelism: for a column-parallel W, A is replicated and B cut as W is; for a row-parallel W, B is replicated.
"""

from collections.abc import Iterator
from dataclasses import replace

from shardwise.errors import ShardwiseError
from shardwise.model.model import Block, Model, Parameter
from shardwise.model.operations import Embedding, Matmul, Operation, Saved, Width


def with_lora(model: Model, rank: int) -> Model:
    """Return the model with adapters of this rank at every dense matmul of its layers; nothing else trains."""
    if rank < 1:
        raise ShardwiseError(f"adapters of rank {rank}: a rank is at least 1", remedy="--lora 16")
    made: dict[str, Block] = {}
    for block, _ in model.kinds:
        made[block.kind] = _adapted(block, rank)
    if not any(parameter.trains for block in made.values() for parameter in block.parameters):
        raise ShardwiseError(
            f"{model.name} has no layer whose matmuls are known to take adapters",
            remedy="a module that has its adapters, as package.module:factory",
        )
    return replace(model, name=f"{model.name} with LoRA {rank}", blocks=tuple(made[each.kind] for each in model.blocks))


def _adapted(block: Block, rank: int) -> Block:
    operations: list[Operation] = []
    parameters = [replace(parameter, trains=False) for parameter in block.parameters]
    for operation in block.operations:
        if not isinstance(operation, (Matmul, Embedding)):
            operations.append(operation)
            continue
        operations.append(replace(operation, trains=False))
        if block.stack and isinstance(operation, Matmul) and _takes_adapters(operation):
            operations += _narrow(operation, rank)
            parameters += _parameters(operation, rank)
    return replace(block, operations=tuple(operations), parameters=tuple(parameters))


def _takes_adapters(operation: Matmul) -> bool:
    """Exclude routers, which have no adapters, and experts, which seldom have: their number of rows varies."""
    return operation.sharding != "none" and not operation.num_experts


def _narrow(operation: Matmul, rank: int) -> Iterator[Matmul]:
    """Yield both matmuls of an adapter. The input of the first is saved already; its output is saved for the second."""
    each = Width(len(operation.outputs) * rank)
    kept = Saved(name="narrow", elements=each.elements, rows=operation.rows, cut="columns")
    is_row = operation.sharding == "row"
    yield replace(
        operation, name=f"{operation.name}_a", outputs=(each,), sharding="row" if is_row else "none", bias=False,
        trains=True, saves=(kept,),
    )  # fmt: skip
    yield replace(
        operation, name=f"{operation.name}_b", inputs=Width(rank), sharding="none" if is_row else "column", bias=False,
        trains=True, saves=(),
    )  # fmt: skip


def _parameters(operation: Matmul, rank: int) -> Iterator[Parameter]:
    is_row = operation.sharding == "row"
    each = len(operation.outputs) * rank
    yield Parameter(
        name=f"{operation.name}.lora_A.weight", shape=(each, operation.k), tp_dim=1 if is_row else None,
        pieces=(operation.inputs,) if is_row else (),
    )  # fmt: skip
    yield Parameter(
        name=f"{operation.name}.lora_B.weight", shape=(operation.n, rank), tp_dim=None if is_row else 0,
        pieces=() if is_row else operation.outputs,
    )  # fmt: skip
