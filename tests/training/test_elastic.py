"""Fewer machines, and more: four ranks become three, two and four again in one run, and the losses stay the same."""

from pathlib import Path

import pytest

from shardwise.planner.plan import Plan
from shardwise.ranks.spawn import Ranks
from shardwise.trace.journal import note, read_journal
from shardwise.training.choose import find_resized
from shardwise.training.health import Health
from shardwise.training.outcome import Result
from shardwise.training.run import train_rank
from tests.training.kills import stop
from tests.training.nodes import Nodes, train_words
from tests.training.programs import losses_of, make_job
from tests.training.test_restart import undisturbed

PLAN = "dp=4,zero=1"


@pytest.mark.parametrize(
    ("plan", "num_ranks", "num_rows", "resized"),
    [
        ("dp=4,zero=1", 2, 8, "dp=2,zero=1"),
        ("dp=4,zero=1", 3, 8, None),
        ("dp=4,zero=1", 3, 12, "dp=3,zero=1"),
        ("dp=2,tp=2", 2, 8, "tp=2"),
        ("dp=2,tp=2", 3, 12, None),
        ("dp=2,pp=2,microbatches=4", 8, 16, "dp=4,pp=2,microbatches=4"),
        ("dp=2,pp=2,microbatches=4", 8, 8, None),
    ],
)
def test_a_plan_keeps_all_but_its_replicas(plan: str, num_ranks: int, num_rows: int, resized: str | None) -> None:
    found = find_resized(Plan.parse(plan), num_ranks, num_rows)
    assert (None if found is None else str(found)) == resized
    assert found is None or found.num_ranks == num_ranks


def test_a_run_ends_at_its_next_checkpoint_for_hosts_that_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(tmp_path / "wild", "dp=1", steps=5, checkpoint__every=2)
    plain = Health.before_keeping

    def before_keeping(self: Health, step: int) -> None:
        plain(self, step)
        if step == 4:
            note(job.folder, "back", hosts=["b"])

    monkeypatch.setattr(Health, "before_keeping", before_keeping)
    result = train_rank(job)
    assert isinstance(result, Result)
    assert (result.step, result.take_in, result.stopped_by) == (4, ("b",), "b can take part again")
    assert (result.checkpoint or "").endswith("step-00000004")
    ends = [(each["step"], each.get("take_in")) for each in read_journal(job.folder) if each["event"] == "end"]
    assert ends == [(4, ["b"])]


@pytest.mark.whole
def test_four_ranks_become_three_two_and_four_again_with_the_same_losses(
    four: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_COPIES", str(tmp_path / "memory"))
    words = train_words(tmp_path / "wild", PLAN, steps=1_000_000, model__layers=4, log=1)
    nodes = Nodes(tmp_path / "wild", words, fewest=2, most=4)
    try:
        for name in ("a", "b", "c", "d"):
            nodes.start(name)
        nodes.wait(lambda: nodes.step() >= 12)
        for lost, left in (("d", 3), ("c", 2)):
            nodes.lose(lost)
            nodes.wait(lambda left=left: len(nodes.starts()[-1]["places"]) == left)  # type: ignore[misc]
            begun = nodes.starts()[-1]["step"]
            nodes.wait(lambda begun=begun: nodes.step() >= begun + 8)  # type: ignore[misc]
        for name in ("c", "d"):
            nodes.start(name)
        nodes.wait(lambda: len(nodes.starts()[-1]["places"]) == 4)
        begun = nodes.starts()[-1]["step"]
        nodes.wait(lambda: nodes.step() >= begun + 8)
        stop(nodes)
    finally:
        nodes.close()
    plans = list(dict.fromkeys(each["plan"] for each in nodes.starts()))
    assert plans[0] == PLAN
    assert any(plan.startswith("pp=3") for plan in plans), "the batch of 8 is not shared by 3 replicas"
    assert "dp=2,zero=1" in plans
    assert nodes.starts()[-1]["plan"] == PLAN
    wild = losses_of(tmp_path / "wild")
    four.run(undisturbed, make_job(tmp_path / "calm", PLAN, steps=len(wild), model__layers=4))
    assert wild == pytest.approx(losses_of(tmp_path / "calm"), rel=1e-5)
