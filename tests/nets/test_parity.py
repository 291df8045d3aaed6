"""The transformer against transformers: logits, gradients, padding and generation, family by family."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shardwise.nets.generate import generate
from shardwise.nets.hf import load_model
from shardwise.nets.hf.gpt2 import GPT2
from shardwise.nets.hf.naming import LLAMA, Naming
from shardwise.nets.transformer import Transformer
from tests.nets.closeness import assert_all_close, assert_close
from tests.nets.families import CONFIGS, save_theirs, tokens
from tests.settings import settings_kept

every_family = pytest.mark.parametrize("family", CONFIGS)


def both(family: str, folder: Path) -> tuple[nn.Module, Transformer]:
    return save_theirs(family, folder), load_model(folder)


def gradients_as_ours(theirs: nn.Module, ours: Transformer) -> dict[str, Tensor]:
    """The gradients of a model of transformers by our names. In memory it has all experts of a layer in one tensor."""
    naming = GPT2.naming(()) if ours.positions is not None else Naming(parts=LLAMA, is_stacked=True)
    held = dict(theirs.named_parameters())
    gradients = {}
    for name, weight in ours.named_parameters():
        (piece,) = naming.pieces(name, tuple(weight.shape))
        gradient = held[piece.tensor].grad
        assert gradient is not None
        box = tuple(slice(start, end) for start, end in zip(piece.offset, piece.end_there, strict=True))
        gradients[name] = piece.to_ours(gradient[box])
    return gradients


@every_family
@torch.no_grad()
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs, ours = both(family, tmp_path)
    ids = tokens(length=40)
    assert_close(ours(ids), theirs(ids).logits)


@every_family
def test_the_loss_and_its_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    theirs, ours = both(family, tmp_path)
    ids = tokens(num_sequences=3, length=17)
    losses = []
    for logits in (theirs(ids[:, :-1]).logits, ours(ids[:, :-1])):
        losses.append(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        losses[-1].backward()  # type: ignore[no-untyped-call]
    assert_close(losses[1], losses[0])
    found = {name: each.grad for name, each in ours.named_parameters() if each.grad is not None}
    assert_all_close(found, gradients_as_ours(theirs, ours))


@every_family
@torch.no_grad()
def test_padding_is_seen_by_nobody(family: str, tmp_path: Path) -> None:
    theirs, ours = both(family, tmp_path)
    ids, mask = tokens(length=14), torch.ones(2, 14, dtype=torch.int64)
    mask[0, :5] = 0
    expected = theirs(ids, attention_mask=mask).logits
    assert_close(ours(ids, attention_mask=mask)[mask.bool()], expected[mask.bool()])


@every_family
@torch.no_grad()
def test_greedy_generation_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    theirs, ours = both(family, tmp_path)
    prompt = tokens(length=7)
    expected = theirs.generate(prompt, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    assert generate(ours, prompt, 12).equal(expected)


@every_family
@torch.no_grad()
def test_packed_documents_are_what_each_would_be_alone(family: str, tmp_path: Path) -> None:
    _, ours = both(family, tmp_path)
    ids = tokens(num_sequences=1, length=19)
    # The third has the id of the first: another document all the same.
    documents = torch.tensor([[4] * 7 + [2] * 9 + [4] * 3])
    alone = [ours(ids[:, start:end]) for start, end in ((0, 7), (7, 16), (16, 19))]
    assert_close(ours(ids, documents=documents), torch.cat(alone, dim=1))


@torch.no_grad()
def test_given_positions_are_used(tmp_path: Path) -> None:
    theirs, ours = both("llama", tmp_path)
    ids, positions = tokens(), torch.arange(30, 42).expand(2, 12)
    assert_close(ours(ids, position_ids=positions), theirs(ids, position_ids=positions).logits)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # Without bfloat16, torch leaves oneDNN.
@settings_kept()
@torch.no_grad()
def test_bfloat16_weights_stay_so_and_positions_do_not_suffer(tmp_path: Path) -> None:
    theirs = save_theirs("llama", tmp_path / "fp32").to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "bf16")  # type: ignore[operator]
    ours = load_model(tmp_path / "bf16")
    assert {each.dtype for each in ours.parameters()} == {torch.bfloat16}
    assert ours.rotary is not None
    assert ours.rotary.frequencies.equal(load_model(tmp_path / "fp32").rotary.frequencies)  # type: ignore[union-attr]
    assert ours.to(torch.bfloat16).rotary.frequencies.dtype == torch.float32  # type: ignore[union-attr]
    ids = tokens(length=24)
    assert_close(ours(ids).float(), theirs(ids).logits.float(), limit=0.05)


@torch.no_grad()
def test_corrections_of_routers_stay_in_float32_whatever_the_weights_are(tmp_path: Path) -> None:
    save_theirs("deepseek-v3", tmp_path)
    ours = load_model(tmp_path)
    expected = {name: each for name, each in ours.named_buffers() if name.endswith("correction")}
    for narrow in (ours.to(torch.bfloat16), load_model(tmp_path, dtype=torch.bfloat16)):
        assert {each.dtype for each in narrow.parameters()} == {torch.bfloat16}
        assert len(expected) == 3
        assert all(narrow.get_buffer(name).equal(each) for name, each in expected.items())
