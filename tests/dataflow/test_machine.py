"""Data and tasks: what is copied and what is not, who waits for whom, and what a user gets back."""

import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shardwise.dataflow.links import Link
from shardwise.dataflow.machine import Machine
from shardwise.dataflow.streams import Event
from shardwise.errors import ShardwiseError
from tests.dataflow.machines import Shuffle

TWO = ["cpu:0", "cpu:1"]


def add_one(x: Tensor) -> None:
    x += 1


def look(tensor: Tensor, seen: list[object]) -> None:
    seen.append(tensor.tolist())


def test_a_value_is_copied_once_for_each_place_and_version() -> None:
    with Machine(TWO) as machine:
        x, y = machine.data(torch.ones(10)), machine.empty((10,))
        for _ in range(3):
            machine.submit(torch.neg, x, into=y, place="cpu:1")
        assert machine.mover.num_transfers == 1
        machine.submit(add_one, x, reads=[x], writes=[x], place="cpu:0")
        machine.submit(torch.neg, x, into=y, place="cpu:1")
        machine.submit(torch.neg, x, into=y, place="cpu:1")
        assert machine.mover.num_transfers == 3  # To cpu:0 to be changed there, and its new version to cpu:1.
        assert y.get().tolist() == [-2.0] * 10


def test_what_is_overwritten_is_not_brought_first() -> None:
    with Machine(TWO) as machine:
        x = machine.data(torch.zeros(10))
        machine.submit(Tensor.fill_, x, 5.0, writes=[x], place="cpu:0")
        assert machine.mover.moved_bytes == {}
        assert x.get().tolist() == [5.0] * 10


def test_the_state_of_each_copy_is_known() -> None:
    with Machine(TWO) as machine:
        x = machine.data(torch.ones(4), name="x")
        assert x.state("host") == "dirty"
        machine.prefetch(x, "cpu:0")
        assert (x.state("host"), x.state("cpu:0"), x.state("cpu:1")) == ("valid", "valid", "absent")
        machine.submit(add_one, x, reads=[x], writes=[x], place="cpu:0")
        assert (x.state("host"), x.state("cpu:0")) == ("invalid", "dirty")
        assert x.places == ("cpu:0",)
        assert "x" in repr(x)


def test_a_users_tensor_holds_the_value_when_the_machine_is_closed() -> None:
    given = torch.zeros(4)
    with Machine(TWO) as machine:
        machine.submit(add_one, machine.data(given), reads=[machine.data(given)], writes=[machine.data(given)])
    assert given.tolist() == [1.0] * 4


def test_get_returns_the_tensor_that_was_given() -> None:
    given = torch.zeros(4)
    with Machine(TWO) as machine:
        x = machine.data(given)
        machine.submit(add_one, x, reads=[x], writes=[x], place="cpu:1")
        assert x.get() is given
        assert given.tolist() == [1.0] * 4


def test_a_new_value_is_seen_by_later_tasks_and_not_by_earlier_ones() -> None:
    for seed in range(10):
        with Machine(TWO, make_stream=Shuffle(seed).make()) as machine:
            x, before, after = machine.empty((3,)), machine.empty((3,)), machine.empty((3,))
            x.set(torch.ones(3))
            machine.submit(torch.neg, x, into=before, place="cpu:0")
            x.set(torch.full((3,), 7.0))
            machine.submit(torch.neg, x, into=after, place="cpu:1")
            assert (before.get()[0].item(), after.get()[0].item()) == (-1.0, -7.0)


def test_a_reader_elsewhere_does_not_hold_up_a_writer() -> None:
    """The reader has a copy of its own: both run at the same time."""
    with Machine(TWO, links=Link(bytes_per_second=40.0)) as machine:
        x, y = machine.data(torch.ones(10)), machine.empty((10,))
        machine.prefetch(x, "cpu:0")
        machine.submit(torch.neg, x, into=y, place="cpu:1", seconds=5.0, name="reader")
        machine.submit(add_one, x, reads=[x], writes=[x], place="cpu:0", seconds=5.0, name="writer")
        report = machine.report()
    starts = {event.name: event.start for event in report.trace.events}
    assert starts["reader"] == starts["writer"] == 1.0
    assert report.makespan_seconds == 6.0


def test_a_prefetch_hides_a_transfer_behind_a_task() -> None:
    for ahead, seconds in ((True, 2.0), (False, 2.0)):
        with Machine(["cpu:0"], links=Link(bytes_per_second=40.0)) as machine:
            x, y, z = machine.data(torch.ones(10)), machine.empty((10,)), machine.empty((10,))
            if ahead:
                machine.prefetch(x, "cpu:0")
            machine.submit(torch.zeros, 10, into=y, place="cpu:0", seconds=1.0)
            machine.submit(torch.add, x, y, into=z, place="cpu:0", seconds=1.0)
            # Submitting does not wait, so even without a prefetch the transfer starts at once.
            assert machine.report().makespan_seconds == seconds


def test_chunks_on_two_links_follow_each_other() -> None:
    """Ten chunks over two links: the second link ends one chunk after the first, not ten."""
    with Machine(["cpu:0"], links=Link(bytes_per_second=40.0), chunk_bytes=40) as machine:
        x = machine.data(torch.ones(100))
        machine.prefetch(x, "disk")
        machine.mover.drop(x.copies[machine.host.index])  # type: ignore[arg-type]
        machine.wait()
        start = machine.report().makespan_seconds
        machine.prefetch(x, "cpu:0")
        assert machine.report().makespan_seconds - start == pytest.approx(10 + 1)


def test_the_latency_of_a_link_is_paid_once_for_all_chunks() -> None:
    link = Link(latency_seconds=3.0, bytes_per_second=40.0)
    with Machine(["cpu:0"], links=link, chunk_bytes=40) as machine:
        machine.prefetch(machine.data(torch.ones(100)), "cpu:0")
        assert machine.report().makespan_seconds == pytest.approx(13.0)


def test_the_nearest_copy_is_taken() -> None:
    slow, fast = Link(bytes_per_second=1.0), Link(bytes_per_second=100.0)
    links = {("host", "cpu:0"): fast, ("cpu:0", "cpu:1"): fast, ("host", "cpu:1"): slow, ("host", "disk"): slow}
    with Machine(TWO, links=links) as machine:
        x = machine.data(torch.ones(10))
        machine.prefetch(x, "cpu:0")
        machine.prefetch(x, "cpu:1")
        assert machine.mover.moved_bytes == {(2, 0): 40, (0, 1): 40}


def test_a_task_without_a_place_goes_where_it_is_over_first() -> None:
    with Machine(TWO, links=Link(bytes_per_second=40.0)) as machine:
        x, y = machine.data(torch.ones(10)), [machine.empty((10,)) for _ in range(4)]
        machine.prefetch(x, "cpu:1")
        for made in y:
            machine.submit(torch.neg, x, into=made, seconds=1.5)
        # First where x is on its way to already. It can come to the other place as well while that one is busy.
        assert [made.places for made in y] == [("cpu:1",), ("cpu:0",), ("cpu:0",), ("cpu:1",)]


def test_without_given_links_they_are_measured() -> None:
    with Machine(TWO) as machine:
        x, y = machine.data(torch.ones(10)), machine.empty((10,))
        for _ in range(4):
            machine.submit(torch.neg, x, into=y)
        assert y.get().tolist() == [-1.0] * 10
        found = machine.measure()
        assert found["cpu:0", "cpu:1"].bytes_per_second > 0
        assert all("disk" not in pair for pair in found)


def test_a_small_copy_that_was_interrupted_makes_no_link_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.dataflow import choice

    monkeypatch.setattr(choice, "_copy_seconds", lambda *given: 1e-3 if given[-1] < 2**20 else 5e-4)
    with Machine(TWO) as machine:
        found = machine.measure()
    assert {each.bytes_per_second for each in found.values()} == {8 * 2**20 / 5e-4}


def test_a_module_runs_with_its_weights_wherever_it_is_told_to() -> None:
    torch.manual_seed(0)
    module, given = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), torch.randn(8, 4)
    module.eval()
    with torch.no_grad():
        expected = module(given)
    with Machine(TWO) as machine:
        x, one, two = machine.data(given), machine.empty((8, 4)), machine.empty((8, 4))
        machine.submit(module, x, into=one, place="cpu:0")
        machine.submit(module, x, into=two, place="cpu:1")
        assert torch.equal(one.get(), expected)
        assert torch.equal(two.get(), expected)


def test_a_host_function_runs_on_the_host() -> None:
    seen = []
    with Machine(TWO) as machine:
        x = machine.empty((3,))
        machine.submit(torch.ones, 3, into=x, place="cpu:0")
        machine.submit(lambda value: seen.append(value.tolist()), x, reads=[x], place="host")
        machine.wait()
    assert seen == [[1.0, 1.0, 1.0]]


def test_a_function_made_for_one_task_is_not_kept() -> None:
    class Held:
        """Something that a function holds."""

    with Machine(["cpu:0"]) as machine:
        held = Held()
        machine.submit(partial(id, held), place="cpu:0")
        machine.wait()
        left = weakref.ref(held)
        del held
        assert left() is None


def test_strides_and_types_are_kept_at_every_place() -> None:
    given = torch.arange(6).reshape(2, 3).t()
    seen = []
    with Machine(TWO) as machine:
        x = machine.data(given)
        machine.submit(lambda value: seen.append((value.stride(), value.tolist())), x, reads=[x], place="cpu:1")
        for dtype in (torch.bool, torch.bfloat16, torch.complex64):
            value = machine.empty((), dtype)
            machine.submit(torch.ones, (), dtype=dtype, into=value, place="cpu:0")
            assert value.get() == torch.ones((), dtype=dtype)
        nothing = machine.data(torch.empty(0))
        machine.prefetch(nothing, "cpu:0")
        assert nothing.get().shape == (0,)
    assert seen == [(given.stride(), given.tolist())]


def test_forgotten_data_give_their_memory_back() -> None:
    with Machine(["cpu:0"]) as machine:
        for _ in range(5):
            x = machine.empty((100,))
            machine.submit(torch.ones, 100, into=x, place="cpu:0")
            machine.wait()
            del x
        kept = machine.empty((100,))
        machine.submit(torch.ones, 100, into=kept, place="cpu:0")
        assert machine.places[0].memory.used_bytes == 400


def test_plain_tensors_are_streamed_through_two_buffers_that_take_turns() -> None:
    """The recipe of docs/dataflow.md, on a CPU place: every layer sees its own weights."""
    for seed in range(10):
        with Machine(["cpu:0"], make_stream=Shuffle(seed).make()) as machine:
            weights = [torch.full((4,), float(number)) for number in range(6)]
            buffers: list[Tensor] = [torch.zeros(4), torch.zeros(4)]
            seen: list[object] = []
            used: list[Event | None] = [None, None]
            for number, weight in enumerate(weights):
                buffer = buffers[number % 2]
                last = used[number % 2]
                after = [] if last is None else [last]
                machine.follow("cpu:0", machine.copy(buffer, weight, to="cpu:0", after=after))
                machine.submit(partial(look, buffer, seen), place="cpu:0")
                used[number % 2] = machine.mark("cpu:0")
            machine.wait()
        assert seen == [weight.tolist() for weight in weights]


def test_pinned_tensors_are_of_the_shape_asked_for() -> None:
    with Machine(["cpu:0"]) as machine:
        assert machine.pinned((2, 3), torch.int64).shape == (2, 3)


def test_a_file_is_read_through_the_host_and_never_written(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(torch.arange(8.0).numpy().tobytes())
    mapped = torch.from_file(str(path), size=8)
    with Machine(["cpu:0"]) as machine:
        weight, y = machine.data(mapped, name="weight", on_disk=True), machine.empty((8,))
        machine.submit(torch.neg, weight, into=y, place="cpu:0")
        assert y.get().tolist() == [-float(number) for number in range(8)]
        assert weight.places == ("cpu:0", "host", "disk")
        with pytest.raises(ShardwiseError, match="neg_ writes weight, which is a file that is only read"):
            machine.submit(Tensor.neg_, weight, reads=[weight], writes=[weight])


def test_a_machine_spills_to_the_folder_it_is_given(tmp_path: Path) -> None:
    with Machine(["cpu:0"], budget={"cpu:0": 80, "host": 80}, disk=tmp_path) as machine:
        values = [machine.empty((10,)) for _ in range(8)]
        for number, value in enumerate(values):
            machine.submit(torch.full, (10,), float(number), into=value, place="cpu:0")
        assert sorted(value.places for value in values).count(("disk",)) == 4
        assert [value.get()[0].item() for value in values] == list(range(8))
    assert list(tmp_path.iterdir()) == []
