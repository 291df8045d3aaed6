import pytest

from shardwise.trace.events import Lane
from shardwise.trace.labels import EventPart, chunks_of_ranks, label_of, parts_of
from tests.trace.played import event, played, trace_of

ONE, TWO, THREE = {0: 0}, {0: 0, 3: 1}, {0: 0, 2: 1, 4: 2}


@pytest.mark.parametrize(
    ("name", "chunks", "label"),
    [
        ("0F0", ONE, ("F0",)),
        ("3I12", TWO, ("i12",)),
        ("0F3&3B1", TWO, ("F3", "b1")),
        ("3F3&0I1", TWO, ("f3", "I1")),
        ("4W8", THREE, ("4W8",)),
        ("4F3&2B1", THREE, ("4F3", "&2B1")),
        ("fetch & forward", THREE, ("fetch & forward",)),
        ("fetch & forward", ONE, ("F0",)),
        ("7", ONE, ("?0",)),
    ],
)
def test_a_label_says_kind_and_microbatch_and_the_chunk_by_its_case(
    name: str, chunks: dict[int, int], label: tuple[str, ...]
) -> None:
    made = event(name, 0, 0, 1)
    assert label_of(made, chunks) == label
    assert len(parts_of(made, chunks)) == len(label)


@pytest.mark.parametrize(("stage", "label"), [(0, "S"), (3, "s")])
def test_a_step_is_labelled_by_its_letter_alone(stage: int, label: str) -> None:
    step = event(f"{stage}STEP0", 0, 0, 1, lane=Lane.STEP)._replace(stage=stage)
    assert label_of(step, TWO) == (label,)
    assert parts_of(step, TWO) == (EventPart("S", 0, stage // 3),)


def test_chunks_are_the_stages_of_a_rank_in_order() -> None:
    assert chunks_of_ranks(played("zb-v", 3, 6)) == ({0: 0, 5: 1}, {1: 0, 4: 1}, {2: 0, 3: 1})


def test_a_stage_seen_only_beside_another_counts() -> None:
    assert chunks_of_ranks(trace_of(event("0F3&3B1", 0, 0, 1))) == (TWO,)
