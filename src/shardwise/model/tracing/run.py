"""One forward and one backward of a module with a recorder watching. No numbers are computed, nothing is changed."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.errors import ShardwiseError
from shardwise.model.tracing.recorder import Recorder, Segment, key_of, tensors_in
from shardwise.torch_private import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode, pytree


def record(
    module: nn.Module, blocks: Mapping[str, nn.Module], args: tuple[Any, ...], kwargs: Mapping[str, Any], *, fake: bool
) -> tuple[list[Segment], dict[str, Tensor]]:
    """Return the pieces of a run in order, and its parameters by name (tied ones under each of their names).

    With `fake`, tensors have shapes and no memory. Without, the module runs in earnest on copies of its tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    with mode, torch.enable_grad():
        state = _twins(module, fake=fake)
        parameters = {name: state[name] for name, _ in module.named_parameters(remove_duplicate=False)}
        given = pytree.tree_map_only(Tensor, partial(_twin, fake=fake), (args, dict(kwargs)))
        first = _first(tensors_in(given))
        positions = first.numel() if not first.is_floating_point() else first.shape[0]
        recorder = Recorder(parameters, num_samples=first.shape[0], num_positions=positions)
        keeping = saved_tensors_hooks(recorder.keep, lambda tensor: tensor)
        with _watched(blocks, recorder), keeping, recorder:
            output = _called(module, state, *given)
            recorder.turn()
            _loss(output).backward()  # type: ignore[no-untyped-call]
    return recorder.segments, parameters


def _twins(module: nn.Module, *, fake: bool) -> dict[str, Tensor]:
    """Return new parameters and buffers, under all their names. A tensor with two names stays one."""
    made: dict[int, Tensor] = {}
    twins = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if id(tensor) not in made:
            made[id(tensor)] = _twin(tensor, fake=fake).requires_grad_(tensor.requires_grad)
        twins[name] = made[id(tensor)]
    return twins


def _twin(tensor: Tensor, *, fake: bool) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype) if fake else tensor.detach().clone()


def _first(tensors: list[Tensor]) -> Tensor:
    found = next((tensor for tensor in tensors if tensor.dim() > 0), None)
    if found is None:
        raise ShardwiseError(
            "the example batch holds no tensor with a dimension for its samples",
            remedy='trace_model(module, {"input_ids": torch.zeros(1, 128, dtype=torch.long)})',
        )
    return found


def _called(module: nn.Module, state: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return torch.func.functional_call(module, state, args, kwargs, tie_weights=False)
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise ShardwiseError(
            f"{type(module).__name__} reads values while it runs ({error.func}), and a trace has none",
            remedy="trace_model(module, batch, fake=False), which runs it with real tensors on a small batch",
        ) from None


def _loss(output: Any) -> Tensor:
    """Return a scalar to differentiate: the module's loss if it returns one, otherwise the sum of its outputs."""
    named = getattr(output, "loss", None)
    losses = [named] if isinstance(named, Tensor) else tensors_in(output)
    losses = [each for each in losses if each.requires_grad]
    if not losses:
        raise ShardwiseError(
            "no output of the module depends on a parameter that requires a gradient",
            remedy="a module in which requires_grad is true for some parameters",
        )
    return torch.stack([each.float().sum() for each in losses]).sum()


@contextmanager
def _watched(blocks: Mapping[str, nn.Module], recorder: Recorder) -> Iterator[None]:
    """Tell the recorder when a block begins and ends, forward and backward."""
    handles = []
    for path, block in blocks.items():
        handles.append(block.register_forward_pre_hook(partial(_before, recorder, path), with_kwargs=True))
        handles.append(block.register_forward_hook(partial(_after, recorder)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(recorder: Recorder, path: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    gap = recorder.segments[-1]
    given = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
    gap.forward.wanted.update(map(key_of, given))
    if given and given[0].requires_grad and not gap.is_empty:
        given[0].register_hook(partial(recorder.back_into, gap))  # type: ignore[no-untyped-call]
    segment = recorder.enter(path)
    if given:
        segment.input_elements, segment.input_key = given[0].numel(), key_of(given[0])


def _after(recorder: Recorder, _: nn.Module, __: Any, output: Any) -> None:
    segment = recorder.segments[-1]
    given = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    segment.forward.wanted.update(map(key_of, given))
    segment.output_elements = sum(tensor.numel() for tensor in given)
    for tensor in given:
        if tensor.requires_grad:
            tensor.register_hook(partial(recorder.back_into, segment))  # type: ignore[no-untyped-call]
    recorder.enter(None)
