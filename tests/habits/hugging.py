"""Models of transformers that recompute their layers by themselves, patched layers of theirs, packed documents."""
# Programs as users write them.
# mypy: disable-error-code="no-any-return,no-untyped-call,attr-defined,operator"

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.harness import Parallelize, Result, program, sgd
from tests.stages.families import recompute

#: What cp says of a model that recomputes by itself: attention in the second forward would talk out of turn.
ALONE = {"cp": "recomputes its forwards itself"}


def llama(**settings: Any) -> Any:
    """Two layers, with heads that two ranks can share."""
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=24, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).double()


def tokens(step: int, rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, 24, (rows, 9), generator=generator)
    return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


class Scores(nn.Module):
    """As wrappers have it: the model gets what it knows, and its scores come out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


def entropy(output: Any, given: Mapping[str, Tensor]) -> Any:
    scores = output if isinstance(output, Tensor) else output.logits
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), given["labels"].flatten(), reduction="sum")
    return loss, given["labels"].numel()


def fitted(parallelize: Parallelize, model: nn.Module, make: Any = tokens, **options: Any) -> Result:
    """Three steps, an evaluation, and the weights."""
    options = {"entries": None, "positions": "position_ids", **options}
    engine = parallelize(model, loss=entropy, optimizer=sgd, example=make(0), **options)
    found = {f"loss {step}": engine.train_step(make(step)) for step in range(3)}
    found["evaluated"] = engine.evaluate(make(7))
    return {**found, **{name: each for name, each in engine.state_dict().items() if isinstance(each, Tensor)}}


@program(ALONE)
def layers_that_recompute_by_themselves(parallelize: Parallelize) -> Result:
    """`activation_checkpointing_enable()`, or `gradient_checkpointing_enable()` as it was called before 5.23."""
    model = llama()
    recompute(model)
    return fitted(parallelize, model)


@program(ALONE)
def layers_that_recompute_in_the_older_way(parallelize: Parallelize) -> Result:
    """The same with `use_reentrant=True`."""
    model = llama()
    recompute(model, use_reentrant=True)
    return fitted(parallelize, model)


@program(ALONE)
def every_other_layer_recomputed(parallelize: Parallelize) -> Result:
    """One layer is, the next is not: `every_n_layers=2`."""
    model = llama()
    recompute(model)
    model.model.layers[1].gradient_checkpointing = False
    return fitted(parallelize, model)


@program(ALONE)
def a_frozen_trunk_that_recomputes(parallelize: Parallelize) -> Result:
    """As PEFT has it: inputs are made to require a gradient by a hook, and only the second layer and norms learn."""
    model = llama()
    for name, each in model.named_parameters():
        each.requires_grad_("norm" in name or "layers.1" in name)
    recompute(model)
    model.enable_input_require_grads()
    return fitted(parallelize, model)


@program(ALONE)
def a_patched_layer_that_recomputes(parallelize: Parallelize) -> Result:
    """`layer.forward` put in its place on the module, around the one it had."""
    model = llama()
    recompute(model)
    for layer in model.model.layers:
        own = layer.forward

        def forward(hidden: Tensor, *args: Any, own: Any = own, **kwargs: Any) -> Tensor:
            return 0.5 * own(hidden, *args, **kwargs)

        layer.forward = forward
    return fitted(parallelize, model)


@program(ALONE)
def layers_of_a_class_made_on_the_fly(parallelize: Parallelize) -> Result:
    """As FSDP2 and adapters do: the class of a layer is one made from its own, with a forward around it."""
    model = llama()
    recompute(model)
    for layer in model.model.layers:
        own = type(layer)

        def forward(self: Any, hidden: Tensor, *args: Any, own: Any = own, **kwargs: Any) -> Tensor:
            return 0.5 * own.forward(self, hidden, *args, **kwargs)

        layer.__class__ = type("Own" + own.__name__, (own,), {"forward": forward})
    return fitted(parallelize, model)


@program(ALONE)
def a_wrapper_around_a_model_that_recomputes(parallelize: Parallelize) -> Result:
    """A module of one's own around it."""
    model = llama()
    recompute(model)
    return fitted(parallelize, Scores(model))


@program()
def packed_documents_by_their_positions(parallelize: Parallelize) -> Result:
    """As `DataCollatorWithFlattening` packs: positions begin anew, and there is no mask."""

    def packed(step: int) -> dict[str, Tensor]:
        lengths = [(3, 5), (8,), (1, 7), (2, 2, 4)]
        positions = [torch.cat([torch.arange(each) for each in row]) for row in lengths]
        return {**tokens(step), "position_ids": torch.stack(positions)}

    return fitted(parallelize, llama(), packed)


@program()
def packed_documents_in_windows(parallelize: Parallelize) -> Result:
    """The same where attention goes back three tokens."""
    import transformers as hf

    def packed(step: int) -> dict[str, Tensor]:
        lengths = [(3, 5), (8,), (1, 7), (2, 2, 4)]
        positions = [torch.cat([torch.arange(each) for each in row]) for row in lengths]
        return {**tokens(step), "position_ids": torch.stack(positions)}

    config = hf.MistralConfig(
        vocab_size=24, hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return fitted(parallelize, hf.MistralForCausalLM(config).double(), packed)


@program({"cp": "the loss reads other tokens than its own"}, whole=True, as_it_is=True)
def a_loss_of_scores_beside_the_models_own(parallelize: Parallelize) -> Result:
    """A `compute_loss` of one's own: the batch has labels, so the model computes its mean too, which nobody reads."""

    def some_ignored(step: int) -> dict[str, Tensor]:
        ids = tokens(step)["input_ids"]
        lengths = torch.tensor([[7], [3], [5], [8]]).roll(step, 0)
        return {"input_ids": ids, "labels": ids.masked_fill(torch.arange(8) >= lengths, -100)}

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        scores, labels = output.logits[:, :-1], given["labels"][:, 1:]
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

    engine = parallelize(llama(), loss=loss, optimizer=sgd, example=some_ignored(0))
    found: dict[str, Any] = {f"loss {step}": engine.train_step(some_ignored(step)) for step in range(3)}
    found["evaluated"] = engine.evaluate(some_ignored(7))
    return {**found, **{name: each for name, each in engine.state_dict().items() if isinstance(each, Tensor)}}


def answers(step: int) -> dict[str, Tensor]:
    """Rows that end in labels to ignore."""
    made = tokens(step)
    ignored = torch.arange(8) >= torch.tensor([[7], [3], [5], [8]]).roll(step, 0)
    return {**made, "labels": made["labels"].masked_fill(ignored, -100)}


def with_loss(parallelize: Parallelize, loss: Any) -> Result:
    engine = parallelize(llama(), loss=loss, optimizer=sgd, example=answers(0))
    found: dict[str, Any] = {f"loss {step}": engine.train_step(answers(step)) for step in range(3)}
    return {**found, **{name: each for name, each in engine.state_dict().items() if isinstance(each, Tensor)}}


OF_SCORES = {"cp": r"the module computes its loss itself[\s\S]*cross_entropy\(output.logits"}


@program(OF_SCORES, whole=True, as_it_is=True)
def the_models_own_loss(parallelize: Parallelize) -> Result:
    """`outputs.loss`, of labels that the model shifts."""
    return with_loss(parallelize, lambda output, _: output.loss)


@program(whole=True, as_it_is=True)
def a_loss_of_scores_and_their_labels(parallelize: Parallelize) -> Result:
    """What its refusal says: labels of their own tokens, shifted in the batch."""

    def loss(output: Any, given: Mapping[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), given["labels"].flatten())

    return with_loss(parallelize, loss)
