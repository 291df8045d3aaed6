"""A placed module is used like the one that it was made from."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import shardwise as sw
from shardwise.errors import ShardwiseError
from tests.stages.families import make_batch, make_family
from tests.stages.pieces import Net
from tests.stages.small import small_matrices

PLACES = ["cpu:0", "cpu:1"]


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    with small_matrices():
        yield


def ids(rows: int = 8) -> Tensor:
    return torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(0))


def test_names_states_modes_and_attributes_are_the_modules_own() -> None:
    module = make_family("gpt2")
    names = [name for name, _ in module.named_parameters()]
    placed = sw.place(module, PLACES, microbatches=2)
    assert [name for name, _ in placed.named_parameters()] == names
    assert list(placed.state_dict()) == list(module.state_dict())
    assert placed.config is module.config
    assert placed.transformer is module.transformer
    assert not placed.eval().training
    assert not any(each.training for each in module.modules())
    placed.train()
    assert all(each.training for each in module.modules())
    with pytest.raises(AttributeError, match="has no attribute 'generrate'"):
        _ = placed.generrate
    state = {name: torch.zeros_like(each) for name, each in placed.state_dict().items()}
    placed.load_state_dict(state)
    assert not any(each.any() for each in module.parameters())


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_model_of_hugging_face_writes_what_it_would_have(num_microbatches: int) -> None:
    plain = make_family("llama").eval()
    placed = sw.place(copy.deepcopy(plain), PLACES, microbatches=num_microbatches)
    batch = make_batch("llama", num_sequences=4)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(**batch, **settings)  # type: ignore[operator]
    assert torch.equal(placed.generate(**batch, **settings), expected)
    with torch.no_grad():
        placed(**batch)  # Lays out the stages, if there are any.
    assert torch.equal(placed.generate(**batch, **settings), expected)


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_a_cache_of_keys_and_values_goes_on_where_it_was(num_microbatches: int) -> None:
    plain = make_family("llama").eval()
    placed = sw.place(copy.deepcopy(plain), PLACES, microbatches=num_microbatches)
    tokens = make_batch("llama", num_sequences=4)["input_ids"]
    with torch.no_grad():
        before = placed(tokens[:, :6], use_cache=True)
        after = placed(tokens[:, 6:], past_key_values=before.past_key_values)
        expected = plain(tokens).logits[:, 6:]
    torch.testing.assert_close(after.logits, expected, rtol=1e-4, atol=1e-5)


def test_a_loss_that_the_model_computes_is_the_mean_over_microbatches() -> None:
    plain = make_family("gpt2")
    tokens = make_batch("gpt2", num_sequences=8)["input_ids"]
    placed = sw.place(copy.deepcopy(plain), PLACES, microbatches=4)
    output, expected = placed(tokens, labels=tokens), plain(tokens, labels=tokens)
    assert output.loss.item() == pytest.approx(expected.loss.item())
    output.loss.backward()
    expected.loss.backward()
    for one, other in zip(plain.parameters(), placed.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)


def test_an_optimizer_made_before_the_first_forward_has_the_parameters() -> None:
    placed = sw.place(Net(num_blocks=4), PLACES, microbatches=4)
    optimizer = AdamW(placed.parameters(), lr=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(placed(ids()).flatten(0, 1), ids().flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(state["exp_avg"].device == each.device for each, state in optimizer.state.items())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_keeps_nothing(mode: type[torch.no_grad]) -> None:
    module = Net(num_blocks=4)
    placed = sw.place(module, PLACES, microbatches=4)
    seen: list[weakref.ref[Tensor]] = []

    def note(_: nn.Module, __: object, output: Tensor) -> None:
        # What stands in for the output on other stages is one number, and is kept for the next time.
        if output.untyped_storage().nbytes() > output.element_size():
            seen.append(weakref.ref(output))

    with mode():
        placed(ids())
        module.blocks[1].register_forward_hook(note)
        output = placed(ids())
        torch.testing.assert_close(output, module(ids()))
    gc.collect()
    assert len(seen) >= 4
    assert not output.requires_grad
    assert not any(each() is not None for each in seen)


def test_what_a_forward_holds_goes_with_its_output() -> None:
    module = Net(num_blocks=4)
    placed = sw.place(module, PLACES, microbatches=4)
    placed(ids())
    held: list[weakref.ref[Tensor]] = []
    module.get_submodule("blocks.0.1").register_forward_hook(lambda _, __, output: held.append(weakref.ref(output)))
    output = placed(ids())
    del output
    gc.collect()
    assert len(held) >= 4
    assert not any(each() is not None and each().grad_fn is not None for each in held)  # type: ignore[union-attr]


def test_a_second_backward_is_refused() -> None:
    placed = sw.place(Net(num_blocks=4), PLACES, microbatches=2)
    loss = placed(ids()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(ShardwiseError, match="the backward of this forward has been run"):
        loss.backward()


def test_a_copy_is_refused() -> None:
    with pytest.raises(ShardwiseError, match="a placed module cannot be copied"):
        copy.deepcopy(sw.place(Net(num_blocks=2), PLACES))


def test_arguments_without_a_name_are_refused() -> None:
    class Any(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

        def forward(self, x: Tensor, **more: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x)) + more["shift"]  # type: ignore[no-any-return]

    x = torch.ones(4, 2)
    with pytest.raises(ShardwiseError, match=r"Any.forward has no name for shift, so they cannot be cut"):
        sw.place(Any(), PLACES, microbatches=2)(x, shift=x)
    assert sw.place(Any(), PLACES)(x, shift=x).shape == (4, 2)


def test_types_may_be_changed_and_places_stay() -> None:
    placed = sw.place(Net(num_blocks=4), PLACES, microbatches=2).double()
    assert placed(ids()).dtype is torch.float64
    before = dict(placed.where)
    placed.to("cpu")
    assert placed.where == before


def test_tied_weights_are_one_parameter_on_one_place() -> None:
    placed = sw.place(make_family("llama"), PLACES)
    assert placed.lm_head.weight is placed.model.embed_tokens.weight
    assert placed.where["model.embed_tokens.weight"].name == "cpu:0"
    assert placed.where["model.norm.weight"].name == "cpu:1"


class Failing(nn.Module):
    """Fails on a row of a certain value, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: Tensor, where: str) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if layer is self.layers[3] and where == "backward" and x.requires_grad:
                x.register_hook(_fail)  # type: ignore[no-untyped-call]
        return x


def _fail(_: Tensor) -> Tensor:
    raise ValueError("no gradient here")


def test_an_error_in_a_thread_comes_to_the_caller_with_stage_and_microbatch() -> None:
    module = Failing()
    placed = sw.place(module, PLACES, microbatches=4)
    x = torch.randn(8, 2)
    placed(x, "nowhere")

    def refuse(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].isnan().any():
            raise ValueError("a row is not a number")

    hook = module.layers[0].register_forward_pre_hook(refuse)
    wrong = x.clone()
    wrong[5] = float("nan")
    with pytest.raises(ValueError, match="a row is not a number") as caught:
        placed(wrong, "nowhere")
    assert caught.value.__notes__ == ["in 0F2: stage 0, microbatch 2, rank 0", "on cpu:0"]
    hook.remove()
    with pytest.raises(ValueError, match="no gradient here") as caught:
        placed(x, "backward").sum().backward()
    assert caught.value.__notes__ == ["in 1B0: stage 1, microbatch 0, rank 1", "on cpu:1"]
    # And it can be used again.
    placed(x, "nowhere").sum().backward()


def test_a_placed_module_is_not_pickled_but_its_state_is() -> None:
    placed = sw.place(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ["cpu:0", "cpu:1"])
    with pytest.raises(ShardwiseError, match="cannot be pickled"):
        pickle.dumps(placed)
    with pytest.raises(ShardwiseError, match="cannot be pickled"):
        torch.save(placed, io.BytesIO())
    assert pickle.loads(pickle.dumps(placed.state_dict())).keys() == placed.state_dict().keys()
