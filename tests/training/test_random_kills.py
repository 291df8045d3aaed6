"""Random kills: whatever of a run is killed, and whenever, its losses are those of one that nobody disturbed."""

import random
from pathlib import Path

import pytest

from shardwise.ranks.spawn import Ranks
from tests.training.kills import Kills, forget, stop
from tests.training.nodes import Nodes, train_words
from tests.training.programs import losses_of, make_job
from tests.training.test_restart import undisturbed

PLAN, NUM_KILLS = "dp=2,zero=1", 6


@pytest.mark.whole
def test_whatever_is_killed_nothing_is_lost(two: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_COPIES", str(tmp_path / "memory"))
    words = train_words(tmp_path / "wild", PLAN, steps=1_000_000, checkpoint__every=7, log=1)
    nodes = Nodes(tmp_path / "wild", words, fewest=2, most=2)
    kills = Kills(nodes=nodes, chance=random.Random(0), names=("a", "b"))
    try:
        for name in kills.names:
            nodes.start(name)
        nodes.wait(lambda: nodes.step() >= 5)
        while len(kills.done) < NUM_KILLS:
            kills.one()
        stop(nodes)
    finally:
        forget(nodes, tmp_path / "memory")
    wild = losses_of(tmp_path / "wild")
    two.run(undisturbed, make_job(tmp_path / "calm", PLAN, steps=len(wild)))
    assert wild == losses_of(tmp_path / "calm"), "to the bit"
