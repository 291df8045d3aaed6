"""Models of the catalogue made small, and modules of a user."""

from collections.abc import Callable

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.model.catalogue import CATALOGUE
from shardwise.nets.hf.catalogue import FAMILIES
from shardwise.nets.settings import Heads, Latent, Settings
from shardwise.parity.given import problem_from
from shardwise.parity.models import default_settings, describe, length_for, named_settings, problem_of, rows_for
from shardwise.parity.reference import train_reference
from shardwise.planner.plan import Plan

KNOWN = [name for name, config in CATALOGUE.items() if config["model_type"] in FAMILIES]
HERE = "tests.parity.given_nets"


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_model_is_small_and_trains(name: str) -> None:
    plan = Plan.parse("dp=2,pp=2,microbatches=2")
    problem = problem_of(named_settings(name, plan), plan, 1)()
    assert sum(each.numel() for each in problem.module.parameters()) < 200_000
    assert torch.isfinite(torch.tensor(train_reference(problem, plan).steps[0].loss))


def test_structure_stays_and_sizes_do_not() -> None:
    plan = Plan.parse("tp=2")
    llama, gpt2, deepseek = (named_settings(name, plan) for name in ("llama3.1-8b", "gpt2", "deepseek-v3"))
    assert isinstance(llama.attention, Heads)
    assert llama.attention.num_heads == 4 * llama.attention.num_kv_heads
    assert (llama.vocabulary % 8, gpt2.vocabulary % 8) == (128256 % 8, 50257 % 8)
    assert (gpt2.rope, gpt2.norm, gpt2.tied, gpt2.mlp.bias) == (None, "layer", True, True)
    assert isinstance(deepseek.attention, Latent)
    assert deepseek.mixture is not None
    assert (deepseek.mixture.scores, deepseek.mixture.correction, deepseek.mixture.num_shared) == ("sigmoid", True, 1)
    assert describe(deepseek) == (
        "2 layers of width 32, 4 heads, latent, 8 experts of which 2 are chosen, vocabulary 256"
    )


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("dp=2,ep=2", lambda made: made.mixture.num_experts == 4),
        ("dp=8,ep=8", lambda made: made.mixture.num_experts == 16),
        ("tp=2", lambda made: made.mixture is None and made.vocabulary % 2),
        ("tp=8", lambda made: made.attention.num_heads == 8),
        ("tp=2,cp=4,context=all-to-all", lambda made: made.attention.num_heads == 8),
        ("pp=2,schedule=zb-v,microbatches=4", lambda made: made.num_layers == 4),
        ("pp=2,layers=1+4,microbatches=2", lambda made: made.num_layers == 5),
    ],
)
def test_the_default_has_what_a_plan_needs(text: str, has: Callable[[Settings], bool]) -> None:
    assert has(default_settings(Plan.parse(text)))


def test_batches_divide_by_what_a_plan_cuts_them_into_and_sequences_do_not() -> None:
    for text in ("dp=2,microbatches=4", "dp=3", "tp=3,sp=true", "cp=2", "tp=2,cp=4", "dp=2,cp=2,microbatches=2"):
        plan = Plan.parse(text)
        assert rows_for(plan) % (plan.dp * plan.microbatches) == 0
        assert not plan.sp or length_for(plan) % plan.tp
        assert plan.cp == 1 or length_for(plan) % (2 * plan.cp)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gemma2-2b", "gemma2-2b is a gemma2 model, and those that are built here are llama, mistral, qwen2"),
        ("lama3-8b", "unknown model 'lama3-8b'"),
    ],
)
def test_a_model_that_is_not_built_here_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ShardwiseError, match=problem):
        named_settings(name, Plan())


def test_a_users_module_is_made_and_its_batches_are_used_in_turn() -> None:
    once, twice = (problem_from(f"{HERE}:{name}", 3)() for name in ("regression", "two_batches"))
    # Rows change places from step to step, so that nothing that is kept of the example is right by chance.
    assert torch.equal(once.batches[2]["x"], once.batches[0]["x"].roll(2, 0))
    assert torch.equal(once.batches[2]["y"], once.batches[0]["y"].roll(2, 0))
    assert torch.equal(twice.batches[2]["x"], twice.batches[0]["x"].roll(1, 0))
    assert not torch.equal(twice.batches[0]["x"], twice.batches[1]["x"])
    # Masks are the same under every plan, so dropout is checked too.
    assert all(each.p == 0.5 for each in once.module.modules() if isinstance(each, torch.nn.Dropout))


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("given_nets", "--module given_nets is no package.module:factory"),
        ("no_such_module:factory", "--module no_such_module:factory cannot be imported: No module named"),
        (f"{HERE}:regresion", f"unknown function of {HERE} 'regresion'; known: "),
        (f"{HERE}:module_alone", f"{HERE}:module_alone returns Net, and not a module, a batch and a loss"),
        (f"{HERE}:no_dictionary", f"the batch of {HERE}:no_dictionary is not a dictionary"),
    ],
)
def test_a_module_that_cannot_be_had_is_a_sentence(where: str, problem: str) -> None:
    with pytest.raises(ShardwiseError) as caught:
        problem_from(where, 3)()
    assert caught.value.problem.startswith(problem)
