"""What people do to the channels between two layers. Each takes [..., channels] and gives as many, or half of them."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Change = Callable[[Tensor], Tensor]


def _set_first(h: Tensor) -> Tensor:
    h = h.clone()
    h[..., 0] = 0.5
    return h


def _scale_some(h: Tensor) -> Tensor:
    h = h * 1.0
    h[..., 2:5] *= 2
    return h


def _masked(h: Tensor) -> Tensor:
    return h.clone().masked_fill_(torch.arange(h.shape[-1]) % 3 == 0, 0.0)


def _group_mean(h: Tensor) -> Tensor:
    groups = h.unflatten(-1, (4, -1))
    return (groups - groups.mean(-1, keepdim=True)).flatten(-2)


def _across_groups(h: Tensor) -> Tensor:
    groups = h.unflatten(-1, (-1, 8))
    return (groups - groups.mean(-2, keepdim=True)).flatten(-2)


def _top(h: Tensor) -> Tensor:
    return h * (h >= h.topk(5, dim=-1).values[..., -1:])


def _mixed(h: Tensor) -> Tensor:
    return torch.einsum("...gc,gh->...hc", h.unflatten(-1, (4, -1)), torch.ones(4, 4).tril().to(h) / 4).flatten(-2)


def _by_rows(h: Tensor) -> Tensor:
    rows = h.reshape(-1, h.shape[-1])
    return (rows - rows.amax(-1, keepdim=True)).exp().view(h.shape)


def _turned(h: Tensor) -> Tensor:
    first, second = h[..., ::2], h[..., 1::2]
    return torch.stack((-second, first), -1).flatten(-2)


def _rotate_half(h: Tensor) -> Tensor:
    first, second = h.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


#: As many channels come out as go in. The first few treat every channel alike.
SAME: dict[str, Change] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "tanh": torch.tanh,
    "square": lambda h: functional.relu(h).square(),
    "silu": lambda h: h * torch.sigmoid(h),
    "clamp": lambda h: h.clamp(-2, 2),
    "in-place relu": lambda h: functional.relu(h * 1.0, inplace=True),
    "add_": lambda h: h.clone().add_(0.1),
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "dropout of nothing": lambda h: functional.dropout(h, 0.0),
    "half of it": lambda h: h * 0.5 + h.detach() * 0.25,
    "softmax": lambda h: h.softmax(-1),
    "log softmax": lambda h: functional.log_softmax(h, dim=-1),
    "minus the mean": lambda h: h - h.mean(-1, keepdim=True),
    "layer norm": lambda h: functional.layer_norm(h, (h.shape[-1],)),
    "a root of squares": lambda h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5),
    "a length of one": lambda h: functional.normalize(h, dim=-1),
    "over its deviation": lambda h: h / (h.std(-1, keepdim=True) + 0.5),
    "less its variance": lambda h: h - 0.1 * torch.var(h, dim=-1, keepdim=True),
    "over the largest": lambda h: h / (h.abs().amax(-1, keepdim=True) + 0.5),
    "cumsum": lambda h: h.cumsum(-1) / 8,
    "cumsum over tokens": lambda h: h.cumsum(1) / 8,
    "roll": lambda h: h.roll(1, dims=-1),
    "roll by half": lambda h: torch.roll(h, h.shape[-1] // 2, -1),
    "flip": lambda h: h.flip(-1),
    "over the root of the width": lambda h: h / math.sqrt(h.shape[-1]),
    "a ramp": lambda h: h * torch.linspace(0.5, 1.5, h.shape[-1]).to(h),
    "the first one set": _set_first,
    "some scaled in place": _scale_some,
    "masked_fill_": _masked,
    "groups less their mean": _group_mean,
    "means across groups": _across_groups,
    "the largest only": _top,
    "groups mixed": _mixed,
    "rows": _by_rows,
    "pairs turned": _turned,
    "rotate_half": _rotate_half,
    "the first four last": lambda h: torch.cat((h[..., 4:], h[..., :4]), -1),
    "padded": lambda h: functional.pad(h[..., :-2], (2, 0)),
    "sorted": lambda h: h.sort(-1).values,
    "a permutation": lambda h: h[..., torch.arange(h.shape[-1] - 1, -1, -1)],
    "every one and the first": lambda h: h + h[..., :1],
    "logsumexp": lambda h: h - h.logsumexp(-1, keepdim=True),
    "channels first and back": lambda h: functional.softplus(h.transpose(-1, -2)).transpose(-1, -2),
    "tokens in the way": lambda h: h.transpose(0, 1).contiguous().transpose(0, 1),
    "softmax over tokens": lambda h: h.softmax(1),
    "the mean of tokens": lambda h: h - h.mean(dim=1, keepdim=True),
    "the batch's mean is not taken": lambda h: h - h.mean().detach() * 0,
    "shifted by a token": lambda h: functional.pad(h[:, :-1], (0, 0, 1, 0)),
    "in groups of four": lambda h: functional.group_norm(h.transpose(1, 2), 4).transpose(1, 2),
}


def _unflattened(h: Tensor) -> Tensor:
    gate, up = h.unflatten(-1, (2, -1)).unbind(-2)
    return gate.sigmoid() * up


def _pairs(h: Tensor) -> Tensor:
    gate, up = h.unflatten(-1, (-1, 2)).unbind(-1)
    return functional.silu(gate) * up


def _chunked(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _split(h: Tensor) -> Tensor:
    gate, up = h.split(h.shape[-1] // 2, dim=-1)
    return functional.gelu(gate) * up


def _split_in_numbers(h: Tensor) -> Tensor:
    gate, up = torch.split(h, [24, 24], dim=-1)
    return torch.tanh(gate) * up


#: Half of the channels come out: 24 of 48.
HALF: dict[str, Change] = {
    "chunk": _chunked,
    "split": _split,
    "split in numbers": _split_in_numbers,
    "slices": lambda h: h[..., :24].sigmoid() * h[..., 24:],
    "every second": lambda h: h[..., ::2] * h[..., 1::2].tanh(),
    "unflatten and unbind": _unflattened,
    "pairs": _pairs,
    "glu": lambda h: functional.glu(h, dim=-1),
    "view": lambda h: h.view(*h.shape[:-1], 2, -1).prod(-2),
    "the larger of two": lambda h: h.unflatten(-1, (-1, 2)).amax(-1),
    "narrow": lambda h: h.narrow(-1, 0, 24) * torch.sigmoid(h.narrow(-1, 24, 24)),
    "the first half only": lambda h: h[..., :24],
    "tensor_split": lambda h: torch.stack(h.tensor_split(2, -1)).sum(0),
}
