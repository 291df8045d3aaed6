"""A run that drops: the same masks under every plan and after a restart, and none of it in the folder that it makes."""

from pathlib import Path

import pytest

from shardwise.ranks.spawn import Ranks
from shardwise.training.convert import convert
from shardwise.training.run import train_rank
from tests.training.programs import losses_of, make_job


def test_a_run_that_drops_is_the_same_under_every_plan_and_goes_on_to_the_bit(two: Ranks, tmp_path: Path) -> None:
    for name, rate in (("wet", 0.2), ("dry", 0.0)):
        train_rank(make_job(tmp_path / name, "dp=1", steps=3, model__dropout=rate))
    wet, dry = losses_of(tmp_path / "wet"), losses_of(tmp_path / "dry")
    assert wet[0] != pytest.approx(dry[0], rel=1e-5)
    for number, plan in enumerate(("tp=2,sp=true", "pp=2,microbatches=2")):
        two.run(train_rank, make_job(tmp_path / str(number), plan, steps=3, model__dropout=0.2))
        assert losses_of(tmp_path / str(number)) == pytest.approx(wet, rel=1e-5)
    for steps in (1, 3):
        train_rank(make_job(tmp_path / "parts", "dp=1", steps=steps, model__dropout=0.2))
    assert losses_of(tmp_path / "parts") == wet
    assert convert(tmp_path / "wet", tmp_path / "hf")[0] == "huggingface"
