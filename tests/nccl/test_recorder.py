"""The recorder: what it notes of small things, that it agrees with what groups count, and that it leaves nothing."""

from shardwise.nccl.check import prove
from shardwise.nccl.program import Kind, Program
from shardwise.ranks.spawn import Ranks
from tests.nccl.programs import count_both_ways, gather_and_sum, is_left_as_it_was, with_a_root


def test_a_gather_and_a_sum_are_noted_with_their_waits_and_the_first_use_of_their_memory(two: Ranks) -> None:
    for program in two.run(gather_and_sum):
        assert isinstance(program, Program)
        assert [str(each.kind) for each in program.events] == [
            *("make", "make", "issue", "wait", "read", "issue", "wait", "write"),
            *("free",) * sum(each.kind is Kind.FREE for each in program.events),
        ]
        gather, total = program.issued
        assert gather.operation is not None
        assert total.operation is not None
        assert str(gather.operation) == "all_gather of 3 float32"
        assert str(total.operation) == "all_reduce (sum) of 2 float32"
        assert [(span.stop - span.start, span.writes) for span in gather.operation.spans] == [(12, False), (24, True)]
        read, write = (each for each in program.events if each.kind in (Kind.READ, Kind.WRITE))
        assert (read.number, write.number) == (gather.number, total.number)
        assert {each.communicator for each in (gather.operation, total.operation)} == {1}
        assert [(each.number, each.members, each.backend, each.name) for each in program.communicators] == [
            (0, (0, 1), "nccl", "the default group"),
            (1, (0, 1), "nccl", "pair"),
            (2, (1,), "gloo", ""),
        ]


def test_what_has_a_root_is_noted_with_it_and_proven(two: Ranks) -> None:
    programs = two.run(with_a_root)
    for program in programs:
        told = [str(each.operation) for each in program.issued]
        assert told == [f"{kind} of 3 float32, root 1" for kind in ("gather", "scatter", "broadcast")]
    assert not prove(programs).problems


def test_nothing_of_the_recorder_is_left_when_it_is_off(two: Ranks) -> None:
    assert two.run(is_left_as_it_was) == [True, True]


def test_what_is_noted_is_what_groups_have_counted(two: Ranks) -> None:
    for groups in two.run(count_both_ways, "tp=2,sp=true"):
        assert any(counted for counted, _ in groups)
        for counted, noted in groups:
            assert {kind: noted.get(kind, 0) for kind in counted} == counted
