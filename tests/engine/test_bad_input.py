"""What a user can get wrong with `parallelize`: each a sentence before anything is trained, in one process and many."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from tests.stages.families import make_batch, make_family
from tests.stages.odd_nets import Noisy, Overheard, rows
from tests.stages.pieces import Net


def tokens(size: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(0, 11, (size, 6), generator=torch.Generator().manual_seed(0))
    return {"ids": ids[:, :-1], "labels": ids[:, 1:]}


def mean_loss(output: Tensor, batch: Any) -> Tensor:
    return cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def made(plan: str = "pp=2,microbatches=2", module: nn.Module | None = None, **changed: Any) -> str:
    """The text of the error that parallelize raises."""
    given: dict[str, Any] = {
        "loss": mean_loss,
        "optimizer": lambda parameters: SGD(parameters, lr=0.1),
        "example": tokens(),
        **changed,
    }
    with pytest.raises(ShardwiseError) as caught:
        parallelize(Net(num_blocks=4) if module is None else module, plan, **given)
    return str(caught.value)


def more_stages_than_blocks() -> str:
    return made("pp=2,chunks=6,microbatches=2,schedule=interleaved", Net(num_blocks=4))


def a_batch_that_is_not_divided() -> str:
    return made("pp=2,microbatches=3")


def misspelt(output: Tensor, batch: Any) -> Tensor:
    return cross_entropy(output.flatten(0, 1), batch["label"].flatten())


def a_misspelt_entry() -> str:
    return made(loss=misspelt)


def nothing_to_train() -> str:
    return made(module=Net(num_blocks=4).requires_grad_(False))


def a_plan_for_others() -> str:
    return made("pp=3,microbatches=3")


EVERYWHERE: dict[Callable[[], str], str] = {
    more_stages_than_blocks: (
        "12 stages are asked for, but Net has only 9 units to divide: embedding, blocks.0.0, blocks.0.1, blocks.1.0,"
        " blocks.1.1, blocks.2.0, blocks.2.1, blocks.3.0, blocks.3.1\n  try: pp=1"
    ),
    a_batch_that_is_not_divided: (
        "a batch of 4 cannot be cut into 3 equal microbatches\n  try: a batch of 3 or 6, or microbatches=2, or pad=True"
    ),
    a_misspelt_entry: (
        "the loss raises KeyError: 'label', at test_bad_input.py:{line} (return cross_entropy(output.flatten(0, 1),"
        ' batch["label"].flatten())); on the example it is given a Tensor of shape (2, 5, 11), and a batch with ids,'
        " labels\n  try: batch['labels']"
    ),
    nothing_to_train: (
        "none of the 17 parameters of Net requires a gradient, so there is nothing to train\n"
        "  try: module.requires_grad_()"
    ),
}


@pytest.mark.parametrize("mistake", EVERYWHERE, ids=lambda mistake: mistake.__name__)
def test_the_same_sentence_in_one_process_and_on_every_rank_of_two(mistake: Callable[[], str], two: Ranks) -> None:
    text = EVERYWHERE[mistake].replace("{line}", str(misspelt.__code__.co_firstlineno + 1))
    assert mistake() == text
    assert two.run(mistake) == [text, text]


def test_a_plan_for_another_number_of_ranks_is_refused_where_there_are_several(two: Ranks) -> None:
    for text in two.run(a_plan_for_others):
        assert text.startswith("plan pp=3 needs 3 ranks but there are 2\n  try: 3 ranks, or a plan whose")


def test_a_loss_that_wants_what_the_model_does_not_return_is_told_what_there_is() -> None:
    batch = make_batch("gpt2", 2)
    text = made(module=make_family("gpt2"), example=batch, loss=lambda output, _: output.logit.mean())
    output = "CausalLMOutputWithCrossAttentions"
    assert f"the loss raises AttributeError: '{output}' object has no attribute 'logit', at" in text
    assert f"it is given a {output} with logits, and a batch with input_ids, attention_mask" in text
    assert text.endswith("try: output['logits']")


def test_a_loss_that_wants_hidden_states_of_a_tensor_says_what_it_is_given() -> None:
    text = made(loss=lambda output, _: output.hidden_states[-1].mean())
    assert "AttributeError: 'Tensor' object has no attribute 'hidden_states'" in text
    assert text.endswith("try: a loss(output, batch) of what the module returns and of what the batch has")


@pytest.mark.parametrize("loss", [lambda output, _: output.mean(dim=-1), lambda output, _: (output.flatten(1), 4)])
def test_a_loss_of_many_numbers_is_refused(loss: Any) -> None:
    assert made(loss=loss).startswith("the loss is a Tensor of shape (2, 5")
    assert made(loss=lambda output, _: float(output.sum())).startswith("the loss is a float, but it must be one number")


def test_the_loss_is_tried_on_a_module_on_the_meta_device_too() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11))
    batch = {"input": tokens()["ids"]}
    assert "KeyError: 'labels'" in made(module=module, example=batch)
    assert all(each.is_meta for each in module.parameters())


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, pickle.dumps, lambda engine: torch.save(engine, io.BytesIO())]
)
def test_an_engine_that_is_copied_or_pickled_says_what_to_save(copied: Callable[[Any], Any]) -> None:
    options: dict[str, Any] = {"loss": mean_loss, "optimizer": lambda parameters: SGD(parameters, lr=0.1)}
    with parallelize(Net(num_blocks=4), "pp=2,microbatches=2", example=tokens(), **options) as engine:
        with pytest.raises(ShardwiseError, match="an engine cannot be copied") as caught:
            copied(engine)
        assert "engine.state_dict()" in str(caught.value)
        assert engine.train_step(tokens()) > 0


def test_a_refused_module_is_as_it_was() -> None:
    net = Net(num_blocks=4)
    before = {name: each.clone() for name, each in net.state_dict().items()}
    made(module=net, loss=misspelt)
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())
    assert all(each._compiled_call_impl is None for each in net.modules())
    assert float(mean_loss(net(tokens()["ids"]), tokens()).detach()) > 0


@pytest.mark.parametrize(
    ("module", "place"),
    [
        (Noisy(), r"randn_like"),
        (Overheard(), r"used by mean at odd_nets.py:\d+ \(return x, left.mean\(\)\)"),
    ],
    ids=["random numbers in glue", "something overheard"],
)
def test_a_module_that_cannot_be_split_says_which_operation_and_where(module: nn.Module, place: str) -> None:
    import re

    text = made("pp=4,microbatches=3", module, example={"x": rows()}, loss=lambda output, _: _first(output).mean())
    assert re.search(place, text)
    assert "\n  try: " in text


def _first(output: Any) -> Tensor:
    found = output[0] if isinstance(output, tuple) else output
    assert isinstance(found, Tensor)
    return found


def test_a_unit_that_does_not_run_on_meta_says_which_line() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x * float(x.numpy().sum()))  # type: ignore[no-any-return]

    with torch.device("meta"):
        module = nn.Sequential(Asks(), Asks())
    text = made("pp=2,microbatches=3", module, example={"input": rows()}, loss=lambda output, _: output.mean())
    assert "0 does not run on the meta device, at test_bad_input.py:" in text
    assert "(return self.linear(x * float(x.numpy().sum()))" in text
