"""A probe of real ranks, and what is decided before anything is measured."""

import copy
import json
from collections.abc import Callable
from itertools import cycle, repeat
from pathlib import Path

import pytest
import torch

from shardwise.cli import main
from shardwise.cluster.curve import COLLECTIVES
from shardwise.cluster.file import to_toml
from shardwise.cluster.kernel import KINDS, Kernel
from shardwise.cluster.probe import Probe
from shardwise.cluster.probed import cluster_of
from shardwise.nets.loss import next_token_loss
from shardwise.nets.transformer import Transformer
from shardwise.probing import meetings, split_backwards, split_layers, whole_steps
from shardwise.probing.collectives import groupings_of
from shardwise.probing.links import rounds_of
from shardwise.probing.measure import SUBJECTS, probe_rank
from shardwise.probing.page import make_probe_page
from shardwise.probing.steady import goes_on, is_stable, settled
from shardwise.ranks.spawn import Ranks
from tests.probing.quick import quickly


def test_rounds_have_every_pair_once_and_no_host_twice() -> None:
    for hosts in (["a"] * 4, list("abcdef"), ["a", "a", "b", "b", "c", "c"]):
        rounds = rounds_of(hosts)
        pairs = [pair for each in rounds for pair in each]
        assert len(pairs) == len(set(pairs)) == len(hosts) * (len(hosts) - 1) // 2
        for each in rounds:
            used = [host for pair in each for host in {hosts[number] for number in pair}]
            assert len(used) == len(set(used))
    assert len(rounds_of(list("abcdefgh"))) <= 9


def test_of_many_devices_hosts_are_joined_by_their_first() -> None:
    hosts = [f"host{number // 8}" for number in range(128)]
    pairs = {pair for each in rounds_of(hosts) for pair in each}
    assert len(pairs) == 16 * 28 + 16 * 15 // 2


def test_groups_are_those_that_plans_use() -> None:
    found = groupings_of([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert [(each.scope, each.size) for each in found] == [("inside", 2), ("inside", 4), ("across", 8), ("rails", 2)]
    assert found[-1].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [(each.scope, each.size) for each in groupings_of([[0, 1, 2]])] == [("inside", 2), ("inside", 3)]
    assert [(each.scope, each.size) for each in groupings_of([[0], [1]])] == [("rails", 2)]


def test_it_stops_when_the_lowest_three_agree_and_late_ones_do_not_count() -> None:
    assert is_stable([1.0, 9.0, 1.005, 5.0, 1.009])
    assert not is_stable([1.0, 1.005])
    assert not is_stable([1.0, 1.1, 1.2])
    assert settled([1.0, 9.0, 1.005, 5.0, 1.009]).seconds == 1.005
    assert goes_on([1.0, 2.0], 0.0, 0.0)  # There are at least three, whatever the time.
    assert not goes_on([1.0, 2.0, 3.0], 0.0, 0.0)


def quick_probe() -> Probe | None:
    """All of a probe, with less time for each number."""
    with quickly():
        return probe_rank(SUBJECTS)


def test_two_processes_are_measured_into_a_cluster_that_fit_takes(
    two: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found, other = two.run(quick_probe)
    assert other is None
    assert [each.device for each in found.devices] == ["cpu:0", "cpu:1"]
    assert found.pairs is not None
    assert min(found.pairs.bytes_per_second[0][1], found.pairs.bytes_per_second[1][0]) > 1e6
    assert [curve.collective for curve in found.curves] == list(COLLECTIVES)
    assert all(rate > 0 for curve in found.curves for rate in curve.bus_rates())
    assert {each.kind for each in found.devices[0].kernels} == set(KINDS)
    assert all(min(each.forward, each.backward) > 0 for each in found.devices[0].kernels)
    assert make_probe_page(found).count("<rect") == 4
    monkeypatch.chdir(tmp_path)
    Path("here.toml").write_text(to_toml(cluster_of(found)))
    words = ["--cluster", "here.toml", "--plan", "dp=2", "--batch", "2", "--sequence", "64", "--json"]
    assert main(["fit", "gpt2", *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["seconds"] > 0
    assert "measured" in told["assumes"]


@pytest.mark.parametrize(("late", "lost"), [(0.0, 0.15), (-1.0, 0.0), (9.0, 1.0)])
def test_what_ranks_lose_where_they_meet_is_neither_their_work_nor_the_message(
    monkeypatch: pytest.MonkeyPatch, late: float, lost: float
) -> None:
    """A piece takes 1 s, now and then 2; with a meeting 1.5 s; a message alone 0.1 s."""
    calls = {"compute": cycle([1.0, 1.0, 2.0, 1.0]), "compute_and_meet": repeat(1.5 + late)}
    monkeypatch.setattr(meetings, "_seconds", lambda run: next(calls.get(getattr(run, "__name__", ""), repeat(0.1))))
    monkeypatch.setattr(meetings, "_MOST_SECONDS", 1.0)
    assert meetings.measure_meetings(whole_steps.Crowd()) == pytest.approx(lost)


@pytest.mark.parametrize(("other_seconds", "num_added"), [(0.001, 2 + 2 * 16), (5.0, 2)])
def test_ranks_meet_to_add_a_megabyte_unless_that_takes_one_of_them_long(
    monkeypatch: pytest.MonkeyPatch, other_seconds: float, num_added: int
) -> None:
    """One message connects the ranks and one is timed; then 16 pieces end with one, and 16 have nothing else."""
    monkeypatch.setattr(meetings, "_TURNS", 1)
    monkeypatch.setattr(meetings, "_ROWS", 8)
    added: list[int] = []
    there = whole_steps.Passed(other_seconds, 0.0)
    crowd = whole_steps.Crowd(
        gather=lambda mine: [[whole_steps.Passed(0.001, 0.0) for _ in mine], [there]],
        add=lambda tensor: added.append(tensor.numel()),
    )
    meetings.measure_meetings(crowd)
    assert added == [8 * 256] * num_added


_KERNELS = [Kernel(kind=kind, forward=1e9, backward=5e8, forward_call=1e-5, backward_call=2e-5) for kind in KINDS]


@pytest.mark.parametrize(("times", "call", "back"), [(1.1, 3e-4, 0.0), (1.6, 0.0, 0.0), (1.0, 1e-3, -1e-5)])
def test_in_a_model_kernels_take_longer_by_a_share_and_by_a_time_for_every_call(
    times: float, call: float, back: float
) -> None:
    """Python around kernels is mostly in the forward. A backward's calls may be shorter than those of its kernels."""
    sizes = (whole_steps.LITTLE, *whole_steps.MUCH)
    priced = {size: whole_steps.pass_seconds(size, _KERNELS) for size in sizes}
    num_calls = sum(1 for _ in whole_steps._operations(sizes[0])) + 2 * 4 + 1 * 4  # Queries, keys, values; gate, up.
    taken = {
        size: whole_steps.Passed(times * each.forward + num_calls * call, times * each.backward + num_calls * back)
        for size, each in priced.items()
    }
    longer = whole_steps.compare(taken, _KERNELS)
    assert longer.times == pytest.approx(times)
    assert longer.forward_call == pytest.approx(call)
    assert longer.backward_call == pytest.approx(back, abs=1e-9)
    in_a_model = [longer.of(each) for each in _KERNELS]
    for size, seconds in taken.items():
        assert whole_steps.pass_seconds(size, in_a_model) == pytest.approx(seconds)


@pytest.mark.parametrize(("times", "bound"), [(0.5, 1.0), (9.0, 2.0)])
def test_how_much_longer_has_bounds(times: float, bound: float) -> None:
    """Beyond them, another process used the machine."""
    sizes = (whole_steps.LITTLE, *whole_steps.MUCH)
    taken = {
        size: whole_steps.Passed(*(times * each for each in whole_steps.pass_seconds(size, _KERNELS))) for size in sizes
    }
    assert whole_steps.compare(taken, _KERNELS).times == bound


def test_a_pass_is_as_long_as_that_of_its_slower_rank() -> None:
    """Of two ranks another one is late in every pass."""
    late, soon = whole_steps.Passed(2.0, 3.0), whole_steps.Passed(1.0, 3.0)
    found = whole_steps._of_slowest([[late, soon] * 4, [soon, late] * 4])
    assert found == pytest.approx(late)


def test_a_backward_in_two_halves_gives_the_gradients_of_a_whole_one() -> None:
    """Of the same forward: what is timed is what zero-bubble schedules compute."""
    model, tokens = whole_steps.small_model(16, 2)
    found = []
    for run in (split_backwards._run_whole, split_backwards._run_halves):
        hidden, output = split_backwards._forward(model, tokens)
        run(hidden, output, torch.ones_like(output))
        given = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        found.append([hidden.grad, *given.values()])
        model.zero_grad()
    assert len(found[0]) == len(found[1]) > 20
    for whole, halves in zip(*found, strict=True):
        torch.testing.assert_close(halves, whole)


def test_layers_cut_alone_compute_what_plain_ones_do() -> None:
    """What is timed is what tensor parallelism computes: loss and gradients are those of the same weights."""
    settings = split_layers._half_of(whole_steps.settings_of(16))
    plain = Transformer(settings)
    cut = split_layers.cut_alone(copy.deepcopy(plain))
    tokens = torch.randint(settings.vocabulary, (2, settings.length))
    found = []
    for model in (plain, cut):
        total, labels = next_token_loss(model(tokens), {"labels": tokens})
        torch.autograd.backward(total / labels)
        found.append([total, *(each.grad for each in model.parameters())])
    kinds = [type(each).__name__ for each in cut.modules()]
    assert (kinds.count("ColumnParallelLinear"), kinds.count("RowParallelLinear")) == (4 * 5, 4 * 2)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_cut_layer_takes_longer_by_the_difference_of_whole_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 layers with 4 calls each, a head, an embedding and a loss: 19 calls. Noise: never quicker."""
    seconds = {False: whole_steps.Passed(1.0, 2.0), True: whole_steps.Passed(1.19, 1.9)}
    monkeypatch.setattr(
        split_layers, "timed_pass", lambda model, _: seconds[type(model.head).__name__ == "VocabularyHead"]
    )
    found = split_layers.measure_split_layers(lambda: None)
    assert found.forward_call == pytest.approx(0.01)
    assert found.backward_call == 0.0


@pytest.mark.parametrize(
    ("fraction", "calls", "expected"),
    [
        (0.1, 0.5, (0.1, 0.5)),
        (0.2, 0.0, (0.2, 0.0)),
        (0.0, 0.5, (0.0, 0.5)),
        (-0.1, 0.0, (0.0, 0.0)),  # Noise: halves are never quicker.
        (0.1, -0.1, (0.05, 0.0)),  # Noise: calls take no negative time.
        (5.0, 0.0, (1.0, 0.0)),
    ],
)
def test_what_two_halves_take_more_is_a_fraction_and_a_time_for_every_call(
    monkeypatch: pytest.MonkeyPatch, fraction: float, calls: float, expected: tuple[float, float]
) -> None:
    """A backward of a row takes 1 s here; `calls` are the seconds of all calls that have weights."""
    clock = [0.0]

    def takes(seconds: Callable[[int], float]) -> Callable[..., None]:
        return lambda _, output, __: clock.__setitem__(0, clock[0] + seconds(len(output)))

    monkeypatch.setattr(split_backwards, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(split_backwards, "_run_whole", takes(float))
    monkeypatch.setattr(split_backwards, "_run_halves", takes(lambda rows: rows * (1 + fraction) + calls))
    found = split_backwards.measure_split(lambda: None)
    num_cuts = 2 * 9 + 2  # Seven matmuls and two norms of a layer; the last norm and the head.
    assert (found.fraction, found.call_seconds * num_cuts) == pytest.approx(expected)


def test_a_whole_model_is_priced_by_what_it_computes() -> None:
    """4 layers of width 128 and 256 over 1,024 tokens: 6 FLOPs for each weight of a layer's matrices and of the head,
    and attention beside them."""
    free = Kernel(kind="elementwise", forward=1e30, backward=1e30)
    for width in (128, 256):
        size = whole_steps.Size(width, 8)
        found = whole_steps.pass_seconds(size, [free, Kernel(kind="matmul", forward=1.0, backward=1.0)])
        weights = 4 * (4 * width**2 + 3 * width * (width * 8 // 3)) + 256 * width
        assert found == pytest.approx((2 * weights * 1024, 4 * weights * 1024))
