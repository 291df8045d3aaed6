"""The page in a real browser: it opens from a disk, draws, zooms, finds and tells, by mouse and by keyboard."""

from pathlib import Path
from typing import Any

import pytest

from shardwise.explain.runs_by_name import simulated
from shardwise.planner.plan import Plan
from shardwise.trace.run import Run
from tests.explain.report.browser import Browser
from tests.explain.report.pages import a_large_run, a_run, write_page
from tests.trace.devices import gpu_step

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
    assert told.startswith("1F0  forward of microbatch 0 on stage 1, rank 1: 1\u2009F, from 1.1\u2009F to 2.1\u2009F")
    assert told.endswith("before it warm-up 1\u2009F, for 0F0 of rank 0; warm-up 0.1\u2009F, for 0SEND_F0>1 of rank 0")


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
    wide = box[2] - 94
    opened.click(box[0] + 84 + 0.25 * wide, box[1] + 10, to_x=box[0] + 84 + 0.5 * wide)
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


def test_ranks_that_do_the_same_are_one_row_with_their_number(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_page(tmp_path, simulated(Plan.parse("dp=32,pp=4,microbatches=8"))))
    assert browser.complaints() == []
    assert browser.run("return window.shardwise.timeline.names") == [f"rank {first} x 32" for first in (0, 32, 64, 96)]
    browser.type_into("#search", "rank 70")
    found = "const { search, timeline } = window.shardwise; return search.matches.map((e) => timeline.main.rank[e])"
    assert set(browser.run(found)) == {2}
    browser.press(ENTER)
    assert "ranks 64 to 95: " in details(browser)
    assert "1\u2009F" in details(browser)


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


@pytest.fixture
def on_gpus(browser: Browser, tmp_path: Path) -> Browser:
    browser.prefer("light")
    browser.open(write_page(tmp_path, Run(name="gpus", trace=gpu_step(exposed_sum=0.02, hidden_sum=0.01, copy=0.002))))
    browser.run("scrollTo(0, 0)")
    assert browser.complaints() == []
    browser.settle()
    return browser


def in_lane(browser: Browser, rank: int, lane: int, activity: int) -> tuple[float, float]:
    """Where what a stream did is in the window."""
    found: Any = browser.run(f"""
        const t = window.shardwise.timeline, l = t.main.streams[{rank}][{lane}], b = t.canvas.getBoundingClientRect();
        const x = (t.x(l.begin[{activity}]) + t.x(l.end[{activity}])) / 2;
        return [b.left + x, b.top + t.laneTop({rank}, {lane}) + t.lane / 2];
    """)
    return found[0], found[1]


def test_the_streams_of_a_gpu_lie_beneath_its_rank(on_gpus: Browser) -> None:
    streams = "return window.shardwise.timeline.main.streams.map((lanes) => lanes.map((l) => l.stream + ' ' + l.role))"
    assert on_gpus.run(streams) == [["7 compute", "20 NCCL", "14 copies"]] * 2
    on_gpus.click(*in_lane(on_gpus, 1, 1, 0))
    told = details(on_gpus)
    assert told.startswith(
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL  a sum of gradients of 0STEP0, rank 1, stream 20 (NCCL)"
    )
    assert "30\u2009ms" in told
    assert told.endswith("; launched 5\u2009\u00b5s before")
    on_gpus.click(*in_lane(on_gpus, 0, 2, 0))
    assert details(on_gpus).startswith(
        "Memcpy HtoD (Pinned -> Device)  host to device of 0F0, rank 0, stream 14 (copies)"
    )


def test_lanes_have_the_colours_of_what_ran_there(on_gpus: Browser) -> None:
    colours = on_gpus.run("""
        const t = window.shardwise.timeline, c = t.canvas, ratio = devicePixelRatio;
        const all = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
        return [[0, 30], [1, 0], [2, 0]].map(([number, place]) => {
            const l = t.main.streams[0][number], x = (t.x(l.begin[place]) + t.x(l.end[place])) / 2;
            const at = 4 * (Math.floor((t.laneTop(0, number) + t.lane / 2) * ratio) * c.width + Math.floor(x * ratio));
            return [...all.slice(at, at + 3)];
        });
    """)
    # Kernels without a gap, from afar, are as high as their lane; then a sum, then a copy.
    assert colours == [[0x8B, 0xA3, 0xC4], [0xE0, 0x70, 0x6B], [0xC9, 0x96, 0x3A]]


def test_streams_are_hidden_and_shown_by_a_key(on_gpus: Browser) -> None:
    height = "return document.getElementById('chart').clientHeight"
    tall = on_gpus.run(height)
    on_gpus.press("s")
    on_gpus.settle()
    assert on_gpus.run(height) < tall
    assert on_gpus.run("return document.getElementById('streams').checked") is False
    on_gpus.press("s")
    on_gpus.settle()
    assert on_gpus.run(height) == tall


def test_a_table_says_what_each_stream_did(on_gpus: Browser) -> None:
    tables = on_gpus.run("return [...document.querySelectorAll('table.data')].map((t) => t.textContent)")
    assert any("rank 1, stream 20" in text and "NCCL all reduce" in text for text in tables)


def test_where_no_stream_was_seen_there_is_no_lane_and_no_box_to_tick(opened: Browser) -> None:
    assert opened.run("return document.getElementById('streams').parentElement.offsetParent") is None
    assert opened.run("return window.shardwise.timeline.numLanes") == 0
    opened.press("s")
    assert opened.complaints() == []
