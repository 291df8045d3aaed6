"""What is computed in another way on a GPU, against the definition."""

import pytest
import torch
from torch import Tensor

from shardwise.kernels.experts import _has_grouped
from shardwise.nets.experts import Experts
from shardwise.nets.generate import generate
from shardwise.nets.initialise import initialise
from shardwise.nets.transformer import Transformer
from tests.nets.closeness import assert_close
from tests.nets.families import tokens
from tests.nets.small import LATENT, MIXTURE, small

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_experts_in_one_kernel_are_experts_one_by_one() -> None:
    torch.manual_seed(0)
    experts = Experts(5, 64, 32, "silu")
    with torch.no_grad():
        for each in experts.parameters():
            each.copy_((10 * each).bfloat16())  # The same numbers in both types.
    rows, counts = torch.randn(40, 64).bfloat16().float(), torch.tensor([7, 0, 20, 12, 1])
    found: list[list[Tensor]] = []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "cuda")):
        there = experts.to(device, dtype)
        given = rows.to(device, dtype).requires_grad_()
        assert _has_grouped(given, there.gate_proj) == (device == "cuda")
        made = there(given, counts.to(device))
        weights = torch.linspace(-1, 1, made.numel(), device=device).view_as(made)
        gradients = torch.autograd.grad((made * weights).sum(), [given, *there.parameters()])
        found.append([each.detach().float().cpu() for each in (made, *gradients)])
    for one, other in zip(*found, strict=True):
        assert_close(other, one, limit=0.02)


def test_a_model_made_on_a_gpu_is_the_one_made_on_the_cpu() -> None:
    settings = small(attention=LATENT, mixture=MIXTURE)
    with torch.device("meta"):
        here, there = Transformer(settings), Transformer(settings)
    initialise(here, seed=1)
    initialise(there, seed=1, device="cuda")
    assert all(each.is_cuda for each in [*there.parameters(), *there.buffers()])
    assert all(each.equal(there.get_parameter(name).cpu()) for name, each in here.named_parameters())
    ids = tokens()
    assert_close(there(ids.cuda()).detach().cpu(), here(ids).detach(), limit=1e-4)
    assert generate(there, ids.cuda(), 3).shape == (2, 15)
