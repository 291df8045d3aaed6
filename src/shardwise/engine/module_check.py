"""Find, before anything is made, what an engine, or that of this plan, could not train as plain torch does."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardwise.engine.shown import is_guarded
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.stages.backward_trial import is_linear
from shardwise.states.shared_buffers import WAYS
from shardwise.torch_private import accumulated_hooks, gradient_hooks, is_compiled

#: Wrappers of other ways to train. By name, because the last has to be imported.
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})


def check_module(module: nn.Module) -> None:
    """Refuse a module with nothing to train, or with gradients that no engine sums."""
    if is_compiled(module):
        raise ShardwiseError(
            "the module is compiled as a whole by torch.compile, and what is inside it cannot be followed or cut",
            remedy="the module from before torch.compile, and parallelize(..., compile=True); or layer.compile() of its"
            " layers",
        )
    for name, each in module.named_modules():
        if isinstance(each, torch.jit.ScriptModule):
            raise ShardwiseError(
                f"{name or 'the module'} is compiled by torch.jit, and what is inside it cannot be followed or cut",
                remedy="the module from before torch.jit.script or trace; layer.compile() of its layers for speed",
            )
        if _WRAPPERS.intersection(kind.__name__ for kind in type(each).__mro__ if kind.__module__.startswith("torch.")):
            raise ShardwiseError(
                f"{name or 'the module'} is wrapped in {type(each).__name__}, which shares out rows or weights by"
                " itself",
                remedy=f"the module that it is around: model{'.' + name if name else ''}.module",
            )
    every = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, each in every if is_lazy(each)]
    if lazy:
        raise ShardwiseError(
            f"{lazy[0]} has no shape yet: it is of a lazy module, which makes its weights in its first forward",
            remedy="module(**example) once before parallelize; or the layer with its width, nn.Linear(8, 16)",
        )
    parameters = list(module.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ShardwiseError(
            f"none of the {len(parameters)} parameters of {type(module).__name__} requires a gradient, so there is"
            " nothing to train",
            remedy="module.requires_grad_()",
        )
    check_memory(module)
    for name, embedding in _embeddings(module):
        if embedding.sparse and embedding.weight.requires_grad:
            raise ShardwiseError(
                f"{name} is an {type(embedding).__name__} with sparse=True, and gradients are summed as dense ones",
                remedy=f"module.get_submodule({name!r}).sparse = False",
            )


def check_memory(module: nn.Module) -> None:
    """Refuse parameters that lie in the memory of others: an engine gives each a place, and they would go apart."""
    held = [(name, each) for name, each in (*module.named_parameters(), *module.named_buffers()) if _has_memory(each)]
    places = sorted(((each.data_ptr(), name, each) for name, each in held), key=lambda place: place[0])
    end, before = 0, None
    for start, name, each in places:
        is_trained = before is not None and (before[1].requires_grad or each.requires_grad)
        if before is not None and is_trained and start < end and _share(before[1], each):
            raise ShardwiseError(
                f"{before[0]} and {name} are two tensors that share memory: a step on one writes to the other, and"
                " ranks keep each by itself",
                remedy="one parameter for both (other.weight = layer.weight), of which forward takes a part:"
                " weight[:4]; or a clone()",
            )
        if start + _extent(each) > end:
            end, before = start + _extent(each), (name, each)


def _has_memory(tensor: Tensor) -> bool:
    if is_guarded(tensor):  # It belongs to another engine, which gives it memory while it works.
        return False
    return not (tensor.is_meta or is_lazy(tensor)) and tensor.layout is torch.strided and tensor.data_ptr() != 0


def _extent(tensor: Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _share(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors whose bytes overlap have a number in common: columns of one matrix may not."""
    if one.dtype != other.dtype:
        return True
    apart = (other.data_ptr() - one.data_ptr()) // one.element_size()
    length = max(_extent(one), _extent(other)) // one.element_size()
    found = torch.arange(length)
    mine, others = (found.as_strided(each.shape, each.stride()).flatten() for each in (one, other))
    return bool(torch.isin(mine, others + apart).any())


def check_sixteen(module: nn.Module) -> None:
    """Refuse weights that are computed in fewer bits than they have, where nothing is to be cast."""
    wide = [name for name, each in module.named_parameters() if each.is_floating_point() and each.dtype.itemsize > 2]
    if wide:
        kind = str(module.get_parameter(wide[0]).dtype).removeprefix("torch.")
        raise ShardwiseError(
            f"masters=False is for weights of 16 bits, which are stepped on as they are, and {len(wide)} parameters of"
            f" {type(module).__name__} are others ({wide[0]}: {kind})",
            remedy="module.to(torch.bfloat16), or masters=True",
        )


def check_renormed(module: nn.Module, plan: Plan) -> None:
    """Refuse embeddings that a forward shortens, where ranks look up other rows or update other numbers."""
    others = [f"{axis}={getattr(plan, axis)}" for axis in ("dp", "tp", "cp") if getattr(plan, axis) > 1]
    others += [f"precision={plan.precision}"] if plan.precision != "fp32" else []
    others += ["offload.parameters"] if plan.offload.parameters else []
    others += [f"schedule={plan.schedule}"] if plan.schedule == "pipedream-2bw" else []
    for name, embedding in _embeddings(module) if others else ():
        if embedding.max_norm is not None:
            raise ShardwiseError(
                f"{name} has max_norm={embedding.max_norm:g}, so that forwards write to the rows that they look up,"
                f" and under {', '.join(others)} not all ranks look up, or update, the same",
                remedy=f"module.get_submodule({name!r}).max_norm = None, and norms limited in the forward:"
                " nn.functional.embedding(...).renorm(...); or a plan of pp alone",
            )


def check_norms(module: nn.Module, plan: Plan) -> None:
    """Refuse norms that talk to other ranks themselves."""
    for name, each in module.named_modules() if plan.num_ranks > 1 else ():
        if isinstance(each, nn.SyncBatchNorm):
            raise ShardwiseError(
                f"{name} is a SyncBatchNorm, which adds up over all ranks of the process by itself, whatever they have:"
                f" rows, stages or parts of layers ({plan})",
                remedy="nn.BatchNorm2d, which sees a replica's microbatch, as under DDP; or nn.GroupNorm, which is the"
                " same under every plan",
            )


def parts_of(plan: Plan) -> list[str]:
    """Return what makes parts of a batch be computed separately, in a plan's notation."""
    return [f"{axis}={getattr(plan, axis)}" for axis in ("dp", "cp", "microbatches") if getattr(plan, axis) > 1]


def check_frequencies(module: nn.Module, plan: Plan) -> None:
    """Refuse embeddings whose gradients are divided by how often a word is in the batch, where parts are computed."""
    parts = parts_of(plan)
    for name, embedding in _embeddings(module) if parts else ():
        if embedding.scale_grad_by_freq:
            raise ShardwiseError(
                f"{name} has scale_grad_by_freq=True, so that the gradient of a word is divided by how often it is in"
                f" the batch, and under {', '.join(parts)} parts of a batch are computed, which count their own words",
                remedy=f"module.get_submodule({name!r}).scale_grad_by_freq = False; or a plan without"
                f" {', '.join(part.partition('=')[0] for part in parts)}",
            )


def check_gradient_hooks(module: nn.Module, plan: Plan) -> None:
    """Refuse hooks of parameters that make something else of parts of a gradient than of their sum.

    A hook that is linear (a mask, a factor) may be called with the gradient of some rows: it is tried on numbers.
    """
    parts = parts_of(plan)
    for name, parameter in module.named_parameters() if parts else ():
        hooks = list(gradient_hooks(parameter).values())
        late = list(accumulated_hooks(parameter).values())
        if any(home_of_hook(each).startswith("shardwise.") for each in late):
            raise ShardwiseError(
                f"{name} is trained by another engine, and two engines would each step on it",
                remedy="engine.close() of the other one first, or the module made anew if that one is lost; or one"
                " module of both, and one engine",
            )
        if late or (hooks and not is_linear(hooks, parameter)):
            which = "register_post_accumulate_grad_hook" if late else "register_hook"
            raise ShardwiseError(
                f"a hook of {name} ({which}) would be called with the gradients of some rows, under {', '.join(parts)},"
                " and does not make of their sum what it makes of them",
                remedy="a hook that multiplies; engine.gradients() to look at gradients, clip= to clip them, or an"
                " optimizer that does it in step()",
            )


def home_of_hook(hook: Any) -> str:
    """Return the name of the file that defines a hook."""
    return getattr(getattr(hook, "func", hook), "__module__", None) or ""


def check_settings(*, clip: Any, bucket_bytes: int | None, buffers: Any, batch: Any) -> None:
    """Refuse numbers that mean something else than they say."""
    if clip is not None and (
        isinstance(clip, bool) or not isinstance(clip, (int, float)) or math.isnan(clip) or clip <= 0
    ):
        what = "would turn gradients round" if isinstance(clip, (int, float)) and clip < 0 else "is no norm to clip to"
        raise ShardwiseError(
            f"clip={clip!r} {what}", remedy="clip=1.0, or clip=None; clip=float('inf') only measures the norm"
        )
    if bucket_bytes is not None and bucket_bytes < 1:
        raise ShardwiseError(
            f"bucket_bytes={bucket_bytes}: a bucket holds at least one number", remedy="bucket_bytes=16 * 2**20"
        )
    if buffers is not None and buffers not in WAYS:
        raise ShardwiseError(
            f"buffers={buffers!r} is no way to have replicas agree on what forwards write",
            remedy='buffers="mean", or buffers="first"',
        )
    if batch not in ("same", "local"):
        raise ShardwiseError(
            f"batch={batch!r} is no way to bring batches",
            remedy='batch="same" if every rank is given all rows, batch="local" if every replica is given its own',
        )


def _embeddings(module: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    for name, each in module.named_modules():
        if isinstance(each, (nn.Embedding, nn.EmbeddingBag)):
            yield name, each
