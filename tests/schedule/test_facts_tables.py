"""Every number of the worked expectations: what others have computed for these schedules, ours must give exactly."""

import pytest

from shardwise.schedule.catalogue import make_schedule
from shardwise.schedule.passes.backward import split_backward
from shardwise.trace.memory import peaks
from tests.schedule.playing import UNIT, Times, played, played_schedule

#: p and m, then for each schedule "makespan", "makespan/span", or "/span" where the table has only that. F = I = W = 1.
MAKESPANS_AND_SPANS = [
    (2, 4, "gpipe 15/15  1f1b 15/15  interleaved:2 13.5  interleaved:4 12.75  zb-h1 13/13  zb-h2 13/12  zb-v 12.5/12"),
    (2, 4, "dualpipe 12  dualpipe-v 13"),
    (4, 4, "gpipe 21  1f1b 21  interleaved:2 16.5  interleaved:4 14.25  zb-h1 15  zb-h2 16/15  zb-v 15/15"),
    (4, 8, "gpipe 33  1f1b 33  interleaved:2 28.5  interleaved:3 27  interleaved:4 26.25  zb-h1 27  zb-h2 27/24"),
    (4, 8, "zb-v 25.5/24  dualpipe 26  dualpipe-v 27  v-half /26.5  v-min /29.5"),
    (4, 16, "gpipe 57  1f1b 57  interleaved:2 52.5  interleaved:4 50.25  zb-h1 51  zb-h2 51/48  zb-v 49.5/48"),
    (4, 16, "dualpipe 50  dualpipe-v 51  v-half /50.5  v-min /53.5"),
    (8, 8, "gpipe 45  1f1b 45  interleaved:2 34.5  interleaved:4 29.25  zb-h1 31  zb-h2 34/31  zb-v 31/31"),
    (8, 16, "gpipe 69  1f1b 69  interleaved:2 58.5  interleaved:4 53.25  zb-h1 55  zb-h2 55/48  zb-v 51.5/48"),
    (8, 16, "dualpipe 54  dualpipe-v 55  v-half /56.5  v-min /61.5"),
    (8, 24, "gpipe 93  1f1b 93  interleaved:2 82.5  interleaved:3 79  zb-h1 79  zb-h2 79/72  zb-v 75.5/72"),
    (8, 24, "dualpipe 78  dualpipe-v 79  v-half /80.5  v-min /85.5"),
    (8, 32, "gpipe 117  1f1b 117  interleaved:2 106.5  interleaved:4 101.25  zb-h1 103  zb-h2 103/96  zb-v 99.5/96"),
    (8, 32, "dualpipe 102  dualpipe-v 103  v-half /104.5  v-min /109.5"),
]

#: The same for p = 4, m = 8 with a hop of 0.1.
WITH_A_HOP = (
    "gpipe 33.6  1f1b 34.6  interleaved:2 29.9  zb-h1 28.2  zb-h2 27.3/24.6  zb-v 26.8/25.6  "
    "dualpipe-v 28.7  dualpipe 26.9"
)

#: And with F, I, W of 1, 1.2, 0.8.
UNEVEN = (
    "gpipe 33  1f1b 33  interleaved:2 28.5  zb-h1 28.2  zb-h2 27/25.8  zb-v 25.8/25.2  dualpipe 26.4  dualpipe-v 27.6"
)


def check_row(num_ranks: int, num_microbatches: int, row: str, times: Times = UNIT, hop: float = 0.0) -> None:
    words = row.split()
    for label, figures in zip(words[::2], words[1::2], strict=True):
        name, _, chunks = label.partition(":")
        trace = played(name, num_ranks, num_microbatches, times, chunks=int(chunks) if chunks else None, hop=hop)
        makespan, _, span = figures.partition("/")
        if makespan:
            assert trace.makespan == pytest.approx(float(makespan), abs=1e-9), f"makespan of {label}"
        if span:
            assert trace.span == pytest.approx(float(span), abs=1e-9), f"span of {label}"


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "row"), MAKESPANS_AND_SPANS)
def test_with_unit_times_makespans_and_spans_are_those_of_the_table(
    num_ranks: int, num_microbatches: int, row: str
) -> None:
    check_row(num_ranks, num_microbatches, row)


def test_with_a_hop_of_a_tenth_makespans_and_spans_are_those_of_the_table() -> None:
    check_row(4, 8, WITH_A_HOP, hop=0.1)


def test_with_uneven_times_makespans_and_spans_are_those_of_the_table() -> None:
    check_row(4, 8, UNEVEN, times=(1, 1.2, 0.8))


@pytest.mark.parametrize(
    ("name", "chunks", "bubble"),
    [
        ("1f1b", None, 0.2727),
        ("interleaved", 2, 0.1579),
        ("interleaved", 3, 0.1111),
        ("zb-h1", None, 0.1111),
        ("zb-h2", None, 0),
        ("zb-v", None, 0),
        ("dualpipe", None, 0.0769),
        ("dualpipe-v", None, 0.1111),
        ("v-half", None, 0.0943),
        ("v-min", None, 0.1864),
    ],
)
def test_with_four_ranks_and_eight_microbatches_the_bubble_is_that_of_the_table(
    name: str, chunks: int | None, bubble: float
) -> None:
    trace = played(name, 4, 8, chunks=chunks)
    assert trace.bubble == pytest.approx(bubble, abs=0.00005)
    assert trace.bubble == pytest.approx(1 - 24 / trace.span)


@pytest.mark.parametrize(
    ("name", "chunks", "kept", "stages_held"),
    [
        # In stages, of which `chunks` make the microbatch-stage that `peaks` counts in. `kept` is what is left of an
        # activation between I and W: all of it, or nothing where the table says "F -> I only".
        ("gpipe", 1, 1, (8, 8, 8, 8)),
        ("1f1b", 1, 1, (4, 3, 2, 1)),
        ("interleaved", 2, 1, (11, 9, 7, 5)),
        ("interleaved", 3, 1, (15, 13, 11, 9)),
        ("looped-bfs", 2, 1, (16, 16, 16, 16)),
        ("zb-h1", 1, 1, (4, 4, 4, 4)),
        ("zb-h1", 1, 0, (4, 3, 2, 1)),
        ("zb-h2", 1, 1, (7, 7, 7, 7)),
        ("zb-h2", 1, 0, (7, 5, 3, 1)),
        ("zb-v", 2, 1, (8, 8, 8, 8)),
        ("dualpipe-v", 2, 1, (9, 9, 9, 9)),
        ("v-half", 2, 1, (6, 6, 6, 6)),
        ("v-min", 2, 1, (4, 4, 4, 4)),
    ],
)
def test_with_four_ranks_and_eight_microbatches_the_peaks_are_those_of_the_table(
    name: str, chunks: int, kept: float, stages_held: tuple[int, ...]
) -> None:
    found = [chunks * peak for peak in peaks(played(name, 4, 8, chunks=chunks, kept=kept))]
    assert found == pytest.approx(stages_held)


def test_dualpipe_holds_five_microbatches_on_each_of_four_ranks() -> None:
    assert peaks(played("dualpipe", 4, 8)) == (5, 5, 5, 5)


@pytest.mark.parametrize(("pair", "makespan"), [(3, 66), (2, 52)])
def test_the_figure_of_dualpipes_authors_comes_out_with_and_without_overlap(pair: float, makespan: float) -> None:
    assert played("dualpipe", 8, 20, pair=pair).makespan == makespan


@pytest.mark.parametrize(("num_ranks", "num_microbatches", "makespan"), [(4, 8, 25.5), (4, 16, 49.5), (8, 16, 51.5)])
def test_dualpipe_v_with_its_pairs_one_after_the_other_is_as_fast_as_zb_v(
    num_ranks: int, num_microbatches: int, makespan: float
) -> None:
    apart = split_backward(make_schedule("dualpipe-v", num_ranks, num_microbatches))
    assert played_schedule(apart).makespan == makespan
    assert played("zb-v", num_ranks, num_microbatches).makespan == makespan


@pytest.mark.parametrize(
    ("num_ranks", "forward", "backward", "makespan"), [(4, 1, 1, 10), (4, 1, 2, 16), (8, 1, 1, 22), (8, 1, 2, 36)]
)
def test_chimera_with_as_many_microbatches_as_ranks_takes_as_long_as_its_authors_say(
    num_ranks: int, forward: float, backward: float, makespan: float
) -> None:
    assert played("chimera", num_ranks, num_ranks, (forward, backward / 2, backward / 2)).makespan == makespan


@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("v-half", {2: 0.5, 4: 2.5, 6: 5.5, 8: 8.5, 16: 20.5}),
        ("v-min", {2: 1.5, 4: 5.5, 6: 8.5, 8: 13.5, 16: 29.5}),
    ],
)
def test_the_extra_bubble_of_the_controllable_memory_schedules_is_that_of_their_authors_code(
    name: str, extra: dict[int, float], rounds: int
) -> None:
    for num_ranks, seconds in extra.items():
        num_microbatches = rounds * num_ranks
        assert played(name, num_ranks, num_microbatches).span == 3 * num_microbatches + seconds, f"p = {num_ranks}"
