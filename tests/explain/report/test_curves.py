"""The page of a run that has trained: its curves, what was found first, and two runs in one headline."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.explain.report.curves import CHARTS, curves
from shardwise.explain.report.page import make_page
from shardwise.trace.file import save_trace
from shardwise.trace.metrics import curves_of
from shardwise.trace.run import Run, load_run
from tests.explain.doctor.patients import as_measured, played
from tests.explain.report.browser import Browser
from tests.explain.report.pages import a_run, write_page
from tests.explain.report.test_sections import words_of


def rows(num_steps: int, factor: float = 1.0) -> list[dict[str, float | None]]:
    """As `shardwise train` writes them: a row for each step, and now and then one with what all ranks know."""
    found: list[dict[str, float | None]] = []
    for step in range(1, num_steps + 1):
        found.append({"step": step, "loss": factor * 5 / step, "rate": 3e-4 / step, "gradient_norm": 1.0 + step % 2})
        if step % 2 == 0:
            found.append({"step": step, "tokens_per_second": 1000.0 * factor, "memory_bytes": 2.5 * 2**30, "mfu": 0.41})
            found.append({"step": step, "held_out_loss": factor * 6 / step})
    return found


def trained(name: str = "trained", num_steps: int = 8, factor: float = 1.0) -> Run:
    run = Run(name=name, trace=as_measured(played("1f1b", 2, 4, hop=0.1)))
    return replace(run, curves=curves_of(rows(num_steps, factor)))


def test_metrics_of_a_folder_are_curves_and_what_is_not_finite_is_left_out(tmp_path: Path) -> None:
    save_trace(as_measured(played("1f1b", 2, 4)), tmp_path / "trace.json")
    lines = [*rows(4), {"step": 5, "loss": None, "rate": True}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines) + '{"step": 6, "lo')
    found = load_run(tmp_path).curves
    assert found["loss"] == ((1, 5.0), (2, 2.5), (3, 5 / 3), (4, 1.25))
    assert found["tokens_per_second"] == ((2, 1000.0), (4, 1000.0))
    assert [step for step, _ in found["rate"]] == [1, 2, 3, 4]


def test_every_axis_has_its_unit_and_every_curve_its_title() -> None:
    text = words_of(curves(trained()))
    for title, unit in (
        ("Loss", "loss"), ("Throughput", "tokens/s"), ("Learning rate", "rate"), ("Norm of the gradients", "norm"),
        ("Memory of the fullest rank", "GiB"), ("Model FLOPs utilisation", "%"),
    ):  # fmt: skip
        assert title in text
        assert f" {unit} " in text
    assert text.count(" step ") == 6
    assert "training" in text
    assert "held out" in text
    assert all(chart.unit for chart in CHARTS)


def test_a_run_that_has_not_trained_has_no_such_section() -> None:
    assert curves(a_run("1f1b", 2, 4)) == ""
    assert "Training" not in words_of(make_page(a_run("1f1b", 2, 4)))


def test_a_long_run_is_drawn_with_few_points_and_one_step_with_a_dot() -> None:
    long = curves(trained(num_steps=5000))
    assert max(line.count(":") for line in long.split("data-points=")[1:]) < 900
    assert "a point is the mean of its neighbours" in long
    assert "<circle" in curves(trained(num_steps=1))


def test_what_was_found_comes_first() -> None:
    page = make_page(trained())
    order = [
        page.index(f'id="{name}-head"') for name in ("findings", "training", "timeline", "parts", "memory", "plan")
    ]
    assert order == sorted(order)
    assert words_of(page).index("tokens/s") < words_of(page).index("Findings")


def test_the_headline_of_two_runs_has_both() -> None:
    slow = replace(trained("slow", factor=2.0), trace=as_measured(played("1f1b", 2, 4, hop=0.1, slower={0: 2, 1: 2})))
    text = words_of(make_page(trained("quick"), slow))
    head = text[: text.index("Findings")]
    assert "quick : Measured" in head
    assert "slow : Measured" in head
    assert "A step of quick takes" in head
    # Loss and speed at the end of both.
    assert "1000 2000" in head
    assert "0.625 1.25" in head
    assert "slow, training" in text


def test_curves_are_drawn_and_say_their_numbers_where_the_pointer_is(browser: Browser, tmp_path: Path) -> None:
    browser.prefer("light")
    browser.open(write_page(tmp_path, trained(), trained("other", factor=1.5)))
    assert browser.complaints() == []
    browser.run("document.getElementById('training').scrollIntoView()")
    x, y, wide = browser.run("""
        const b = document.querySelector('.chart svg').getBoundingClientRect();
        return [b.left + b.width * 58 / 380, b.top + b.height / 2, b.width];
    """)
    browser.click(x + 1, y, to_x=x)
    assert browser.run("return document.querySelector('.chart .said').textContent") == (
        "step 1: trained, training 5, trained, held out 3, other, training 7.5, other, held out 4.5"
    )
    assert wide > 250
    heights = browser.run("return [...document.querySelectorAll('.chart path')].map((p) => p.getBBox().height)")
    assert len(heights) == 14
    assert heights[0] > 50


@pytest.mark.parametrize("width", [1280, 420])
def test_a_narrow_window_shows_all_of_it(browser: Browser, tmp_path: Path, width: int) -> None:
    browser.tell("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    try:
        browser.open(write_page(tmp_path, trained()))
        assert browser.complaints() == []
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth") is True
    finally:
        browser.tell("Emulation.clearDeviceMetricsOverride")
