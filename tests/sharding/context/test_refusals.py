"""Models whose attention would see too little: refused with a sentence, on one device already."""

from typing import Any

import pytest
import torch
from torch import nn

from shardwise.errors import ShardwiseError
from shardwise.ranks.collectives import Group
from shardwise.sharding.context.parallel import ContextParallel
from tests.sharding.context.models import loss_of, make_batch, make_model
from tests.stages.families import recompute


def run_alone(name: str, kind: str = "whole", **options: Any) -> ContextParallel:
    module, context = make_model(name), ContextParallel(Group(), **options)
    context.attach(module)
    part = context.cut(make_batch(name, kind, 24))
    with context.running(part):
        loss_of(module, part)
    return context


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "gpt2 with dropout",
            "attention drops weights with probability 0.1, and only an engine can choose which",
        ),
        ("own with dropout", "attention drops weights with probability 0.1, and only an engine can choose which"),
        ("own with a mask", "attention was called with a mask, [24, 24], which is of this rank's tokens alone"),
        ("by hand", "a softmax over 24 x 24 of this rank's tokens looks like hand-written attention"),
        ("multihead", "nn.MultiheadAttention computes attention internally"),
        ("t5", "T5ForConditionalGeneration computes attention itself"),
        ("bloom", "BloomForCausalLM computes attention itself"),
        ("roberta", "the module makes positions from its tokens in a way of its own"),
        ("gpt-oss", "GptOssAttention changes its logits by s_aux, which cp does not do"),
        ("llama4", "the model masks by chunked_overlay, which cp does not know"),
    ],
)
def test_what_would_go_wrong_is_refused(name: str, problem: str) -> None:
    with pytest.raises(ShardwiseError) as error:
        run_alone(name)
    assert error.value.problem.startswith(problem)
    assert error.value.remedy


def test_an_unknown_form_is_told_with_the_nearest() -> None:
    with pytest.raises(ShardwiseError, match="unknown form of context parallelism 'rings'; known: ring, all-to-all"):
        ContextParallel(Group(), form="rings")  # type: ignore[arg-type]


def test_a_module_that_counts_positions_itself_is_refused_unless_it_uses_none() -> None:
    class Counting(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids

    with pytest.raises(ShardwiseError, match=r"Counting\.forward takes no position_ids, so every rank would count"):
        ContextParallel(Group()).attach(Counting())
    ContextParallel(Group(), positions=None).attach(Counting())


def test_a_model_that_recomputes_itself_is_refused() -> None:
    module = make_model("llama")
    recompute(module)
    with pytest.raises(ShardwiseError, match="LlamaForCausalLM recomputes its forwards itself"):
        ContextParallel(Group()).attach(module)


def test_attention_outside_of_a_forward_that_is_known_is_refused() -> None:
    module, context = make_model("llama"), ContextParallel(Group())
    context.attach(module)
    with pytest.raises(ShardwiseError, match=r"attention was computed outside of context.running\(batch\)"):
        loss_of(module, make_batch("llama", "whole", 24))


def test_a_batch_that_was_not_cut_is_refused() -> None:
    context = ContextParallel(Group())
    context.attach(make_model("own"))
    with pytest.raises(ShardwiseError, match="the batch was not cut for cp"), context.running({}):
        pass


def test_on_the_meta_device_shapes_are_right_and_nothing_is_sent() -> None:
    with torch.device("meta"):
        module = make_model("own with attend")
    context = ContextParallel(Group())
    context.attach(module)
    ids = torch.zeros(2, 24, dtype=torch.long, device="meta")
    assert module(ids, ids).shape == (2, 24, 97)
    assert context.num_calls == 1


@pytest.mark.parametrize("name", ["llama", "own with attend"])
def test_a_module_gets_its_own_attention_back(name: str) -> None:
    module, context = make_model(name), ContextParallel(Group())
    before = loss_of(module, make_batch(name, "whole", 24))
    context.attach(module)
    context.detach()
    assert torch.equal(loss_of(module, make_batch(name, "whole", 24)), before)
    assert context.num_calls == 0


def test_every_layer_goes_through_it_once() -> None:
    assert run_alone("llama").num_calls == 2
    assert run_alone("own").num_calls == 1
