from xml.etree import ElementTree

import pytest

from shardwise.trace.attribution import gaps
from shardwise.trace.events import Lane, Trace
from shardwise.trace.svg import colour_of, to_svg, transfers
from tests.trace.played import GENERATORS, event, played, trace_of

SVG = "{http://www.w3.org/2000/svg}"


def parsed(trace: Trace, title: str = "a trace") -> ElementTree.Element:
    return ElementTree.fromstring(to_svg(trace, title=title))


def groups(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return root.findall(f"{SVG}g[@class='{kind}']")


def words(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("hop", [0.0, 0.125])
@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_there_is_a_box_for_each_event_and_a_hatch_for_each_gap(name: str, hop: float) -> None:
    trace = played(name, 4, 8, hop=hop)
    root = parsed(trace)
    assert len(groups(root, "event")) == sum(len(events) for events in trace.compute)
    assert len(groups(root, "gap")) == sum(len(found) for found in gaps(trace))
    assert len(root.findall(f"{SVG}path[@class='curve']")) == 4


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_every_microbatch_is_written_on_its_box(name: str) -> None:
    trace = played(name, 2, 12)
    written = [text.text for group in groups(parsed(trace), "event") for text in group.findall(f"{SVG}text")]
    assert len(written) == sum(1 + event.name.count("&") for events in trace.compute for event in events)


def test_boxes_lie_where_their_times_are() -> None:
    trace = trace_of(event("0F0", 0, 0, 1), event("0B0", 0, 1, 4))
    first, second = (group.find(f"{SVG}rect") for group in groups(parsed(trace), "event"))
    assert first is not None
    assert second is not None
    assert float(first.get("x", "")) + 160 == float(second.get("x", ""))  # A quarter of 640 pixels.
    assert second.get("width") == "479"


def test_the_halves_of_a_pair_lie_above_each_other() -> None:
    (group,) = groups(parsed(trace_of(event("0F3&3B1", 0, 0, 1))), "event")
    upper, lower = group.findall(f"{SVG}rect")
    assert upper.get("x") == lower.get("x")
    assert float(upper.get("y", "")) + float(upper.get("height", "")) == float(lower.get("y", ""))
    assert (upper.get("fill"), lower.get("fill")) == (colour_of("F", 0, 2), colour_of("B", 1, 2))


def test_a_reader_who_points_at_a_box_or_a_gap_is_told_what_it_is() -> None:
    root = parsed(played("gpipe", 2, 2, hop=0.25))
    tips = [title.text for title in root.iter(f"{SVG}title")]
    assert "0F1: 1 to 2" in tips
    assert "waiting: 2 to 5.25, 1B0 of rank 1" in tips
    assert "transfer: 5.25 to 5.5, 1SEND_B0>0 of rank 1" in tips
    assert "cool-down: 7.25 to 9.5" in tips


def test_transfers_are_lines_as_long_as_there_are_few() -> None:
    few, many = played("1f1b", 4, 8), played("1f1b", 4, 100)
    assert len(parsed(few).findall(f"{SVG}line[@class='transfer']")) == len(transfers(few)) == 2 * 3 * 8
    assert len(parsed(many).findall(f"{SVG}line[@class='transfer']")) == 0


def test_a_transfer_knows_who_read_what_came() -> None:
    trace = played("1f1b", 2, 2)
    read = {transfer.send.name: transfer.reader.name for transfer in transfers(trace) if transfer.reader is not None}
    assert read == {"0SEND_F0>1": "1F0", "0SEND_F1>1": "1F1", "1SEND_B0>0": "0B0", "1SEND_B1>0": "0B1"}


def test_the_halves_of_a_pair_read_what_was_sent_to_them() -> None:
    for transfer in transfers(played("dualpipe-v", 4, 10)):
        assert transfer.reader is not None
        kinds = "F" if "SEND_F" in transfer.send.name else "BI"
        wanted = {f"{transfer.receive.stage}{kind}{transfer.receive.microbatch}" for kind in kinds}
        assert wanted & set(transfer.reader.name.split("&"))


def test_what_is_held_is_left_out_where_there_are_too_many_ranks() -> None:
    assert parsed(played("1f1b", 33, 1)).findall(f"{SVG}path[@class='curve']") == []


def test_the_peak_of_each_rank_is_written() -> None:
    written = words(parsed(played("1f1b", 3, 6)))
    assert written[written.index("peak") + 1 :] == ["rank 0", "3", "rank 1", "2", "rank 2", "1"]


def test_the_axis_has_round_times() -> None:
    ticks = [text.text for text in parsed(played("1f1b", 4, 8)).findall(f"{SVG}text[@class='faint middle']")]
    assert ticks == ["0", "5", "10", "15", "20", "25", "30"]


def test_the_legend_names_only_what_is_drawn() -> None:
    assert {"forward", "backward", "idle"} <= set(words(parsed(played("1f1b", 2, 4))))
    assert {"input gradient", "second chunk", "exposed communication"}.isdisjoint(words(parsed(played("1f1b", 2, 4))))
    assert {"input gradient", "second chunk"} <= set(words(parsed(played("zb-v", 2, 4))))
    assert "exposed communication" in words(parsed(played("1f1b", 2, 4, hop=0.5)))


def test_it_is_on_its_own_ground_and_needs_nothing_from_elsewhere() -> None:
    text = to_svg(played("zb-v", 2, 4), title="zb-v")
    root = ElementTree.fromstring(text)
    ground = root.find(f"{SVG}rect")
    assert ground is not None
    assert ground.get("fill") == "#ffffff"
    assert [element.tag for element in root.iter() if element.tag in (f"{SVG}script", f"{SVG}image")] == []
    assert text.count("http") == 1  # The name of the format.


def test_a_title_may_hold_any_text() -> None:
    assert "F & B < 3" in words(parsed(played("1f1b", 1, 1), title="F & B < 3"))


def test_a_step_has_a_box_without_a_number() -> None:
    root = parsed(trace_of(event("0F0", 0, 0, 1), event("0STEP0", 0, 1, 2, lane=Lane.STEP)))
    assert [len(group.findall(f"{SVG}text")) for group in groups(root, "event")] == [1, 0]
    assert "step" in words(root)


def test_very_unequal_times_stay_within_bounds() -> None:
    root = parsed(played("zb-h1", 2, 4, times=(1, 1, 0.001)))
    assert float(root.get("width", "")) < 1500


def test_an_empty_trace_is_an_empty_drawing() -> None:
    assert groups(parsed(Trace(name="empty", num_ranks=2, events=())), "event") == []


def test_later_chunks_are_lighter() -> None:
    assert [colour_of("F", chunk, 3) for chunk in range(3)] == ["#6aa5f2", "#92bef6", "#b9d6fb"]
