"""Where units go: by room and speed; and what is said when there is no room, or no such device."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.placing.layout import NoRoomError, lay_out
from shardwise.placing.loads import Load, loads_of, loads_without_example, total_bytes
from shardwise.placing.places import Place, find_places
from shardwise.stages.split.choose import SplitOptions, choose
from tests.stages.families import make_family
from tests.stages.pieces import Net
from tests.stages.small import small_matrices


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def a_place(name: str, room: int = 1000, speed: float = 1.0) -> Place:
    return Place(name=name, device=torch.device("cpu"), room_bytes=room, speed=speed)


def units(*costs: float, size: int = 10, kept: int = 0) -> list[Load]:
    return [
        Load(unit=str(number), cost=cost, states={str(number): size}, kept_bytes=kept)
        for number, cost in enumerate(costs)
    ]


def sizes(stages: list[range]) -> list[int]:
    return [len(stage) for stage in stages]


def test_units_are_shared_out_by_speed() -> None:
    places = [a_place("a", speed=3.0), a_place("b")]
    assert sizes(lay_out(units(*[1.0] * 8), places, [0, 1], num_in_flight=1)) == [6, 2]


def test_and_by_room_where_that_is_less() -> None:
    places = [a_place("a", room=35, speed=3.0), a_place("b")]
    assert sizes(lay_out(units(*[1.0] * 8), places, [0, 1], num_in_flight=1)) == [3, 5]


def test_activations_of_every_microbatch_take_room() -> None:
    places = [a_place("a", room=75, speed=3.0), a_place("b")]
    loads = units(*[1.0] * 8, kept=5)
    assert sizes(lay_out(loads, places, [0, 1], num_in_flight=1)) == [5, 3]
    assert sizes(lay_out(loads, places, [0, 1], num_in_flight=3)) == [3, 5]


def test_stages_of_one_place_share_its_room() -> None:
    places, ranks = [a_place("a", room=40), a_place("b", room=40)], [0, 1, 0, 1]
    assert sizes(lay_out(units(*[1.0] * 8), places, ranks, num_in_flight=1)) == [2, 2, 2, 2]
    with pytest.raises(NoRoomError):
        lay_out(units(*[1.0] * 9), places, ranks, num_in_flight=1)


def test_a_shared_weight_counts_once_on_a_place() -> None:
    loads = [Load(unit=name, cost=1.0, states={"shared": 10, name: 1}, kept_bytes=0) for name in "ab"]
    assert total_bytes(loads, 1) == 12


def test_units_that_belong_together_are_not_cut_apart() -> None:
    places = [a_place("a"), a_place("b")]
    assert sizes(lay_out(units(1, 1, 1, 1), places, [0, 1], num_in_flight=1, inseparable=[(0, 2)])) == [3, 1]


def test_no_room_anywhere_says_what_is_needed_and_what_there_is() -> None:
    places = [a_place("cpu:0", room=20), a_place("cpu:1", room=2048)]
    with pytest.raises(ShardwiseError) as caught:
        lay_out(units(1, 1, size=3000), places, [0, 1], num_in_flight=4)
    assert caught.value.problem == (
        "no room: the module needs 5.9 KiB (0 B of it activations of 4 microbatches; the largest unit, 0, needs"
        " 2.9 KiB); cpu:0 has room for 20 B, cpu:1 has room for 2.0 KiB"
    )


def test_training_counts_gradients_and_what_the_optimizer_keeps() -> None:
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert [total_bytes([each], 1) for each in loads_without_example(module, moments=2)] == [256, 256]
    module[0].requires_grad_(False)
    assert [total_bytes([each], 1) for each in loads_without_example(module, moments=1)] == [64, 192]
    module.eval()
    assert [total_bytes([each], 1) for each in loads_without_example(module, moments=2)] == [64, 64]


def test_activations_are_those_that_autograd_keeps() -> None:
    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 2, bias=False))
    example = {"input": torch.randn(3, 4)}
    options = SplitOptions(num_stages=1, cut=None, costs=None, speeds=None, limit_bytes=None)
    found, flow, _ = choose(module, example, options)
    loads = loads_of(module, found, flow, example, moments=2)
    # The first keeps its input, and its tanh (glue behind it) what it returned; that is the input of the second.
    assert [each.kept_bytes for each in loads] == [3 * 4 * 4 + 3 * 8 * 4, 0]


def test_a_budget_moves_the_cut() -> None:
    ids = torch.randint(0, 11, (8, 5))
    whole = sw.place(Net(num_blocks=8), ["cpu:0", "cpu:1"], microbatches=4, example={"ids": ids})
    less = sw.place(
        Net(num_blocks=8), ["cpu:0", "cpu:1"], microbatches=4, example={"ids": ids}, budget={"cpu:0": "9 KiB"}
    )
    on_first = [sum(place.name == "cpu:0" for place in each.where.values()) for each in (whole, less)]
    assert on_first[1] < on_first[0]
    assert less(ids).shape == (8, 5, 11)


def test_a_budget_that_is_too_small_is_refused_at_once() -> None:
    with pytest.raises(
        ShardwiseError, match=r"no room: the module needs .* cpu:0 has room for 1.0 KiB, cpu:1 has room"
    ):
        sw.place(make_family("gpt2"), ["cpu:0", "cpu:1"], budget={"cpu:0": "1 KiB", "cpu:1": 4096})


def test_a_budget_too_small_for_activations_is_refused_with_their_size() -> None:
    ids = torch.randint(0, 11, (64, 50))
    with pytest.raises(ShardwiseError, match="MiB of it activations of 4 microbatches"):
        sw.place(
            Net(num_blocks=4),
            ["cpu:0", "cpu:1"],
            microbatches=4,
            example={"ids": ids},
            budget={"cpu:0": "20 KiB", "cpu:1": "20 KiB"},
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ShardwiseError) as caught:
        sw.place(nn.Linear(2, 2), ["cuda:0", "cpu"])
    assert caught.value.problem == "there is no cuda:0: this machine has 0 GPUs"
    assert caught.value.remedy == "devices=['cpu:0', 'cpu:1']"


def test_devices_that_are_no_devices() -> None:
    for devices, problem in (
        (["cpu:0", "gpu:1"], "unknown device 'gpu:1'; known: cpu, cpu:0, cpu:1"),
        (["cpu:0", "cpu:0"], "cpu:0 is named 2 times; a device is one place"),
        ([], "no device is named"),
    ):
        with pytest.raises(ShardwiseError) as caught:
            find_places(devices)
        assert caught.value.problem.startswith(problem)


def test_budgets_and_speeds_are_of_places_that_are_named() -> None:
    with pytest.raises(ShardwiseError, match="unknown device in budget 'cpu:2'; known: cpu:0, cpu:1"):
        find_places(["cpu:0", "cpu:1"], budget={"cpu:2": "1 GiB"})
    with pytest.raises(ShardwiseError, match="the speed of cpu:1 is 0, and must be over 0"):
        find_places(["cpu:0", "cpu:1"], speeds={"cpu:1": 0})
    first, second = find_places(["cpu:0", "cpu:1"], budget={"cpu:0": "2 MiB"}, speeds={"cpu:1": 0.5})
    assert (first.room_bytes, first.speed, second.speed) == (2 * 2**20, 1.0, 0.5)
    assert second.room_bytes > 2 * 2**20


def test_what_cannot_be_placed_is_said() -> None:
    with pytest.raises(ShardwiseError, match="microbatches=0"):
        sw.place(nn.Linear(2, 2), ["cpu"], microbatches=0)
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(ShardwiseError, match="Linear is on the meta device"):
        sw.place(module, ["cpu"])
    with pytest.raises(ShardwiseError, match="chimera holds the weights twice"):
        sw.place(Net(num_blocks=4), ["cpu:0", "cpu:1"], microbatches=4, schedule="chimera")(torch.ones(4, 5).long())
