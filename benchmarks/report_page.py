"""The report page in a real browser without a window: its size, when it is drawn, and how long a frame takes.

Simulated ZB-V steps of 8 ranks x 64 microbatches and of 64 x 256. A page is drawn when its script has ended; a frame is
the chart drawn anew, with the whole step in view and zoomed in to a fiftieth of it. Chromium draws on the processor.

    python benchmarks/report_page.py                    half a minute, with chromium and chromedriver installed
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

from record import record

from shardwise.explain.report.page import make_page
from shardwise.explain.runs_by_name import simulated
from shardwise.planner.plan import Plan

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.explain.report.browser import Browser, find_browser

SIZES = ((8, 64), (64, 256))
MOST_BYTES, MOST_DRAWN_SECONDS = 3_000_000, 1.0
_FRAMES = """
    const {timeline, view} = window.shardwise, length = view.length, taken = [];
    for (let frame = 0; frame < 20; frame++) {
        view.set(%s);
        const start = performance.now();
        timeline.draw();
        taken.push(performance.now() - start);
    }
    return taken;
"""
_WHOLE, _ZOOMED = "0, length", "length * (0.3 + frame / 500), length * (0.32 + frame / 500)"


def measure(browser: Browser, num_ranks: int, num_microbatches: int, folder: Path) -> dict[str, float]:
    """One page, opened a few times."""
    path = folder / f"{num_ranks}x{num_microbatches}.html"
    plan = Plan.parse(f"pp={num_ranks},schedule=zb-v,microbatches={num_microbatches}")
    path.write_text(make_page(simulated(plan)), encoding="utf-8")
    drawn = []
    for _ in range(3):
        browser.open(path)
        assert browser.complaints() == [], "the page has an error"
        drawn.append(browser.run("return window.shardwise.drawnAfter") / 1000)
    return {
        "bytes": path.stat().st_size,
        "drawn_seconds": round(median(drawn), 3),
        "frame_ms": round(median(browser.run(_FRAMES % _WHOLE)), 2),
        "zoomed_frame_ms": round(median(browser.run(_FRAMES % _ZOOMED)), 2),
    }


def main() -> int:
    if find_browser() is None:
        print("no browser: make browser installs chromium and chromedriver")
        return 0
    results: dict[str, object] = {}
    with Browser() as browser, tempfile.TemporaryDirectory() as folder:
        for num_ranks, num_microbatches in SIZES:
            found = measure(browser, num_ranks, num_microbatches, Path(folder))
            results[f"{num_ranks} ranks x {num_microbatches} microbatches"] = found
            print(f"{num_ranks} x {num_microbatches}: {found}")
            if (num_ranks, num_microbatches) == SIZES[0]:
                is_right = found["bytes"] < MOST_BYTES and found["drawn_seconds"] < MOST_DRAWN_SECONDS
    record("report_page", results)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
