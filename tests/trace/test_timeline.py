import io

import pytest

from shardwise.answer import Canvas, visible_width
from shardwise.schedule.generators.interleaved import interleaved
from shardwise.trace import timeline
from shardwise.trace.attribution import __doc__ as attribution_text
from shardwise.trace.events import Lane, Trace
from shardwise.trace.timeline import draw, legend, memory_bars
from tests.trace.played import GENERATORS, event, played, played_schedule, trace_of

canvas = Canvas(stream=io.StringIO(), width=100, colour=True)


def drawn_in(text: str | None) -> list[str]:
    """The rows of the drawing in a docstring, without what is said beside them."""
    assert text is not None
    rows = [line.strip() for line in text.splitlines() if line.strip().startswith("rank ")]
    return [row.split("      ")[0] for row in rows]


def test_the_drawing_in_the_docstring_of_the_timeline_is_one() -> None:
    assert drawn_in(timeline.__doc__) == draw(played("gpipe", 2, 3), width=80)


def test_the_drawing_in_the_docstring_of_attribution_is_one() -> None:
    assert drawn_in(attribution_text) == draw(played("1f1b", 2, 2), width=80)


def test_an_event_fills_its_time_and_an_idle_cell_is_a_dot() -> None:
    assert draw(played("1f1b", 3, 4), width=80) == [
        "rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---",
        "rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .",
        "rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .",
    ]


def test_the_second_chunk_of_a_rank_is_in_lower_case() -> None:
    trace = trace_of(event("0F0", 0, 0, 1), event("3F0", 0, 1, 2), event("3I0", 0, 2, 3), event("0W0", 0, 4, 5))
    assert draw(trace, width=80) == ["rank 0  F0 f0 i0 .  W0"]


def test_an_overlapped_pair_is_labelled_by_both_its_halves() -> None:
    trace = trace_of(event("0F3&3B1", 0, 0, 3), event("3F2&0B0", 0, 3, 6), event("0F4", 0, 6, 7))
    assert draw(trace, width=80) == ["rank 0  F3b1---- f2B0---- F4"]


def test_more_than_two_chunks_are_told_apart_by_their_stage() -> None:
    assert draw(played_schedule(interleaved(2, 2, 3)), width=100) == [
        "rank 0  0F0 0F1 2F0 2F1 4F0 4F1 .   .   4B0---- .   4B1---- 2B0---- 2B1---- 0B0---- 0B1----",
        "rank 1  .   1F0 1F1 3F0 3F1 5F0 5B0---- 5F1 5B1---- 3B0---- 3B1---- 1B0---- 1B1---- .   .",
    ]


def test_wider_labels_make_wider_cells() -> None:
    (row,) = draw(played("1f1b", 1, 11), width=200)
    assert row.startswith("rank 0  F0- B0----- F1- ")
    assert row.endswith(" F10 B10----")


def test_a_wait_shorter_than_a_dot_and_a_blank_is_one_more_blank() -> None:
    assert draw(trace_of(event("0F0", 0, 0, 3), event("0F1", 0, 4, 7)), width=80) == ["rank 0  F0  F1"]


def test_rows_line_up_when_ranks_have_two_digits() -> None:
    lines = draw(played("1f1b", 11, 1), width=400)
    assert lines[0].startswith("rank  0  F0")
    assert lines[10].startswith("rank 10  .")


def test_what_is_too_wide_goes_on_below_with_its_time() -> None:
    assert draw(played("1f1b", 2, 4), width=30) == [
        "time 0 to 5",
        "rank 0  F0 F1 .  .  B0-",
        "rank 1  .  F0 B0--- F1",
        "",
        "time 5 to 10",
        "rank 0  -- F2 B1--- F3",
        "rank 1  B1--- F2 B2---",
        "",
        "time 10 to 15",
        "rank 0  B2--- .  B3---",
        "rank 1  F3 B3--- .  .",
    ]


def test_a_label_is_never_cut_in_two_but_hangs_over_the_edge() -> None:
    trace = trace_of(event("0F0", 0, 0, 1), event("0F10", 0, 1, 2.25), event("0F11", 0, 2.25, 4))
    assert [line for line in draw(trace, width=16) if line.startswith("rank")] == [
        "rank 0  F0 F10",
        "rank 0  -- F11",
        "rank 0  ----",
        "rank 0",
    ]


def test_a_terminal_too_narrow_for_anything_gets_a_cell_a_line() -> None:
    assert draw(played("1f1b", 1, 1), width=1) == [
        "time 0 to 1",
        "rank 0  F0",
        "",
        "time 1 to 2",
        "rank 0  B0-",
        "",
        "time 2 to 3",
        "rank 0  --",
    ]


@pytest.mark.parametrize("width", [20, 57, 80, 300])
@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_every_label_is_drawn_once_and_no_line_is_too_wide(name: str, width: int) -> None:
    trace = played(name, 4, 12, times=(1, 1.2, 0.8), hop=0.1)
    lines = draw(trace, width=width)
    assert all(len(line) <= width and line == line.rstrip() for line in lines)
    for rank, events in enumerate(trace.compute):
        cells = [cell.rstrip("-") for line in lines if line.startswith(f"rank {rank}") for cell in line.split()[2:]]
        assert len([cell for cell in cells if cell not in ("", ".")]) == len(events)


@pytest.mark.parametrize("width", [40, 120])
@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_colour_changes_nothing_that_is_read(name: str, width: int) -> None:
    trace = played(name, 2, 6)
    plain, coloured = draw(trace, width=width), draw(trace, width=width, paint=canvas.paint)
    assert [visible_width(line) for line in coloured] == [len(line) for line in plain]
    assert any("\x1b[30;48;5;75mF0" in line for line in coloured)
    assert all("\x1b" not in line for line in plain)


def test_very_short_events_do_not_stretch_the_others() -> None:
    assert draw(played("zb-h1", 2, 2, times=(1, 1, 0.01)), width=80) == [
        "rank 0  F0 F1 .  I0 .  I1",
        "rank 1  .  F0 I0 F1 I1 .",
    ]


def test_an_event_of_one_column_is_a_bar() -> None:
    assert draw(played("zb-h1", 1, 2, times=(1, 1, 0.1)), width=80) == [
        "rank 0  F0------- I0------- |F1------- I1------- |"
    ]


def test_a_long_trace_is_drawn_within_bounds() -> None:
    lines = draw(played("1f1b", 2, 1500), width=200)
    assert sum(len(line) for line in lines if line.startswith("rank 0")) < 4300


def test_a_step_is_drawn_when_it_takes_time() -> None:
    trace = trace_of(
        event("0F0", 0, 0, 1),
        event("0STEP0", 0, 1, 2, lane=Lane.STEP),
        event("0STEP1", 0, 2, 2, lane=Lane.STEP),
    )
    assert draw(trace, width=80) == ["rank 0  F0 S-"]


def test_a_name_of_another_form_is_drawn_by_its_letter() -> None:
    assert draw(trace_of(event("forward of layer 3", 0, 0, 1)), width=80) == ["rank 0  F0"]


def test_an_empty_trace_has_empty_rows() -> None:
    assert draw(Trace(name="empty", num_ranks=2, events=()), width=80) == ["rank 0", "rank 1"]


def test_the_legend_says_what_the_letters_are() -> None:
    text = "F forward  B backward  I input gradient  W weight gradient  S step  fbiws second chunk  . idle"
    assert legend() == text
    assert visible_width(legend(canvas.paint)) == len(text)


def test_bars_are_as_long_as_what_is_held() -> None:
    assert memory_bars(played("1f1b", 4, 8), width=18) == [
        "rank 0  ======== 4",
        "rank 1  ====== 3",
        "rank 2  ==== 2",
        "rank 3  == 1",
    ]


def test_a_rank_that_holds_nothing_has_no_bar() -> None:
    assert memory_bars(trace_of(event("0F0", 0, 0, 1)), width=40) == ["rank 0  0"]
