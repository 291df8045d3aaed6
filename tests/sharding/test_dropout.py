"""Dropout drops the same numbers whatever the plan: the masks of a seed are those of one device."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from shardwise.sharding.dropout import Dropouts, Place
from tests.sharding import dropping
from tests.stages.small import small_matrices

TWO = [
    "dp=2,microbatches=2",
    "dp=2,zero=3,recompute=full",
    "pp=2,schedule=zb-h1,microbatches=2",
    "tp=2",
    "tp=2,sp=true,microbatches=2",
    "cp=2",
    "cp=2,context=all-to-all",
]
FOUR = [
    pytest.param("dp=2,tp=2,sp=true,zero=1", marks=pytest.mark.whole),
    "tp=2,cp=2,sp=true",
    "dp=2,pp=2,microbatches=2,recompute=full",
]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with small_matrices():
        yield


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    return dropping.train("dp=1")


def check(ranks: Ranks, plan: str, plain: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    for losses, weights in ranks.run(dropping.train, plan):
        assert losses == pytest.approx(plain[0], rel=1e-5)
        for name, each in plain[1].items():
            assert float((weights[name] - each).norm()) <= 1e-5 * float(each.norm()), name


@pytest.mark.parametrize("plan", TWO)
def test_two_ranks_drop_what_one_device_drops(
    plan: str, two: Ranks, plain: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    check(two, plan, plain)


@pytest.mark.parametrize("plan", FOUR)
def test_four_ranks_drop_what_one_device_drops(
    plan: str, four: Ranks, plain: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    check(four, plan, plain)


@pytest.mark.parametrize("plan", ["tp=2", "dp=2,microbatches=2"])
@pytest.mark.parametrize("kind", ["experts", "attention", "encoder", "late"])
def test_ranks_with_seeds_of_their_own_drop_alike(kind: str, plan: str, two: Ranks) -> None:
    """Tokens that chose an expert, weights of torch's own attention, a dropout that drops from the second step on:
    ranks that compute them together once drew from torch's generators, and trained two models."""
    if kind == "experts" and plan != "tp=2":
        return  # Which rows an expert is given is not the same in parts of a batch.
    alone = dropping.train_layers(kind, "dp=1")
    for found in two.run(dropping.train_layers, kind, plan):
        for name, each in alone.items():
            torch.testing.assert_close(found[name], each, msg=name)


def test_dropout_inside_of_a_recurrent_layer_must_be_drawn_alike(two: Ranks) -> None:
    """It draws from torch's generators, and trials do not see it: nothing of the module is cut."""
    with pytest.raises(ShardwiseError, match="not at the same place of their generators"):
        two.run(dropping.train_layers, "recurrent", "tp=2")


def test_microbatches_and_recomputation_drop_the_same(plain: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    for plan in ("microbatches=4", "pp=2,schedule=zb-v,microbatches=4", "microbatches=2,recompute=full"):
        assert dropping.train(plan)[0] == pytest.approx(plain[0], rel=1e-5)


def test_another_seed_and_another_step_drop_others(plain: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    assert dropping.train("dp=1")[0] == plain[0]
    assert dropping.train("dp=1", seed=1)[0] != pytest.approx(plain[0], rel=1e-3)
    assert dropping.train("dp=1", first_step=1)[0] != pytest.approx(plain[0], rel=1e-3)


def dropped(probability: float, *shape: int, step: int = 0, name: str = "0") -> torch.Tensor:
    """What is left of ones."""
    module = nn.Sequential(nn.Dropout(probability))
    if name != "0":
        module = nn.Sequential(nn.Identity(), nn.Dropout(probability))
    dropouts, batch = Dropouts(seed=3), {"x": torch.ones(shape)}
    assert dropouts.attach(module)
    dropouts.take([batch], Place(step=step, first_row=0))
    dropouts.select(batch)
    found: torch.Tensor = module.train()(batch["x"])
    return found


def test_a_mask_keeps_the_share_that_was_asked_for_and_the_mean() -> None:
    for probability in (0.1, 0.5, 0.9):
        left = dropped(probability, 64, 32, 32)
        assert float((left == 0).float().mean()) == pytest.approx(probability, abs=0.005)
        assert float(left.mean()) == pytest.approx(1.0, rel=0.02)


def test_rows_tokens_channels_layers_and_steps_have_masks_of_their_own() -> None:
    left = dropped(0.5, 16, 32, 64) > 0
    others = [left.roll(1, dim) for dim in range(3)]
    others += [dropped(0.5, 16, 32, 64, step=1) > 0, dropped(0.5, 16, 32, 64, name="1") > 0]
    for other in others:
        assert float((left == other).float().mean()) == pytest.approx(0.5, abs=0.02)


def test_rows_that_a_forward_has_selected_have_masks_that_do_not_depend_on_torch() -> None:
    module, batch = nn.Sequential(nn.Dropout(0.5)).train(), {"x": torch.ones(4, 64)}
    dropouts = Dropouts(seed=3)
    assert dropouts.attach(module)

    def left_of(num_rows: int, *, seed: int, first_row: int = 0) -> torch.Tensor:
        torch.manual_seed(seed)
        dropouts.take([batch], Place(step=0, first_row=first_row))
        dropouts.select(batch)
        found: torch.Tensor = module(torch.ones(num_rows, 64))
        return found

    assert torch.equal(left_of(7, seed=0), left_of(7, seed=1))
    assert left_of(0, seed=0).shape == (0, 64)
    other = left_of(7, seed=0) == left_of(7, seed=0, first_row=4)
    assert float(other.float().mean()) == pytest.approx(0.5, abs=0.1)
    assert len({tuple(row.tolist()) for row in left_of(7, seed=0)}) == 7


def test_a_module_that_evaluates_drops_nothing() -> None:
    module = nn.Sequential(nn.Dropout(0.5))
    Dropouts(seed=0).attach(module)
    assert torch.equal(module.eval()(torch.ones(4, 4)), torch.ones(4, 4))


class Again(nn.Module):
    """Three calls of one layer, which drops twice by its own and once by a function; and the middle one may be in a
    checkpoint."""

    def __init__(self, *, checkpoints: bool) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.first, self.layer, self.last = nn.Linear(8, 8), Drops(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for number in range(3):
            again = self.checkpoints and number < 2
            hidden = checkpoint(self.layer, hidden, use_reentrant=False) if again else self.layer(hidden)
        found: torch.Tensor = self.last(hidden)
        return found


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.drop(self.linear(self.drop(x)).tanh())
        return x + inner + nn.functional.dropout(x, 0.5, self.training)


def trained_again(plan: str, *, checkpoints: bool = False) -> torch.Tensor:
    torch.manual_seed(0)
    module = Again(checkpoints=checkpoints).double()
    batch = {"x": torch.randn(4, 8, dtype=torch.float64)}
    with parallelize(
        module, plan, loss=lambda output, _: output.square().mean(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        example=batch, seed=0,
    ) as engine:  # fmt: skip
        for _ in range(2):
            engine.train_step(batch)
        return torch.cat([each.flatten() for each in engine.state_dict().values()])


def test_a_layer_that_is_called_again_drops_the_same_under_any_plan_and_when_it_is_run_again() -> None:
    """Its calls are counted over stages, also in a backward that goes through them from the last to the first."""
    plain = trained_again("dp=1")
    for plan in ("microbatches=2,recompute=full", "pp=2,microbatches=2", "pp=2,microbatches=2,recompute=full"):
        torch.testing.assert_close(trained_again(plan), plain)
    for plan in ("dp=1", "pp=2,microbatches=2,schedule=zb-h1"):
        torch.testing.assert_close(trained_again(plan, checkpoints=True), plain)


def test_each_call_of_a_forward_has_a_mask_of_its_own() -> None:
    module, batch = nn.Sequential(nn.Dropout(0.5)).train(), {"x": torch.ones(64, 64)}
    dropouts = Dropouts(seed=0)
    dropouts.attach(module)
    dropouts.take([batch], Place(step=0, first_row=0))
    found = []
    for _ in range(2):
        dropouts.select(batch)
        found.append([module(batch["x"]) > 0 for _ in range(2)])
    assert float((found[0][0] == found[0][1]).float().mean()) == pytest.approx(0.5, abs=0.05)
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
