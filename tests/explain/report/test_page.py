"""The page in a real browser: it opens from a disk, draws, zooms, finds and tells, by mouse and by keyboard."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.trace.run import Run
from tests.explain.report.browser import Browser
from tests.explain.report.pages import a_large_run, a_run, write_page

FOCUS = "document.getElementById('chart').focus({preventScroll: true})"
RIGHT, ENTER, ESCAPE = "\ue014", "\ue007", "\ue00c"


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Browser:
    browser.prefer("light")
    browser.open(write_page(tmp_path, a_run("1f1b", 4, 8)))
    browser.run("scrollTo(0, 0)")
    assert browser.complaints() == []
    return browser


def view(browser: Browser) -> tuple[float, float]:
    browser.settle()
    start, end = browser.run("const v = window.shardwise.view; return [v.from / v.length, v.to / v.length];")
    return start, end


def details(browser: Browser) -> str:
    return str(browser.run("return document.getElementById('details').textContent"))


def place_of(browser: Browser, name: str) -> tuple[float, float]:
    """Where the box of an instruction is in the window."""
    found: Any = browser.run(f"""
        const t = window.shardwise.timeline, e = t.main.names.indexOf("{name}"), b = t.canvas.getBoundingClientRect();
        return [b.left + (t.x(t.main.begin[e]) + t.x(t.main.end[e])) / 2, b.top + t.rowTop(t.main.rank[e]) + 8];
    """)
    return found[0], found[1]


def pixels(browser: Browser, canvas: str) -> int:
    """How many different colours a canvas shows."""
    return int(
        browser.run(f"""
            const c = document.getElementById("{canvas}"), d = c.getContext("2d").getImageData(0, 0, c.width, c.height);
            return new Set(new Uint32Array(d.data.buffer)).size;
        """)
    )


def test_it_loads_nothing_from_anywhere(opened: Browser) -> None:
    assert opened.run("return performance.getEntriesByType('resource').length") == 0
    assert opened.run("return document.querySelectorAll('[src], link').length") == 0


def test_every_canvas_is_drawn(opened: Browser) -> None:
    opened.settle()
    for canvas in ("chart", "overview", "held"):
        assert pixels(opened, canvas) > 4, canvas


def test_keys_zoom_and_move_and_fit(opened: Browser) -> None:
    opened.run(FOCUS)
    assert view(opened) == (0, 1)
    opened.press("+")
    start, end = view(opened)
    assert end - start == pytest.approx(0.6)
    opened.press(RIGHT)
    assert view(opened)[0] == pytest.approx(start + 0.12)
    opened.press("-", "0")
    assert view(opened) == pytest.approx((0, 1))


def test_search_finds_instructions_and_goes_from_one_to_the_next(opened: Browser) -> None:
    opened.run("document.body.focus()")
    opened.press("/")
    opened.type_into("#search", "F3")
    found = "return document.getElementById('found').textContent"
    assert opened.run(found) == "4 found"
    opened.press(ENTER)
    assert opened.run(found) == "1 of 4"
    assert details(opened).startswith("0F3  forward of microbatch 3 on stage 0, rank 0")
    opened.press(ENTER)
    assert details(opened).startswith("1F3")
    opened.press(ESCAPE)
    assert opened.run(found) == ""


def test_search_knows_ranks_and_does_not_take_a_part_of_a_number(opened: Browser) -> None:
    opened.type_into("#search", "rank 2")
    assert opened.run("return window.shardwise.search.matches.length") == 16
    opened.run("window.shardwise.search.clear()")
    opened.type_into("#search", "2B1")
    assert opened.run("return window.shardwise.search.matches.length") == 1


def test_a_click_tells_what_is_there_and_what_was_waited_for(opened: Browser) -> None:
    opened.settle()
    opened.click(*place_of(opened, "1F0"))
    told = details(opened)
    assert told.startswith("1F0  forward of microbatch 0 on stage 1, rank 1: 1, from 1.1 to 2.1")
    assert told.endswith("before it warm-up 1, for 0F0 of rank 0; warm-up 0.1, for 0SEND_F0>1 of rank 0")


def test_comma_and_full_stop_walk_along_a_rank(opened: Browser) -> None:
    opened.run(FOCUS)
    opened.press(".", ".")
    assert details(opened).startswith("0F1")
    opened.press(",")
    assert details(opened).startswith("0F0")


def test_a_drag_in_the_overview_chooses_a_stretch(opened: Browser) -> None:
    box = opened.run(
        "const b = document.getElementById('overview').getBoundingClientRect(); return [b.left, b.top, b.width];"
    )
    wide = box[2] - 74
    opened.click(box[0] + 64 + 0.25 * wide, box[1] + 10, to_x=box[0] + 64 + 0.5 * wide)
    assert view(opened) == pytest.approx((0.25, 0.5), abs=0.01)


def test_light_and_dark_by_the_system_and_by_choice(opened: Browser) -> None:
    ground = "return getComputedStyle(document.documentElement).backgroundColor"
    assert opened.run(ground) == "rgb(255, 255, 255)"
    opened.run("document.getElementById('theme').click()")
    assert opened.run(ground) == "rgb(20, 24, 30)"
    opened.prefer("dark")
    opened.run("location.reload()")
    assert opened.run(ground) == "rgb(20, 24, 30)"


def test_help_opens_by_a_key_and_closes(opened: Browser) -> None:
    opened.press("?")
    assert opened.run("return document.getElementById('keys').open") is True
    opened.press(ESCAPE)
    assert opened.run("return document.getElementById('keys').open") is False


def test_what_is_predicted_lies_beneath_and_is_compared_in_words(browser: Browser, tmp_path: Path) -> None:
    run, predicted = a_run("1f1b", 2, 4), a_run("1f1b", 2, 4, hop=0).trace
    browser.open(write_page(tmp_path, Run(name="r", trace=run.trace, predicted=predicted, unit="")))
    assert browser.complaints() == []
    browser.run(FOCUS)
    browser.press(".")
    assert "; predicted 1 (+0" in details(browser)
    browser.press("u")
    assert browser.run("return window.shardwise.timeline.beneath") is None


def test_two_runs_are_compared(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page(tmp_path, a_run("zb-v", 4, 8), a_run("1f1b", 4, 8)))
    assert browser.complaints() == []
    headings = browser.run("return [...document.querySelectorAll('h2')].map((h) => h.textContent)")
    assert "Two runs compared" in headings
    assert browser.run("return document.getElementById('beneath').selectedOptions[0].textContent") == "1f1b"


def test_a_name_is_never_read_as_markup(browser: Browser, tmp_path: Path) -> None:
    name = "</script><img src=x onerror=alert(1)>@title@"
    browser.open(write_page(tmp_path, a_run("1f1b", 2, 2, name=name)))
    assert browser.complaints() == []
    assert browser.run("return document.querySelector('h1').textContent") == name
    assert browser.run("return document.querySelectorAll('img').length") == 0


def test_8_ranks_and_64_microbatches_are_under_3_megabytes(browser: Browser, tmp_path: Path) -> None:
    path = write_page(tmp_path, a_run("zb-v", 8, 64))
    assert path.stat().st_size < 3_000_000
    browser.open(path)
    assert browser.complaints() == []
    assert pixels(browser, "chart") > 4


def test_64_ranks_and_256_microbatches_open(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page(tmp_path, a_large_run(64, 256)))
    assert browser.complaints() == []
    assert browser.run("return window.shardwise.timeline.main.rows.length") == 64
    assert pixels(browser, "chart") > 4
