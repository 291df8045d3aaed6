"""The checker on programs written by hand: what is right passes, and each rule says what is wrong in one sentence."""

import subprocess
import sys
from dataclasses import replace

import pytest

from shardwise.nccl.check import Proof, prove
from shardwise.nccl.program import HOST, Kind, Operation, Span, Transfer
from tests.nccl.making import Rank, all_reduce, pair, receive, send


def proven(*ranks: Rank) -> Proof:
    return prove([each.program() for each in ranks])


def linked() -> list[Rank]:
    """Two ranks with a link each way."""
    up, down = pair(1, "link 0>1"), pair(2, "link 1>0")
    return [Rank(0, up, down), Rank(1, up, down)]


def linked_and_connected() -> list[Rank]:
    """The same after a message over each link, in one order on both."""
    ranks = linked()
    for rank, each in enumerate(ranks):
        for number in range(2):
            each.wait(each.issue((send if rank == number else receive)(1 - rank, communicator=number + 1, memory=8)))
    return ranks


def only(proof: Proof) -> str:
    (found,) = proof.problems
    return found.sentence


def test_a_sum_that_both_wait_for_before_they_read_it_is_right() -> None:
    ranks = [Rank(0, pair()), Rank(1, pair())]
    for each in ranks:
        number = each.issue(all_reduce())
        each.wait(number).touch(Kind.READ, number, memory=1)
    proof = proven(*ranks)
    assert proof.is_right
    assert (proof.ranks, proof.communicators, proof.operations, proof.waits, proof.touches) == (2, 1, 2, 2, 2)
    assert (proof.streams, proof.most_under_way) == (4, 1)


@pytest.mark.parametrize(
    ("other", "kind", "told"),
    [
        (all_reduce(count=11), "size", "is not of one size"),
        (all_reduce(dtype="bfloat16"), "type", "is not of one type"),
        (all_reduce(kind="all_gather", reduction=""), "order", "is not of one kind"),
        (all_reduce(reduction="max"), "reduction", "is not one reduction"),
        (all_reduce(root=1), "root", "has not one root"),
        (all_reduce(carries="channel 4"), "purpose", "is not for the same"),
    ],
)
def test_collectives_that_differ_are_named_with_both_ranks(other: Operation, kind: str, told: str) -> None:
    ranks = [Rank(0, pair()), Rank(1, pair())]
    for rank, operation in zip(ranks, (all_reduce(), other), strict=True):
        rank.wait(rank.issue(operation))
    (found,) = proven(*ranks).problems
    assert (found.kind, found.ranks) == (kind, (0, 1))
    assert found.sentence == (
        f"collective 0 on communicator 1 (tp, ranks 0 1) {told}: rank 0 issues all_reduce (sum) of 10 float32 in step 0"
        f" (net.py:7), rank 1 issues {other} in step 0 (net.py:7)"
    )
    assert found.look == "net.py:7, and what its ranks do on tp before"


def test_a_collective_that_one_rank_never_issues_is_missing_there() -> None:
    ranks = [Rank(0, pair()), Rank(1, pair())]
    ranks[0].wait(ranks[0].issue(all_reduce()))
    assert only(proven(*ranks)) == (
        "rank 0 issues all_reduce (sum) of 10 float32 on communicator 1 (tp, ranks 0 1) in step 0 (net.py:7), and"
        " rank 1 never does: it issues 0 collectives there"
    )


def test_rows_that_nobody_expects_are_found_in_an_all_to_all() -> None:
    ranks = [Rank(0, pair()), Rank(1, pair())]
    for rank, sent, received in zip(ranks, ((2, 3), (4, 5)), ((2, 4), (9, 5)), strict=True):
        operation = Operation(
            kind="all_to_all", communicator=1, count=sum(sent), dtype="float32", sent=sent, received=received
        )
        rank.wait(rank.issue(operation))
    assert "sends other numbers than are received" in only(proven(*ranks))


def test_groups_made_in_another_order_are_found() -> None:
    one, other = pair(1, "tp"), pair(2, "dp", members=(1, 2))
    ranks = [Rank(rank) for rank in range(3)]
    ranks[0].make(one).make(other)
    ranks[1].make(one).make(other)
    ranks[2].make(other).make(one)
    assert only(proven(*ranks)) == (
        "group 1 of the world is not the same: rank 0 makes one of ranks 0 1 over nccl, rank 2 makes one of ranks 1 2"
        " over nccl"
    )


def test_a_rank_that_is_not_of_a_communicator_may_not_use_it() -> None:
    ranks = [Rank(rank, pair()) for rank in range(3)]
    for each in ranks:
        each.wait(each.issue(all_reduce()))
    assert "rank 2 issues" in only(proven(*ranks))
    assert "is not one of its ranks" in only(proven(*ranks))


def test_a_send_without_a_receive_and_one_of_another_size_are_found() -> None:
    ranks = [Rank(0, pair(name="link 0>1")), Rank(1, pair(name="link 0>1"))]
    ranks[0].wait(ranks[0].issue(send(1)))
    assert only(proven(*ranks)) == (
        "send 0 of rank 0 to rank 1 on communicator 1 (link 0>1, ranks 0 1) (10 float32) in step 0 (net.py:7) has no"
        " other end: rank 1 never receives it"
    )
    ranks[1].wait(ranks[1].issue(receive(0, count=12)))
    assert only(proven(*ranks)) == (
        "message 0 from rank 0 to rank 1 on communicator 1 (link 0>1, ranks 0 1): rank 0 sends 10 float32 in step 0"
        " (net.py:7), rank 1 receives 12 float32 in step 0 (net.py:7)"
    )


def crossing(*, waits: bool) -> list[Rank]:
    ranks = [Rank(0, pair(1), pair(2, "dp")), Rank(1, pair(1), pair(2, "dp"))]
    for rank, order in zip(ranks, ((1, 2), (2, 1)), strict=True):
        # Connected in one order, first.
        for number in (1, 2):
            rank.wait(rank.issue(all_reduce(number, memory=9)))
        issued = []
        for number in order:
            issued.append(rank.issue(all_reduce(number, memory=number)))
            if waits:
                rank.wait(issued[-1])
        for number in issued:
            rank.wait(number)
    return ranks


@pytest.mark.parametrize("waits", [True, False])
def test_two_communicators_used_in_opposite_order_are_a_circle(waits: bool) -> None:
    (found,) = proven(*crossing(waits=waits)).problems
    assert (found.kind, found.ranks) == ("circle", (0, 1))
    assert found.sentence.startswith("ranks 0 1 wait in a circle: rank ")
    assert "communicator 1 (tp, ranks 0 1)" in found.sentence
    assert "communicator 2 (dp, ranks 0 1)" in found.sentence


def test_a_first_message_each_way_is_a_circle_unless_the_links_were_connected_in_one_order() -> None:
    ranks = linked()
    for rank in range(2):
        ranks[rank].issue(send(1 - rank, communicator=rank + 1))
        number = ranks[rank].issue(receive(1 - rank, communicator=2 - rank, memory=2))
        ranks[rank].wait(number).wait(1)
    assert "wait in a circle" in only(proven(*ranks))
    connected = linked_and_connected()
    for rank in range(2):
        number = connected[rank].issue(send(1 - rank, communicator=rank + 1))
        other = connected[rank].issue(receive(1 - rank, communicator=2 - rank, memory=2))
        connected[rank].wait(other).wait(number)
    assert proven(*connected).is_right


def test_two_that_each_wait_for_a_message_before_they_send_one_are_a_circle() -> None:
    ranks = linked_and_connected()
    for rank in range(2):
        ranks[rank].wait(ranks[rank].issue(receive(1 - rank, communicator=2 - rank, memory=2)))
        ranks[rank].wait(ranks[rank].issue(send(1 - rank, communicator=rank + 1)))
    assert "wait in a circle" in only(proven(*ranks))


@pytest.mark.parametrize(("kind", "is_right"), [(Kind.WAIT, False), (Kind.KNOWN, True)])
def test_to_wait_for_a_send_before_one_receives_is_a_circle_and_to_ask_whether_it_is_over_is_none(
    kind: Kind, is_right: bool
) -> None:
    ranks = linked_and_connected()
    for rank in range(2):
        sent = ranks[rank].issue(send(1 - rank, communicator=rank + 1))
        ranks[rank].wait(sent, kind=kind)
        ranks[rank].wait(ranks[rank].issue(receive(1 - rank, communicator=2 - rank, memory=2))).wait(sent)
    assert proven(*ranks).is_right is is_right


def test_a_ring_in_which_all_send_and_receive_at_once_is_right_and_one_by_one_is_not() -> None:
    ring = pair(1, "cp", members=(0, 1, 2))
    ranks = [Rank(rank, ring) for rank in range(3)]
    for rank, each in enumerate(ranks):
        parts = (
            Transfer(is_send=True, peer=(rank + 1) % 3, count=4, dtype="float32"),
            Transfer(is_send=False, peer=(rank - 1) % 3, count=4, dtype="float32"),
        )
        each.wait(each.issue(Operation(kind="batch", communicator=1, transfers=parts)))
    assert proven(*ranks).is_right
    apart = [Rank(rank, ring) for rank in range(3)]
    for rank, each in enumerate(apart):
        each.wait(each.issue(send((rank + 1) % 3)))
        each.wait(each.issue(receive((rank - 1) % 3, memory=2)))
    assert "wait in a circle" in only(proven(*apart))


@pytest.mark.parametrize(
    ("kind", "told", "name"),
    [(Kind.READ, "reads", "use"), (Kind.WRITE, "writes to", "reuse"), (Kind.FREE, "frees", "freed")],
)
def test_a_result_that_is_touched_before_it_is_waited_for_is_named(kind: Kind, told: str, name: str) -> None:
    ranks = [Rank(0, pair()), Rank(1, pair())]
    ranks[1].wait(ranks[1].issue(all_reduce()))
    number = ranks[0].issue(all_reduce())
    ranks[0].touch(kind, number, memory=1, stop=16).wait(number)
    (found,) = proven(*ranks).problems
    assert (found.kind, found.ranks) == (name, (0,))
    assert found.sentence == (
        f"rank 0 {told} 16 bytes in step 0 at 0F1 while all_reduce (sum) of 10 float32 on communicator 1 (tp, ranks 0"
        " 1), issued in step 0 (net.py:7), may still write them: stream compute has not waited for it"
    )


def test_what_is_sent_may_be_read_meanwhile_and_not_written() -> None:
    for kind, is_right in ((Kind.READ, True), (Kind.WRITE, False), (Kind.FREE, False)):
        ranks = [Rank(0, pair()), Rank(1, pair())]
        ranks[1].wait(ranks[1].issue(receive(0)))
        number = ranks[0].issue(send(1))
        ranks[0].touch(kind, number, memory=1).wait(number)
        assert proven(*ranks).is_right is is_right


def test_what_the_host_has_seen_to_be_over_may_be_freed() -> None:
    ranks = [Rank(0, pair()), Rank(1, pair())]
    ranks[1].wait(ranks[1].issue(receive(0)))
    number = ranks[0].issue(send(1))
    ranks[0].wait(number, kind=Kind.KNOWN).touch(Kind.FREE, number, memory=1)
    assert proven(*ranks).is_right


def test_what_was_over_when_the_host_asked_may_be_freed_and_not_be_used() -> None:
    """At another time the answer would have been no, and the memory would have been used all the same."""
    for kind, is_right in ((Kind.FREE, True), (Kind.WRITE, False)):
        ranks = [Rank(0, pair()), Rank(1, pair())]
        ranks[1].wait(ranks[1].issue(receive(0)))
        number = ranks[0].issue(send(1))
        ranks[0].wait(number, kind=Kind.SEEN).touch(kind, number, memory=1)
        assert proven(*ranks).is_right is is_right


def test_work_that_nobody_waits_for_is_named() -> None:
    ranks = [Rank(0, pair()), Rank(1, pair())]
    ranks[0].issue(all_reduce())
    ranks[1].wait(ranks[1].issue(all_reduce()))
    assert only(proven(*ranks)).endswith("and nobody ever waits for it")


def test_a_stream_that_did_not_wait_for_what_is_computed_is_named() -> None:
    for waits in (True, False):
        ranks = [Rank(0, pair()), Rank(1, pair())]
        ranks[1].wait(ranks[1].issue(all_reduce()))
        mark = ranks[0].copy("compute")
        if waits:
            ranks[0].wait(mark, stream="side")
        ranks[0].wait(ranks[0].issue(all_reduce(), stream="side"))
        proof = proven(*ranks)
        assert proof.is_right is waits
        if not waits:
            assert "on stream side in step 0 (net.py:7), and that stream has not waited" in only(proof)


def test_what_a_copy_still_brings_may_not_be_sent() -> None:
    shard = Span(memory=1, start=0, stop=40, writes=True)
    for follows in (True, False):
        ranks = [Rank(0, pair()), Rank(1, pair())]
        ranks[1].wait(ranks[1].issue(receive(0)))
        copy = ranks[0].copy("copies in", shard)
        if follows:
            ranks[0].wait(copy)
        ranks[0].wait(ranks[0].issue(send(1)))
        proof = proven(*ranks)
        assert proof.is_right is follows
        if not follows:
            assert "while the copy 1 on stream copies in" in only(proof)


def test_what_is_computed_may_not_be_copied_before() -> None:
    out, written = Span(memory=1, start=0, stop=40), Span(memory=2, start=0, stop=40, writes=True)
    for follows in (True, False):
        ranks = linked_and_connected()
        ranks[0].touch(Kind.WRITE, 9, memory=1)
        mark = ranks[0].copy("compute")
        ranks[0].copy("copies out", out, written, after=(mark,) if follows else ())
        proof = proven(*ranks)
        assert proof.is_right is follows
        if not follows:
            assert "reads 40 bytes by the copy 4 on stream copies out in step 0 while the write on stream" in only(
                proof
            )


def test_memory_of_the_host_is_read_after_the_copy_that_fills_it() -> None:
    """What the host does with it comes before all that it asks for afterwards."""
    host = Span(memory=2, start=0, stop=40)
    for follows in (True, False):
        ranks = linked_and_connected()
        out = ranks[0].copy("copies out", Span(memory=2, start=0, stop=40, writes=True))
        if follows:
            ranks[0].wait(out, kind=Kind.KNOWN).touch(Kind.WRITE, out, memory=2, stream=HOST)
        ranks[0].copy("copies in", host)
        assert proven(*ranks).is_right is follows


def test_what_ranks_of_two_stages_do_may_be_of_other_steps_and_instructions() -> None:
    for place, is_right in (("1F0", True), ("0B0", False)):
        ranks = [Rank(0, pair()), Rank(1, pair())]
        for rank, at in zip(ranks, ("0F0", place), strict=True):
            rank.wait(rank.issue(all_reduce()))
            rank.events[0] = replace(rank.events[0], at=at)
        assert proven(*ranks).is_right is is_right


def test_a_message_is_received_as_the_one_that_was_sent() -> None:
    for place, is_right in (("1RECV_F0<0", True), ("1RECV_F1<0", False)):
        ranks = [Rank(0, pair()), Rank(1, pair())]
        for rank, operation, at in zip(ranks, (send(1), receive(0)), ("0SEND_F0>1", place), strict=True):
            rank.wait(rank.issue(operation))
            rank.events[0] = replace(rank.events[0], at=at)
        assert proven(*ranks).is_right is is_right


def test_other_bytes_of_the_same_memory_are_nobodys_matter() -> None:
    ranks = [Rank(0, pair()), Rank(1, pair())]
    for each in ranks:
        number = each.issue(all_reduce(spans=(Span(memory=1, start=40, stop=80, writes=True),)))
        each.touch(Kind.WRITE, number, memory=1, stop=40).wait(number)
    assert proven(*ranks).is_right


def test_a_run_that_stood_still_says_what_was_missing_and_where_the_other_ended() -> None:
    ranks = [Rank(0, pair()), Rank(1, pair())]
    ranks[0].wait(ranks[0].issue(all_reduce()))
    ranks[1].wait(ranks[1].issue(all_reduce()))
    ranks[0].wait(ranks[0].issue(all_reduce(count=3)))
    proof = prove([ranks[0].program("timed out"), ranks[1].program("timed out")])
    assert only(proof).endswith("it issues 1 collectives there, and ended in step 0 at 0F1: timed out")


def test_a_run_that_failed_without_a_mistake_in_what_it_asked_for_says_so() -> None:
    proof = prove([Rank(0, pair()).program("RuntimeError: no memory"), Rank(1, pair()).program()])
    assert only(proof) == "rank 0 did not come to its end, at once: RuntimeError: no memory"


def test_the_checker_needs_no_torch() -> None:
    code = "import sys, shardwise.nccl.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
