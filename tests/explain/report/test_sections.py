"""What the page says without its script: numbers, tables, findings, the plan."""

import re
from dataclasses import replace

import pytest

from shardwise.explain.doctor.case import Finding
from shardwise.explain.report.comparison import mean_seconds
from shardwise.explain.report.page import make_page
from shardwise.explain.report.sections import change_of, share_of
from shardwise.trace.events import Holding
from shardwise.trace.run import Run
from tests.explain.report.pages import a_large_run, a_run


def words_of(page: str) -> str:
    """The page as it is read: without style, script, data and marks."""
    text = re.sub(r"<(style|script)[^>]*>.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))


def test_the_step_and_its_parts_are_at_the_top() -> None:
    text = words_of(make_page(a_run("1f1b", 2, 4, hop=0)))
    assert "Predicted · schedule 1f1b · 2 ranks · 4 microbatches · plan pp=2,schedule=1f1b" in text
    assert "step 15 F" in text
    assert "at work 80.0 %" in text
    assert "bubble 20.0 %" in text


def test_every_rank_has_a_row_whose_parts_are_the_step() -> None:
    text = words_of(make_page(a_run("1f1b", 3, 6, hop=0)))
    assert text.count("rank 2") >= 2
    assert re.search(r"rank 0 75\.0 % .* 24", text)


def test_owners_of_bytes_are_a_table() -> None:
    run = a_run("1f1b", 2, 4)
    held = [
        Holding(rank, owner, 0.0, size)
        for rank in (0, 1)
        for owner, size in (("parameters", 2048), ("optimizer", 4096))
    ]
    text = words_of(make_page(replace(run, trace=replace(run.trace, holdings=tuple(held)), memory_bytes=8192)))
    assert "rank 1 2.0 KiB 4.0 KiB 6.0 KiB" in text
    assert "A device has 8.0 KiB." in text


def test_a_finding_has_its_evidence_its_fix_and_its_gain() -> None:
    finding = Finding(kind="k", problem="<b>slow</b>", evidence="3 of 4", fix="layers=1+2", gain_seconds=3.0)
    page = make_page(a_run("1f1b", 2, 4, hop=0), found=[finding])
    assert "&lt;b&gt;slow&lt;/b&gt;" in page
    assert "Try layers=1+2 predicted gain 3 F, 20.0 % of the step" in words_of(page)
    assert "Nothing was found to hold this run up." in words_of(make_page(a_run("1f1b", 2, 4)))


def test_the_plan_has_its_reasons() -> None:
    text = words_of(make_page(a_run("1f1b", 2, 4)))
    assert "schedule 1f1b the smallest bubble in this memory" in text
    assert "No plan is known." in words_of(make_page(Run(name="r", trace=a_run("1f1b", 2, 2).trace)))


def test_two_runs_are_told_apart_by_their_parts_and_stages() -> None:
    text = words_of(make_page(a_run("gpipe", 2, 4, hop=0.5), a_run("1f1b", 2, 4, hop=0)))
    assert "Two runs compared" in text
    assert "stage 1 backward 2 F 2 F same" in text
    # Stages of another number are other stages.
    assert "stage 1" not in words_of(make_page(a_run("zb-v", 2, 4), a_run("1f1b", 2, 4)))


def test_the_page_names_no_address_to_load_from() -> None:
    page = make_page(a_run("1f1b", 2, 4))
    assert re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"", page) == []
    assert "url(" not in page
    assert "@import" not in page


def test_a_page_of_8_ranks_and_64_microbatches_is_small() -> None:
    assert len(make_page(a_large_run(8, 64)).encode()) < 3_000_000


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [(1, 1, "same"), (0, 1, "new"), (1, 1.1, '<span class="worse">+10.0 %</span>'), (2, 1, "50.0 %")],
)
def test_a_change_is_told_with_its_sign(before: float, after: float, text: str) -> None:
    assert text in change_of(before, after)


def test_nothing_is_a_dash() -> None:
    assert share_of(0, 5) == "–"  # noqa: RUF001
    assert share_of(1, 5) == "20.0 %"


def test_means_are_of_each_kind_on_each_stage() -> None:
    assert mean_seconds(a_run("1f1b", 2, 4).trace) == {(0, "F"): 1, (0, "B"): 2, (1, "F"): 1, (1, "B"): 2}
