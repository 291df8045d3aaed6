"""Make torch's own encoders call their layers, even without gradients.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` have a fast path in evaluation mode that reads the weights of
their layers and calls none of them. A cut layer holds only a part of its weights. `nn.TransformerEncoder` removes
tokens that a padding mask hides, and passes a nested tensor from layer to layer, which cannot be sent.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError


@contextmanager
def layers_called(module: nn.Module | None = None) -> Iterator[None]:
    """Disable the fast path. If it would have given other numbers in `module`, refuse the call."""
    inside = () if module is None else module.modules()
    encoders = [each for each in inside if isinstance(each, nn.TransformerEncoder)]
    was_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    with ExitStack() as hooks:
        for each in encoders if was_fast else ():
            hooks.callback(each.register_forward_pre_hook(_check_hidden, with_kwargs=True).remove)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(was_fast)


def _check_hidden(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call for which the fast path would return zeros for hidden tokens."""
    given = dict(zip(("src", "mask", "src_key_padding_mask"), args, strict=False)) | kwargs
    hidden, mask = given.get("src_key_padding_mask"), given.get("mask")
    if not encoder.use_nested_tensor or encoder.training or mask is not None or not isinstance(hidden, Tensor):
        return
    hidden = hidden if hidden.dtype is torch.bool else hidden != 0
    are_last = hidden.dim() == 2 and bool((hidden[:, 1:] >= hidden[:, :-1]).all())
    if are_last and bool(hidden.any()):
        raise ShardwiseError(
            "nn.TransformerEncoder gives zeros in evaluation mode for tokens that src_key_padding_mask hides, and its"
            " own numbers in training; with layers that ranks share it can do the latter alone",
            remedy="nn.TransformerEncoder(..., enable_nested_tensor=False)",
        )
