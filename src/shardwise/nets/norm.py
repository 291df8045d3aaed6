"""A norm, alone or after a sum, by kernels if a call of the module does nothing but the norm."""

import torch
from torch import Tensor, nn

from shardwise.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm, takes_norm
from shardwise.torch_private import get_compiled_call, hooks_of


def normed(norm: nn.Module, x: Tensor, *, kernels: bool) -> Tensor:
    """Return `norm(x)`."""
    if kernels and _is_plain(norm, x):
        if isinstance(norm, nn.LayerNorm):
            return layer_norm(x, norm.weight, norm.bias, norm.eps)
        assert isinstance(norm, nn.RMSNorm), "norms are of these two kinds"
        return rms_norm(x, norm.weight, norm.eps)
    made: Tensor = norm(x)
    return made


def add_normed(norm: nn.Module, x: Tensor, residual: Tensor, *, kernels: bool) -> tuple[Tensor, Tensor]:
    """Return the norm of `residual + x`, and that sum."""
    if kernels and x.shape == residual.shape and x.dtype == residual.dtype and _is_plain(norm, x):
        if isinstance(norm, nn.LayerNorm):
            return add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)
        assert isinstance(norm, nn.RMSNorm), "norms are of these two kinds"
        return add_rms_norm(x, residual, norm.weight, norm.eps)
    new = residual + x
    made: Tensor = norm(new)
    return made, new


def _is_plain(norm: nn.Module, x: Tensor) -> bool:
    """Whether a call runs only the forward of the module's class: no hook, no pipeline unit, no wrapper. Of a norm that
    was replaced by its kernel (`fusion/replace.py`), that is the forward of the class that it computes as."""
    kind = vars(type(norm)).get("computes_as", type(norm))
    if torch.compiler.is_compiling() or kind not in (nn.RMSNorm, nn.LayerNorm) or "forward" in vars(norm):
        return False
    if hooks_of(norm) or get_compiled_call(norm) is not None:
        return False
    weight, bias = norm.weight, getattr(norm, "bias", None)
    return isinstance(weight, Tensor) and takes_norm(x, weight, bias)
