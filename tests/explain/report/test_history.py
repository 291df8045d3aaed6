"""The page's picture of a run over time: starts, why they ended, checkpoints, copies, slow ranks, and the loss."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from shardwise.explain.report.history import history
from shardwise.explain.report.page import make_page
from shardwise.trace.file import save_trace
from shardwise.trace.history import history_of, slow_now
from shardwise.trace.run import Run, load_run
from tests.explain.doctor.patients import as_measured, played
from tests.explain.report.browser import Browser

BEGAN = datetime(2026, 11, 17, 4, 0, tzinfo=UTC)
PLACES = [{"rank": rank, "host": f"node{rank // 2 + 1}", "process": 1, "device": "cpu"} for rank in range(4)]
WHY = "rank 3 has not answered for 20 s; it was last at <0F3>"


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat(timespec="seconds")


def event(after: float, kind: str, **facts: Any) -> dict[str, Any]:
    return {"event": kind, "when": at(after), **facts}


EVENTS = [
    event(0, "attempt", job="7", nodes=["node1", "node2"]),
    event(10, "start", step=0, plan="dp=4", places=PLACES),
    event(60, "checkpoint", step=20),
    event(70, "copy", step=24),
    event(90, "end", why=WHY),
    event(95, "attempt end", status=1),
    event(110, "start", step=20, plan="dp=4", places=PLACES),
    event(130, "slow", step=30, rank=2, host="node2", cause="compute", seconds=0.4, others_seconds=0.2),
    event(150, "slow over", step=40, rank=2, cause="compute"),
    event(160, "corrupt", step=44, ranks=[1], what="rank 1 on node1 had computed other gradients"),
    event(200, "end", step=60, why="finished"),
]
ROWS: list[dict[str, Any]] = [
    {"step": 10, "loss": 5.0},
    {"step": 10, "when": at(40)},
    {"step": 60, "loss": 1.0},
    {"step": 60, "when": at(199)},
]


def test_a_journal_is_a_run_over_time() -> None:
    told = history_of(EVENTS, ROWS)
    assert told is not None
    assert [(each.begin, each.end, each.is_bad) for each in told.ran] == [(10, 90, True), (110, 200, False)]
    assert [*told.saved, *told.copied] == [(60, 20), (70, 24)]
    assert [(each.begin, each.end) for each in told.slow] == [(130, 150)]
    assert list(told.losses) == [(40, 5.0), (199, 1.0)]
    assert (told.seconds, told.jumped) == (200, 0)
    assert history_of(EVENTS[:1], ROWS) is None


def test_a_clock_that_jumps_back_moves_nothing_before_what_happened_before_it() -> None:
    late = [{**each, "when": at(-3600)} if each["event"] == "checkpoint" else each for each in EVENTS]
    told = history_of(late, [])
    assert told is not None
    assert list(told.saved) == [(10, 20)]
    assert told.jumped == 3610
    run = Run(name="jumped", trace=as_measured(played("1f1b", 2, 4)), history=told)
    assert "A clock went back by" in history(run)
    odd = [{**each, "when": "yesterday"} if each["event"] == "copy" else each for each in EVENTS]
    assert history_of(odd, []) is not None


def test_who_is_slow_now_is_of_the_last_start_and_not_over() -> None:
    assert slow_now(EVENTS) == []
    assert slow_now(EVENTS[:8]) == [EVENTS[7]]
    assert slow_now([*EVENTS[:8], event(140, "start", step=30, plan="dp=4")]) == []


def test_the_page_draws_the_run(browser: Browser, tmp_path: Path) -> None:
    save_trace(as_measured(played("1f1b", 2, 4)), tmp_path / "trace.json")
    for name, lines in (("journal.jsonl", EVENTS), ("metrics.jsonl", ROWS)):
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in lines))
    page = tmp_path / "page.html"
    run = load_run(tmp_path)
    page.write_text(make_page(run))
    browser.open(page)
    browser.settle()
    found = browser.run(
        "const all = (s) => [...document.querySelectorAll('#run ' + s)];"
        "return {bars: all('rect.ran').map((e) => e.getBoundingClientRect().width),"
        " bad: all('rect.bad title')[0].textContent, saved: all('circle.saved').length,"
        " copied: all('circle.copied').length, corrupt: all('circle.corrupt').length,"
        " slow: all('rect.slow').length, loss: all('path.line-0').length,"
        " rows: all('tbody tr').map((e) => e.innerText)}"
    )
    assert 0.8 < found["bars"][0] / found["bars"][1] < 1.0, "80 s beside 90 s"
    assert found["bad"] == f"from step 0: {WHY}"
    assert (found["saved"], found["copied"], found["corrupt"], found["slow"], found["loss"]) == (1, 1, 1, 1, 1)
    assert WHY in found["rows"][0]
    assert "finished" in found["rows"][1]
    assert browser.complaints() == []
    assert 'id="run"' not in make_page(replace(run, history=None))
