"""Experts: routes as drawn, results as by a plain loop, balance, capacity, and the seam of the exchange."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from shardwise.errors import ShardwiseError
from shardwise.kernels.experts import grouped_matmul, permute, unpermute
from shardwise.nets.balance import correct_balance
from shardwise.nets.experts import Experts
from shardwise.nets.moe import MoE, all_here
from shardwise.nets.router import Router, balancing_loss
from shardwise.nets.routes import make_routes
from shardwise.nets.settings import Mixture
from tests.nets.closeness import assert_close
from tests.nets.small import MIXTURE, small


def a_layer(seed: int = 0, **changed: object) -> MoE:
    torch.manual_seed(seed)
    layer = MoE(small(mixture=replace(MIXTURE, **changed)))  # type: ignore[arg-type]
    with torch.no_grad():
        for each in layer.parameters():
            each.mul_(20)
    return layer


def hidden_states(seed: int = 1) -> Tensor:
    return torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def by_a_loop(layer: MoE, hidden: Tensor, capacity: int | None = None) -> Tensor:
    """What a layer computes, token by token."""
    tokens = hidden.flatten(0, 1)
    experts, weights, _ = layer.router(tokens)
    rows, taken = [], dict.fromkeys(range(layer.mixture.num_experts), 0)
    for token, (chosen, shares) in enumerate(zip(experts.tolist(), weights, strict=True)):
        row = torch.zeros(32) if layer.shared is None else layer.shared(tokens[token])
        for expert, share in zip(chosen, shares, strict=True):
            taken[expert] += 1
            if capacity is None or taken[expert] <= capacity:
                gate, up, down = (getattr(layer.experts, f"{kind}_proj")[expert] for kind in ("gate", "up", "down"))
                row = row + share * ((silu(tokens[token] @ gate) * (tokens[token] @ up)) @ down)
        rows.append(row)
    return torch.stack(rows).view_as(hidden)


def test_routes_are_as_drawn() -> None:
    routes = make_routes(torch.tensor([[2, 0], [1, 0], [0, 2]]), 3)
    assert " ".join(f"{'abc'[choice // 2]}{choice % 2}" for choice in routes.order.tolist()) == "a1 b1 c0 b0 a0 c1"
    assert routes.counts.tolist() == [3, 1, 2]
    assert routes.order[routes.rows].tolist() == list(range(6))


def test_a_full_expert_drops_the_last_of_its_tokens() -> None:
    # An even share of 6 choices over 3 experts is 2.
    routes = make_routes(torch.tensor([[2, 0], [1, 0], [0, 2]]), 3, capacity=0.6)
    assert routes.counts.tolist() == [2, 1, 2]
    assert routes.order.tolist() == [1, 3, 2, 0, 5]
    tokens = torch.arange(3.0)[:, None] + 1
    back = unpermute(permute(tokens, routes), torch.ones(3, 2), routes)
    assert back.flatten().tolist() == [2, 4, 3]


@pytest.mark.parametrize("capacity", [None, 0.5, 1.0])
@pytest.mark.parametrize("num_shared", [0, 2])
def test_a_layer_is_what_a_loop_over_tokens_computes(num_shared: int, capacity: float | None) -> None:
    layer = a_layer(num_shared=num_shared, capacity=capacity)
    limit = None if capacity is None else math.ceil(capacity * 21 * 2 / 6)
    found: list[list[Tensor]] = []
    for compute in (lambda hidden: layer(hidden)[0], lambda hidden: by_a_loop(layer, hidden, limit)):
        hidden = hidden_states()
        output = compute(hidden)
        parameters = [hidden, *layer.parameters()]
        weights = torch.linspace(-1, 1, output.numel()).view_as(output)
        found.append([output, *torch.autograd.grad((output * weights).sum(), parameters)])
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


def test_the_exchange_sees_all_it_needs_to_send_rows_elsewhere() -> None:
    layer = a_layer(num_shared=1)
    expected, _ = layer(hidden_states())
    halves = []
    for number in range(2):
        half = Experts(3, 32, 16, "silu")
        for name, each in half.named_parameters():
            each.data = layer.experts.get_parameter(name)[3 * number : 3 * number + 3]
        halves.append(half)

    def two_ranks(
        experts: Experts, rows: Tensor, counts: Tensor, meanwhile: Callable[[], Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        del experts
        border = int(counts[:3].sum())
        shared = meanwhile()
        return torch.cat((halves[0](rows[:border], counts[:3]), halves[1](rows[border:], counts[3:]))), shared

    layer.exchange = two_ranks
    assert_close(layer(hidden_states())[0], expected)
    assert a_layer().exchange is all_here


def test_experts_without_rows_get_zero_gradients() -> None:
    weights = torch.randn(3, 4, 5, requires_grad=True)
    grouped_matmul(torch.randn(6, 4), weights, torch.tensor([2, 0, 4])).sum().backward()  # type: ignore[no-untyped-call]
    assert weights.grad is not None
    assert [bool(each.any()) for each in weights.grad] == [True, False, True]


def test_without_numbers_shapes_are_the_same() -> None:
    layer = a_layer(num_shared=1, capacity=1.0, correction=True, scores="sigmoid").to("meta")
    assert layer(torch.empty(3, 7, 32, device="meta"))[0].shape == (3, 7, 32)


def test_the_balancing_loss_of_one_layer_is_that_of_transformers() -> None:
    layer, tokens = a_layer(), hidden_states().flatten(0, 1)
    choice = layer.router(tokens)
    counts = make_routes(choice.experts, 6).counts
    expected = load_balancing_loss_func((tokens @ layer.router.weight.T,), 6, 2)
    assert_close(balancing_loss(choice, counts), expected)


def test_an_even_load_costs_as_many_as_are_chosen() -> None:
    scores = torch.full((6, 6), 1 / 6)
    experts = torch.tensor([[n, (n + 1) % 6] for n in range(6)])
    router = Router(4, MIXTURE)
    choice = router(torch.zeros(6, 4))._replace(experts=experts, scores=scores)
    assert float(balancing_loss(choice, make_routes(experts, 6).counts)) == pytest.approx(2.0)


def test_correction_changes_who_is_chosen_and_not_what_they_count() -> None:
    router = Router(8, replace(MIXTURE, scores="sigmoid", correction=True, normalised=False))
    tokens = torch.randn(50, 8)
    before = router(tokens)
    assert router.correction is not None
    router.correction[4] += 10
    after = router(tokens)
    assert bool((after.experts == 4).any(1).all())
    assert after.weights.equal(before.scores.gather(1, after.experts))


def test_correcting_evens_the_load() -> None:
    layer = a_layer(correction=True, scores="sigmoid").train()
    assert layer.router.correction is not None
    unevenness = []
    for step in range(60):
        layer(torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(step)) + 0.5)
        load = layer.router.load.float()
        assert load.sum() == 4 * 32 * 2
        unevenness.append(float(load.max() / load.mean()))
        correct_balance(layer, 0.02)
        assert not layer.router.load.any()
    assert sum(unevenness[-10:]) / 10 < 1.4 < unevenness[0]


def test_a_load_that_is_given_is_corrected_and_not_that_which_was_counted() -> None:
    layer = a_layer(correction=True, scores="sigmoid").train()
    assert layer.router.correction is not None
    layer.router.load.copy_(torch.tensor([9, 0, 0, 0, 0, 0]))
    correct_balance(layer, 0.5, {"experts": [3, 3, 5, 1, 3, 3]})
    assert layer.router.correction.tolist() == [0.0, 0.0, -0.5, 0.5, 0.0, 0.0]
    assert layer.router.load[0] == 9


def test_evaluation_counts_no_load() -> None:
    layer = a_layer().eval()
    layer(hidden_states())
    assert not layer.router.load.any()


def test_experts_are_chosen_within_the_best_groups() -> None:
    mixture = Mixture(num_experts=6, num_chosen=2, width=1, num_groups=3, num_chosen_groups=1)
    router = Router(6, mixture)
    router.weight.data = torch.eye(6)
    # Groups are 0 and 1, 2 and 3, 4 and 5. The best expert is 3; the best two together are 0 and 1.
    tokens = torch.tensor([[3.0, 2.9, 0.0, 3.1, 1.0, 1.0]])
    assert sorted(router(tokens).experts[0].tolist()) == [2, 3]
    by_two = Router(6, replace(mixture, scores="sigmoid"))
    by_two.weight.data = torch.eye(6)
    assert sorted(by_two(tokens).experts[0].tolist()) == [0, 1]


def test_mixtures_that_cannot_be_are_refused() -> None:
    with pytest.raises(ShardwiseError, match="a token cannot go to 7 of 6 experts"):
        replace(MIXTURE, num_chosen=7)
    with pytest.raises(ShardwiseError, match="6 experts in 4 groups, of which 1 are chosen, is not possible"):
        replace(MIXTURE, num_groups=4)
    with pytest.raises(ShardwiseError, match="1 of 6 groups have 1 experts, and a token is to go to 2"):
        replace(MIXTURE, num_groups=6)
