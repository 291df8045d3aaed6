"""AdamW with states of 16 and 8 bits."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer

import shardwise as sw
from shardwise.states.compact_adamw import CompactAdamW, States


def trained(make: Any, **settings: Any) -> tuple[list[float], Optimizer]:
    """Losses of a small net that learns to add two numbers, modulo 12, and its optimizer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(12, 24), nn.Flatten(), nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 12))
    optimizer = make(net.parameters(), lr=1e-2, **settings)
    losses = []
    for step in range(100):
        ids = torch.randint(0, 12, (64, 2), generator=torch.Generator().manual_seed(step))
        loss = cross_entropy(net(ids), (ids[:, 0] + ids[:, 1]) % 12)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def test_a_net_learns_as_with_states_of_32_bits_in_a_half_and_a_quarter_of_their_bytes() -> None:
    wanted, _ = trained(AdamW)
    assert sum(wanted[-20:]) < 0.5 * sum(wanted[:20])
    for states, most in (("bf16", 4.0), ("8bit", 2.2)):
        losses, optimizer = trained(CompactAdamW, states=states)
        assert sum(losses[-20:]) == pytest.approx(sum(wanted[-20:]), rel=0.03)
        weights = [each for group in optimizer.param_groups for each in group["params"]]
        kept = sum(e.nbytes for each in weights for e in optimizer.state[each].values() if e.dim())
        assert kept / sum(each.numel() for each in weights) <= most


@pytest.mark.parametrize("states", ["bf16", "8bit"])
def test_state_goes_from_and_to_torch_s_adamw(states: States) -> None:
    weight = nn.Parameter(torch.randn(300))
    plain, mine = AdamW([weight]), CompactAdamW([weight], states=states)
    weight.grad = torch.randn(300)
    plain.step()
    mine.adopt_state(weight, plain.state[weight])
    found = mine.portable_state(weight)
    assert found.keys() == plain.state[weight].keys()
    for key, each in plain.state[weight].items():
        assert float((found[key] - each).norm()) <= 0.03 * float(each.norm())
    # What has been rounded once stays as it is.
    mine.adopt_state(weight, found)
    for key, each in mine.portable_state(weight).items():
        torch.testing.assert_close(each, found[key], rtol=1e-6, atol=0)


def test_states_that_nobody_knows_are_refused_with_what_there_is() -> None:
    with pytest.raises(sw.ShardwiseError, match="unknown optimizer states '4bit'"):
        CompactAdamW([nn.Parameter(torch.zeros(2))], states="4bit")  # type: ignore[arg-type]


def test_states_of_8_bits_on_the_host_are_refused_before_anything_is_trained() -> None:
    with pytest.raises(sw.ShardwiseError, match="a scale for each 256 numbers"):
        sw.parallelize(
            nn.Sequential(nn.Linear(4, 4)),
            "offload.optimizer=1",
            loss=lambda output, _: output.sum(),
            optimizer=lambda parameters: CompactAdamW(parameters, states="8bit"),
            example={"input": torch.zeros(2, 4)},
        )
