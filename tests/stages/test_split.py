"""What a splitter must keep: ties, glue, writing in place, decisions, dropout, state, and the user's own cut."""

import copy
import pickle
import time
from collections.abc import Callable, Sequence
from ctypes import c_long
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ShardwiseError
from shardwise.execution.pipeline import step_seconds
from shardwise.schedule.catalogue import make_schedule
from shardwise.stages.split import split, stage_costs
from shardwise.stages.split.choose import SplitOptions, choose, costs_of
from shardwise.stages.split.stopwatch import Stopwatch
from tests.engine.by_hand import assert_same, assert_split_is_the_module, gradients_of, run_stages, stages_of, weigh
from tests.stages import odd_nets
from tests.stages.families import make_batch, make_family, recompute
from tests.stages.nets import ResNet50
from tests.stages.odd_nets import Block, Chain, rows


@pytest.fixture(autouse=True)
def quiet_and_seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def test_every_unit_is_in_one_stage_and_every_parameter_in_at_least_one() -> None:
    module = make_family("llama")
    stages = split(module, 3, make_batch("llama"))
    units = [unit for stage in stages.units for unit in stage]
    assert units == ["model.embed_tokens", *(f"model.layers.{layer}" for layer in range(4)), "model.norm", "lm_head"]
    held = {name: each for stage in stages_of(stages) for name, each in stage.parameters.items()}
    assert held.keys() == dict(module.named_parameters()).keys()
    assert all(held[name] is each for name, each in module.named_parameters())


def test_a_tied_weight_is_one_parameter_under_its_first_name_in_both_stages() -> None:
    stages = split(make_family("gpt2"), 3, make_batch("gpt2"))
    assert stages.ties == {"transformer.wte.weight": (0, 2)}
    first, _, last = stages_of(stages)
    assert first.parameters["transformer.wte.weight"] is last.parameters["transformer.wte.weight"]


def test_a_value_goes_straight_from_the_block_that_made_it_to_those_that_read_it() -> None:
    # T5's first block makes the position bias, and each block after it passes it on untouched.
    stages = split(make_family("t5"), 4, make_batch("t5"))
    assert "encoder.block.0:1" in stages.between(0, 1)
    assert all(not name.startswith("encoder.block.1:1") for name in stages.makers)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("net", "num_rows"),
    [("InPlace", 3), ("Shared", 2), ("Decides", 3), ("Chain", 5)],
)
def test_odd_modules_split(net: str, num_rows: int, num_stages: int) -> None:
    module = getattr(odd_nets, net)()
    stages = split(module, num_stages, {"x": rows(num_rows)})
    assert_split_is_the_module(module, stages, {"x": rows(num_rows, seed=2)})
    assert_split_is_the_module(module, stages, {"x": rows(num_rows + 4, seed=3)})


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_weights_that_glue_uses_live_where_they_are_used(num_stages: int) -> None:
    module = odd_nets.WeightsInGlue()
    stages = split(module, num_stages, {"ids": torch.randint(11, (2, 5))})
    assert_split_is_the_module(module, stages, {"ids": torch.randint(11, (2, 5))})
    assert_split_is_the_module(module, stages, {"ids": torch.randint(11, (3, 7))})
    assert stages.ties["embed.weight"] == (0, num_stages - 1)
    assert [number for number, stage in enumerate(stages_of(stages)) if "places" in stage.parameters] in ([0], [1])


def test_a_unit_that_begins_in_place_may_be_the_first_of_a_stage() -> None:
    module = nn.Sequential(nn.Linear(8, 8), odd_nets.OverwritesItsArgument(), odd_nets.OverwritesItsArgument())
    stages = split(module, 3, {"input": rows()})
    assert_split_is_the_module(module, stages, {"input": rows(5)})


def test_what_a_unit_returns_may_be_nested_and_outlive_it() -> None:
    module = odd_nets.Recurrent()
    stages = split(module, 3, {"x": rows()})
    assert stages.reads[2] == ("recurrent:0", "recurrent:2")
    assert_split_is_the_module(module, stages, {"x": rows()})
    assert_split_is_the_module(module, stages, {"x": rows(5)})


def test_a_block_called_three_times_is_three_calls_and_its_weights_are_tied() -> None:
    stages = split(odd_nets.Shared(), 4, {"x": rows()})
    assert stages.units == (("block",), ("other",), ("block#1",), ("block#2",))
    assert stages.ties["block.up.weight"] == (0, 2, 3)


@pytest.mark.parametrize("mask", [None, torch.arange(8) > 5])
def test_several_inputs_outputs_and_things_that_are_no_tensors_go_through(mask: Any) -> None:
    module = odd_nets.Manners()
    batch = {"x": rows(), "y": rows(seed=5), "scale": 0.7, "mask": mask, "unasked": object()}
    stages = split(module, 3, batch)
    torch.manual_seed(0)
    expected = module(batch["x"], batch["y"], mask, scale=0.7)
    output, _ = run_stages(stages, batch)
    assert output["tag"] == expected["tag"] == "!!!!"
    assert torch.equal(output["x"], expected["x"])
    assert torch.equal(output["sum"], expected["sum"])


@pytest.mark.parametrize("num_stages", [2, 4])
def test_dropout_is_drawn_once_inside_units_and_between_them(num_stages: int) -> None:
    class Wet(Chain):
        def __init__(self) -> None:
            super().__init__(dropout=0.4)
            self.between = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            dropped = self.between(self.blocks[0](x))
            return super().forward(dropped) + dropped  # type: ignore[no-any-return]

    module = Wet().train()
    stages = split(module, num_stages, {"x": rows()})
    torch.manual_seed(7)
    weigh(module(rows())).backward()  # type: ignore[no-untyped-call]
    expected = gradients_of(module)
    torch.manual_seed(7)
    run_stages(stages, {"x": rows()})
    assert_same(gradients_of(module), expected)


def test_splitting_leaves_random_state_statistics_and_mode_as_they_were() -> None:
    module = ResNet50(width=2, num_classes=3)
    module.layer1.eval()
    before = {name: each.clone() for name, each in module.state_dict().items()}
    modes = [each.training for each in module.modules()]
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    split(module, 2, {"image": torch.zeros(2, 3, 32, 32)})
    assert torch.equal(torch.rand(()), expected)
    assert all(torch.equal(each, before[name]) for name, each in module.state_dict().items())
    assert [each.training for each in module.modules()] == modes


def test_a_split_module_is_still_the_module_and_its_copies_are_free_of_the_split() -> None:
    module = Chain()
    expected = module(rows())
    split(module, 2, {"x": rows()})
    split(module, 4, {"x": rows()})
    recurrent = odd_nets.Recurrent()
    split(recurrent, 2, {"x": rows()})
    pickle.loads(pickle.dumps(recurrent))
    twin = copy.deepcopy(nn.ModuleList([module, recurrent]))
    assert torch.equal(module(rows()), expected)
    assert torch.equal(pickle.loads(pickle.dumps(module))(rows()), expected)
    assert all(each._compiled_call_impl is None for each in twin.modules())


def test_two_splits_of_one_module_work_side_by_side() -> None:
    module = Chain()
    two, four = split(module, 2, {"x": rows()}), split(module, 4, {"x": rows()})
    for stages in (two, four, two):
        assert_split_is_the_module(module, stages, {"x": rows()})


def test_units_can_be_wrapped_for_recomputation() -> None:
    module, calls = Chain(), []
    stages = split(module, 2, {"x": rows()})

    def around(unit: str, call: Any) -> Any:
        def recomputed(*args: Any, **kwargs: Any) -> Any:
            calls.append(unit)
            return checkpoint(call, *args, use_reentrant=False, **kwargs)

        return recomputed

    for stage in stages_of(stages):
        stage.wrap(around)  # type: ignore[attr-defined]
    assert_split_is_the_module(module, stages, {"x": rows()})
    assert calls == [f"blocks.{block}" for block in range(4)]


def test_a_hugging_face_model_that_recomputes_by_itself_splits() -> None:
    module = make_family("llama")
    recompute(module, use_reentrant=False)
    stages = split(module, 3, make_batch("llama"))
    assert_split_is_the_module(module, stages, make_batch("llama", length=12))


def test_one_that_recomputes_in_the_older_way_splits_too() -> None:
    module = make_family("llama")
    recompute(module, use_reentrant=True)
    stages = split(module, 3, make_batch("llama"))
    assert_split_is_the_module(module, stages, make_batch("llama", length=12))


def test_one_that_recomputes_every_other_layer_splits_too() -> None:
    module: Any = make_family("llama")
    if not hasattr(module, "activation_checkpointing_enable"):
        pytest.skip("this transformers recomputes every layer")
    module.activation_checkpointing_enable(every_n_layers=2, offload=torch.cuda.is_available())
    stages = split(module, 3, make_batch("llama"))
    assert_split_is_the_module(module, stages, make_batch("llama", length=12))


def test_hidden_states_that_hooks_collect_reach_the_last_stage() -> None:
    module = make_family("llama")
    batch = {**make_batch("llama"), "output_hidden_states": True}
    expected = module(**batch)
    # `output_hidden_states` is in **kwargs, which forward does not name: only its configuration can ask for it.
    module.config.output_hidden_states = True  # type: ignore[union-attr]
    output, _ = run_stages(split(module, 3, make_batch("llama")), batch)
    assert len(output.hidden_states) == len(expected.hidden_states)
    for ours, theirs in zip(output.hidden_states, expected.hidden_states, strict=True):
        assert_same({"hidden": ours}, {"hidden": theirs})


def test_a_loss_inside_forward_is_computed_on_the_last_stage() -> None:
    module = make_family("qwen3")
    batch = make_batch("qwen3")
    stages = split(module, 3, {**batch, "labels": batch["input_ids"]})
    assert_split_is_the_module(module, stages, {**batch, "labels": batch["input_ids"]})


@pytest.mark.parametrize("cut", [[1, 1, 2], [1, 3, 3], ["model.embed_tokens", "model.layers.2", "model.norm"]])
def test_the_cut_may_be_given_in_blocks_in_units_or_by_name(cut: Any) -> None:
    module = make_family("llama")
    stages = split(module, 3, make_batch("llama"), cut=cut)
    seconds = {1: "model.layers.1", 3: "model.layers.0"}
    assert stages.units[1][0] == ("model.layers.2" if isinstance(cut[1], str) else seconds[cut[1]])
    assert_split_is_the_module(module, stages, make_batch("llama"))


def test_more_stages_than_blocks_are_made_by_opening_blocks() -> None:
    module = Chain(num_blocks=2)
    stages = split(module, 5, {"x": rows()})
    assert stages.num_stages == 5
    assert_split_is_the_module(module, stages, {"x": rows(4)})


def test_a_unit_that_outweighs_the_others_is_opened() -> None:
    class Lopsided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(Block(), Chain(num_blocks=6), Block())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts(x)  # type: ignore[no-any-return]

    module = Lopsided()
    stages = split(module, 4, {"x": rows()})
    assert [len(units) for units in stages.units] == [2, 2, 2, 2]
    assert_split_is_the_module(module, stages, {"x": rows(4)})


def test_stages_may_have_different_speeds_prices_and_limits() -> None:
    module, example = Chain(num_blocks=6), {"x": rows()}
    assert [len(each) for each in split(module, 2, example, speeds=[1.0, 2.0]).units] == [2, 4]
    assert [
        len(each)
        for each in split(
            module, 2, example, costs={"blocks.0": 5.0} | {f"blocks.{number}": 1.0 for number in range(1, 6)}
        ).units
    ] == [1, 5]
    block_bytes = sum(each.numel() * 4 for each in module.blocks[0].parameters())
    limited = split(module, 3, example, costs={"blocks.0": 100.0}, limit_bytes=2 * block_bytes)
    assert [len(each) for each in limited.units] == [2, 2, 2]


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "mixtral"])
def test_a_cut_through_blocks_is_more_even_and_the_same_model(family: str) -> None:
    module, batch = make_family(family), make_batch(family)
    coarse, fine = stage_costs(module, 3, batch), stage_costs(module, 3, batch, through_blocks=True)
    assert max(fine) <= max(coarse)
    # What skips a cut arrives by two ways: the last bits of gradients that are sums of both may differ.
    assert_split_is_the_module(module, split(module, 3, batch, through_blocks=True), batch, tolerance=1e-5)


def test_a_cut_goes_through_a_block_only_where_that_is_faster() -> None:
    module = Chain()
    even = {"x": rows(4)}
    assert split(module, 2, even, through_blocks=True).units == split(module, 2, even).units
    uneven = split(module, 3, even, through_blocks=True)
    assert any(unit.startswith("blocks.") and unit.count(".") == 2 for stage in uneven.units for unit in stage)


def test_a_judge_who_knows_the_schedule_moves_the_cut_where_a_step_is_shorter() -> None:
    """The last stage begins a forward late, and has that much less to do than even stages would give it."""
    module, batch = Chain(num_blocks=0), {"x": rows(4)}
    width = batch["x"].shape[-1]
    for _ in range(3):
        module.blocks.append(nn.Sequential(*(nn.Linear(width, width) for _ in range(16))))
    judge = partial(step_seconds, make_schedule("zb-h2", 2, 4))

    def seconds_of(chosen: Callable[[Sequence[float]], float]) -> tuple[float, list[float]]:
        options = SplitOptions(num_stages=2, through_blocks=True, judge=chosen)
        _, flow, where = choose(module, batch, options)
        costs = costs_of(flow, options)
        stages = [sum(costs[call] for call in calls) for calls in where]
        return judge(stages), stages

    (even_seconds, even), (judged_seconds, judged) = seconds_of(max), seconds_of(judge)
    assert judged_seconds < even_seconds
    assert judged[1] < even[1]
    assert_split_is_the_module(module, split(module, 2, batch, through_blocks=True, judge=judge), batch, tolerance=1e-5)


class Slow(nn.Module):
    """Takes its time, draws at random and counts how often it is called."""

    num_calls: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.05)
        self.num_calls += 1
        made: Tensor = self.inner(x)
        return made + 0 * torch.rand_like(x)


def test_units_are_timed_and_the_cut_goes_by_their_seconds() -> None:
    module, example = Chain(num_blocks=6), {"x": rows()}
    module.blocks[0] = Slow(module.blocks[0])
    before, kept = torch.get_rng_state(), copy.deepcopy(module.state_dict())
    assert [len(each) for each in split(module, 2, example).units] == [3, 3]
    timed = split(module, 2, example, stopwatch=Stopwatch())
    assert [len(each) for each in timed.units] == [1, 5]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, kept[name]) for name, value in module.state_dict().items())
    assert all(each.grad is None for each in module.parameters())


def test_a_unit_is_timed_once_however_often_it_is_asked_for() -> None:
    module, example, stopwatch = Chain(), {"x": rows()}, Stopwatch()
    # A list would be as before: runs on an example leave no trace. Numbers of C are not looked into.
    called = c_long(0)

    def note(*_: object) -> None:
        called.value += 1

    module.blocks[1].register_forward_hook(note)
    split(module, 2, example, stopwatch=stopwatch)
    first = called.value
    split(module, 3, example, stopwatch=stopwatch)
    assert called.value - first < first
    costs = stage_costs(module, 2, example, stopwatch=stopwatch)
    assert costs == stage_costs(module, 2, example, stopwatch=stopwatch)


def test_what_has_no_weights_cannot_be_timed() -> None:
    with torch.device("meta"):
        module = Chain()
    with pytest.raises(ShardwiseError, match="has no weights to run with\n  try: measure=False"):
        split(module, 2, {"x": rows()}, stopwatch=Stopwatch())
