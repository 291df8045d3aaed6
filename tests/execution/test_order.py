"""Axes in another order on the devices: other neighbours, the same training."""

import pytest
from torch.nn.utils import clip_grad_norm_

from shardwise.engine.parallelize import parallelize
from shardwise.ranks.spawn import Ranks
from tests.engine import mesh_programs
from tests.engine.composed import make_batch, make_optimizer, token_loss
from tests.stages.families import make_family

ORDER = "dp=2,pp=2,microbatches=2,zero=1,order=dp-pp-cp-tp"
STEPS, CLIP = 2, 0.5


def losses_under(plan: str) -> list[float]:
    engine = parallelize(
        make_family("llama"), plan, loss=token_loss, optimizer=make_optimizer, example=make_batch(0), clip=CLIP
    )
    losses = [engine.train_step(make_batch(step)) for step in range(STEPS)]
    engine.close()
    return losses


def losses_alone() -> list[float]:
    module = make_family("llama")
    optimizer, losses = make_optimizer(module.parameters()), []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = make_batch(step)
        total, count = token_loss(module(input_ids=batch["input_ids"]), batch)
        (total / count).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        losses.append((total / count).item())
    return losses


def test_with_data_outermost_the_ranks_of_a_pipeline_stand_together(four: Ranks) -> None:
    places = four.run(mesh_programs.places, ORDER, timeout_seconds=60)
    assert [place["pp"] for place in places] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [place["dp"] for place in places] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_it_trains_as_one_device_does(four: Ranks) -> None:
    expected = losses_alone()
    for losses in four.run(losses_under, ORDER):
        assert losses == pytest.approx(expected, rel=1e-5)
