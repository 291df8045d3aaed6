"""A pipeline by hand: stages one after the other, values cut from the graph and joined again, gradients passed back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwise.stages.stage import Batch, Split, Stage


def weigh(output: Any) -> Tensor:
    """A loss that depends on every number of an output, each in its own way."""
    total = torch.zeros(())
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            weights = torch.linspace(-1, 1, leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape)
            total = total + (leaf * weights).sum() + 0.1 * leaf.square().mean()
    return total


def run_stages(split: Split, batch: Batch) -> tuple[Any, Tensor]:
    """Forward and backward of all stages, each alone with what it receives. Returns the output and the loss."""
    arrived: dict[str, Tensor] = {}
    received: list[dict[str, Tensor]] = []
    made: list[dict[str, Tensor]] = []
    output: Any = None
    for number, stage in enumerate(split.stages):
        assert stage is not None
        inputs = {
            name: arrived[name].detach().clone().requires_grad_(arrived[name].requires_grad)
            for name in split.reads[number]
        }
        values, output = stage.run(inputs, batch)
        assert set(values) == set(split.writes[number])
        assert (output is None) == (number < split.num_stages - 1)
        received.append(inputs)
        made.append(values)
        arrived |= values
    loss = weigh(output)
    _backward(split, received, made, loss)
    return output, loss


def _backward(split: Split, received: list[dict[str, Tensor]], made: list[dict[str, Tensor]], loss: Tensor) -> None:
    gradients: dict[str, Tensor] = {}
    for number in reversed(range(split.num_stages)):
        roots = {name: value for name, value in made[number].items() if name in gradients}
        if number == split.num_stages - 1:
            loss.backward()  # type: ignore[no-untyped-call]
        elif roots:
            torch.autograd.backward(list(roots.values()), [gradients[name] for name in roots])
        for name, value in received[number].items():
            if value.grad is not None:
                gradients[name] = gradients[name] + value.grad if name in gradients else value.grad


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Every gradient, and an end to it."""
    found = {name: each.grad for name, each in module.named_parameters()}
    module.zero_grad(set_to_none=True)
    return found


def assert_same(
    ours: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None], tolerance: float = 1e-6
) -> None:
    """Equal, relative to the largest number of each tensor. No gradient is as good as one of zeros."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        got = ours[name]
        if expected is None or got is None:
            given = got if expected is None else expected
            assert given is None or not given.any(), f"{name}: one is None, the other is not zero"
            continue
        expected, got = expected.detach().double(), got.detach().double()
        scale = float(expected.abs().max())
        error = float((got - expected).abs().max())
        assert error <= tolerance * max(scale, 1e-6), f"{name}: off by {error} of {scale}"


def leaves_of(output: Any) -> dict[str, Tensor | None]:
    return {str(at): each for at, each in enumerate(pytree.tree_leaves(output)) if isinstance(each, Tensor)}


def assert_split_is_the_module(module: nn.Module, split: Split, batch: Batch, tolerance: float = 1e-6) -> None:
    """Output, loss and every gradient of the stages are those of the plain module."""
    import inspect

    names = inspect.signature(module.forward).parameters
    given = {name: each for name, each in batch.items() if name in names}
    if "use_cache" in names:
        given["use_cache"] = False
    buffers = {name: each.clone() for name, each in module.named_buffers()}
    plain = module(**given)
    loss = weigh(plain)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = gradients_of(module)
    plain_buffers = {name: each.clone() for name, each in module.named_buffers()}
    with torch.no_grad():
        for name, each in module.named_buffers():
            each.copy_(buffers[name])
    output, our_loss = run_stages(split, batch)
    assert_same(leaves_of(output), leaves_of(plain), tolerance)
    assert_same({"loss": our_loss}, {"loss": loss}, tolerance)
    assert_same(gradients_of(module), expected, tolerance)
    assert_same(dict(module.named_buffers()), dict(plain_buffers), tolerance)


def stages_of(split: Split) -> list[Stage]:
    return [stage for stage in split.stages if stage is not None]
