import io
import json
import math
from collections.abc import Sequence

import pytest

from shardwise.answer import Answer, Canvas, canvas_on, json_text, table, visible_width


def make_canvas(*, colour: bool = False) -> Canvas:
    return Canvas(stream=io.StringIO(), width=80, colour=colour)


def printed(columns: Sequence[str], rows: Sequence[Sequence[object]], *, colour: bool = False) -> list[str]:
    stream = io.StringIO()
    table(columns, rows, Canvas(stream=stream, width=80, colour=colour))
    return stream.getvalue().splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_paint_leaves_text_alone_where_there_is_no_colour() -> None:
    assert make_canvas().paint("F0", "bold on_202") == "F0"


@pytest.mark.parametrize(
    ("style", "codes"),
    [
        ("bold", "1"),
        ("dim", "2"),
        ("red", "31"),
        ("on_red", "41"),
        ("on_202", "48;5;202"),
        ("black on_114", "30;48;5;114"),
    ],
)
def test_paint_wraps_text_in_the_codes_of_a_style(style: str, codes: str) -> None:
    assert make_canvas(colour=True).paint("F0", style) == f"\x1b[{codes}mF0\x1b[0m"


def test_paint_refuses_a_style_that_does_not_exist() -> None:
    with pytest.raises(AssertionError, match="no such style: 'crimson'"):
        make_canvas(colour=True).paint("F0", "crimson")


def test_colour_codes_take_no_width() -> None:
    assert visible_width(make_canvas(colour=True).paint("1f1b", "bold on_202")) == 4


def test_a_terminal_has_colour_and_a_pipe_has_none() -> None:
    assert canvas_on(Terminal()).colour
    assert not canvas_on(io.StringIO()).colour


@pytest.mark.parametrize(
    ("settings", "on_terminal", "in_pipe"),
    [
        ({"NO_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"FORCE_COLOR": "0"}, True, False),
        ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
    ],
    ids=str,
)
def test_the_user_has_the_last_word_about_colour(
    settings: dict[str, str], on_terminal: bool, in_pipe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert (canvas_on(Terminal()).colour, canvas_on(io.StringIO()).colour) == (on_terminal, in_pipe)


@pytest.mark.parametrize(("columns", "width"), [("57", 57), ("", 120), ("0", 120), ("wide", 120), ("-3", 120)])
def test_the_width_is_columns_if_that_is_a_number(columns: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert canvas_on(io.StringIO()).width == width


def test_a_table_sets_numbers_to_the_right_and_names_to_the_left() -> None:
    rows = [["gpipe", 33, "27.3 %", "1.5 ms"], ["1f1b", 25.500000000000004, "6.7 %", "-"]]
    assert printed(["schedule", "makespan", "bubble", "wait"], rows) == [
        "schedule  makespan  bubble    wait",
        "gpipe           33  27.3 %  1.5 ms",
        "1f1b          25.5   6.7 %       -",
    ]


def test_a_column_of_names_that_begin_with_digits_is_no_column_of_numbers() -> None:
    assert printed(["schedule", "x"], [["1f1b", "y"]])[1] == "1f1b      y"


def test_a_table_lines_up_when_it_is_coloured() -> None:
    canvas = make_canvas(colour=True)
    rows: list[list[object]] = [[canvas.paint("gpipe", "red"), canvas.paint("3", "green")], ["zb-v", 10]]
    lines = printed(["name", "peak"], rows, colour=True)
    assert lines[0] == "\x1b[1mname\x1b[0m   \x1b[1mpeak\x1b[0m"
    assert [visible_width(line) for line in lines] == [11, 11, 11]


def test_a_table_without_rows_is_its_header() -> None:
    assert printed(["name", "peak"], []) == ["name  peak"]


def test_a_row_of_the_wrong_length_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="a table of 2 columns was given a row of 1"):
        printed(["name", "peak"], [["gpipe"]])


def test_json_has_a_line_for_each_key_and_no_dust_of_float_sums() -> None:
    data = {"makespan": 25.500000000000004, "peaks": (4, 4.0), "by_rank": {0: None}, "name": "zb-v", "ok": True}
    text = json_text(data)
    assert text.splitlines() == [
        "{",
        '  "makespan": 25.5,',
        '  "peaks": [4, 4.0],',
        '  "by_rank": {"0": null},',
        '  "name": "zb-v",',
        '  "ok": true',
        "}",
    ]
    assert json.loads(text)["peaks"] == [4, 4]


def test_json_of_nothing_is_an_empty_object() -> None:
    assert json.loads(json_text({})) == {}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_json_is_strict(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        json_text({"bubble": value})


def test_json_refuses_what_it_has_no_word_for() -> None:
    with pytest.raises(AssertionError, match="an answer holds a object"):
        json_text({"thing": object()})


def test_an_answer_is_a_success_unless_it_says_otherwise() -> None:
    assert Answer(data={}, render=lambda canvas: canvas.print("done")).status == 0
