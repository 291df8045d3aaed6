"""What cannot be shared out is refused with a sentence, before anything is changed."""

from typing import Any

from shardwise.ranks.spawn import Ranks
from shardwise.sharding.expert import Placement
from tests.sharding.expert import programs


def text_of(ranks: Ranks, *given: Any) -> str:
    one, other = ranks.run(programs.refused, *given)
    assert one == other
    return str(one)


def test_a_module_without_experts(two: Ranks) -> None:
    assert text_of(two, "linear", "dp=2,ep=2") == (
        "Linear has no experts for ep=2 to share out: none were found\n  try: ep=1"
    )


def test_experts_of_another_form(two: Ranks) -> None:
    assert text_of(two, "list of experts", "dp=2,ep=2") == (
        "ListOfExperts has no experts for ep=2 to share out: of experts, its 4 experts are modules, not entries of"
        " parameters\n  try: ep=1"
    )


def test_fewer_experts_than_ranks(two: Ranks) -> None:
    assert text_of(two, "one expert", "dp=2,ep=2") == (
        "layers.0.mlp.experts has 1 experts, and ep=2 ranks cannot each have one\n  try: ep=1"
    )


def test_a_balancing_loss_of_each_rank_alone(two: Ranks) -> None:
    assert text_of(two, "mixtral with a balancing loss", "dp=2,ep=2") == (
        "MixtralForCausalLM computes its balancing loss from the tokens of one rank, and there are 2 replicas: their"
        " mean is not the loss of one device\n"
        "  try: config.output_router_logits = False, or shardwise.nets with Mixture(auxiliary=...)"
    )


def test_a_placement_of_other_experts(two: Ranks) -> None:
    assert text_of(two, "mixtral", "dp=2,ep=2", {"model.layers.0.mlp.experts": Placement.even(8, 2)}) == (
        "the placement of model.layers.0.mlp.experts is of 8 experts on 2 ranks, but there are 4 on 2\n"
        "  try: Placement.even(4, 2)"
    )


def test_a_placement_of_an_unknown_layer(two: Ranks) -> None:
    names = ", ".join(f"model.layers.{layer}.mlp.experts" for layer in range(4))
    assert text_of(two, "mixtral", "dp=2,ep=2", {"model.layers.0.mlp.expert": Placement.even(4, 2)}) == (
        f"unknown layer of experts 'model.layers.0.mlp.expert'; known: {names}\n  try: model.layers.0.mlp.experts"
    )
