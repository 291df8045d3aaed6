"""Attention by its definition, and the same on ranks that share out the tokens."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.ranks.collectives import Group, Traffic
from shardwise.sharding.context.kernels import LogitScaling
from shardwise.sharding.context.mask import Mask, Tokens, number_documents
from shardwise.sharding.context.parallel import FORMS
from shardwise.sharding.context.ring import AttentionCall
from shardwise.sharding.zigzag import zigzag_shard, zigzag_unshard


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention: its sizes and what it sees."""

    mask: Mask
    length: int = 48
    num_real: int | None = None
    num_heads: int = 4
    num_key_heads: int = 4
    query_dim: int = 8
    value_dim: int = 8
    cap: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def logits(self) -> LogitScaling:
        return LogitScaling(scale=0.3, cap=self.cap)

    def tokens(self, num_ranks: int) -> Tokens:
        generator = torch.Generator().manual_seed(1)
        length = self.length
        documents = number_documents((torch.rand(2, length, generator=generator) < 0.1).cumsum(1))
        hidden = torch.zeros(2, length, dtype=torch.bool)
        hidden[0, : length // 3], hidden[1, 2 * length // 3 :] = True, True
        return Tokens(
            num_ranks=num_ranks,
            length=length,
            num_real=self.num_real or length,
            documents=documents if self.mask.documents else None,
            hidden=hidden if self.mask.padding else None,
        )

    def seen(self) -> Tensor:
        """The whole mask, [batch, 1, queries, keys], by its definition."""
        tokens, far = self.tokens(1), self.mask.window or self.length
        seen = torch.zeros(2, 1, self.length, self.length, dtype=torch.bool)
        for query in range(self.length):
            for key in range(tokens.num_real):
                if abs(query - key) < far and (key <= query or not self.mask.causal):
                    seen[:, 0, query, key] = True
                    if tokens.documents is not None:
                        seen[:, 0, query, key] &= tokens.documents[:, query] == tokens.documents[:, key]
                    if tokens.hidden is not None:
                        seen[:, 0, query, key] &= ~tokens.hidden[:, key]
        return seen

    def inputs(self) -> list[Tensor]:
        """Queries, keys, values, and the gradient of the output."""
        generator = torch.Generator().manual_seed(2)
        heads = (self.num_heads, self.num_key_heads, self.num_key_heads, self.num_heads)
        dims = (self.query_dim, self.query_dim, self.value_dim, self.value_dim)
        made = [
            torch.randn(2, head, self.length, dim, generator=generator) for head, dim in zip(heads, dims, strict=True)
        ]
        if self.num_real is not None:
            made[3][:, :, self.num_real :] = 0  # Nobody asks for the tokens that were added.
        return [each.to(self.dtype) for each in made]

    def plain(self) -> list[Tensor]:
        """The output and the gradients, on one device."""
        *inputs, given = self.inputs()
        query, key, value = (each.requires_grad_() for each in inputs)
        sharing = self.num_heads // self.num_key_heads
        logits = query @ key.repeat_interleave(sharing, 1).mT * 0.3
        if self.cap is not None:
            logits = self.cap * torch.tanh(logits / self.cap)
        weights = logits.masked_fill(~self.seen(), -torch.inf).softmax(-1).nan_to_num(0.0)
        out = weights @ value.repeat_interleave(sharing, 1)
        torch.autograd.backward(out, given)
        return [out.detach(), *(each.grad for each in (query, key, value) if each.grad is not None)]


def run_case(form: str, case: Case) -> tuple[list[Tensor], Traffic]:
    """On a rank: its part of the output and of the gradients, and what it sent."""
    group = Group(dist.group.WORLD)
    *inputs, given = [zigzag_shard(each, 2, group.rank, group.size) for each in case.inputs()]
    leaves = [each.requires_grad_() for each in inputs]
    call = AttentionCall(group=group, tokens=case.tokens(group.size), mask=case.mask, logits=case.logits)
    query, key, value = leaves
    out = FORMS[form](query, key, value, call)
    torch.autograd.backward(out, given)
    return [out.detach(), *(each.grad for each in leaves if each.grad is not None)], group.traffic


def joined(results: list[tuple[list[Tensor], Traffic]]) -> list[Tensor]:
    """The whole output and gradients, from those of all ranks."""
    return [zigzag_unshard(parts, 2) for parts in zip(*(result for result, _ in results), strict=True)]
