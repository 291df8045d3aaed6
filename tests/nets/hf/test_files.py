"""Folders of Hugging Face read and written: every tensor to the bit, and no byte that was not asked for."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor

from shardwise.nets.hf import Checkpoint, load, load_model, save
from shardwise.nets.transformer import Transformer
from shardwise.nets.weights import weights_of
from tests.nets.families import CONFIGS, save_theirs, tokens

every_family = pytest.mark.parametrize("family", CONFIGS)


def all_tensors(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_files(found: Path, expected: Path) -> None:
    ours, theirs = all_tensors(found), all_tensors(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not ours[name].equal(theirs[name])] == []
    assert {each.dtype for each in ours.values()} == {each.dtype for each in theirs.values()}


def half_of(number: int, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The first or second half along the last dim that can be halved; for some, along the first."""
    dims = [dim for dim, size in enumerate(shape) if size % 2 == 0]
    dim = dims[0] if "q_proj" in name or "up_proj" in name else dims[-1]
    size = shape[dim] // 2
    return tuple(
        slice(number * size, (number + 1) * size) if each == dim else slice(None) for each in range(len(shape))
    )


def on_meta(folder: Path) -> Transformer:
    with Checkpoint(folder) as checkpoint, torch.device("meta"):
        return Transformer(checkpoint.settings)


@every_family
def test_what_is_loaded_and_saved_is_every_tensor_to_the_bit(family: str, tmp_path: Path) -> None:
    save_theirs(family, tmp_path / "theirs")
    with Checkpoint(tmp_path / "theirs") as checkpoint:
        name = checkpoint.family
    save(load_model(tmp_path / "theirs"), tmp_path / "ours", family=name)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@every_family
@torch.no_grad()
def test_transformers_loads_what_was_saved_to_the_same_logits(family: str, tmp_path: Path) -> None:
    theirs = save_theirs(family, tmp_path / "theirs")
    save(load_model(tmp_path / "theirs"), tmp_path / "ours", shard_bytes=20_000, extra={"eos_token_id": 3})
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert again.config.eos_token_id == 3
    ids = tokens(length=40)
    assert again(ids).logits.equal(theirs(ids).logits)


@every_family
def test_files_in_shards_are_read_and_written(family: str, tmp_path: Path) -> None:
    save_theirs(family, tmp_path / "theirs", max_shard_size="20KB")
    model = load_model(tmp_path / "theirs")
    save(weights_of(model), tmp_path / "ours", settings=model.settings, shard_bytes=30_000)
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    tensors = all_tensors(tmp_path / "ours")
    assert index["metadata"]["total_size"] == sum(each.numel() * each.element_size() for each in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_experts_in_one_tensor_are_read(family: str, tmp_path: Path) -> None:
    save_theirs(family, tmp_path / "apart")
    save_theirs(family, tmp_path / "stacked", save_original_format=False)
    assert any(name.endswith("gate_up_proj") for name in all_tensors(tmp_path / "stacked"))
    apart, stacked = (load_model(tmp_path / how).state_dict() for how in ("apart", "stacked"))
    assert [name for name in apart if not apart[name].equal(stacked[name])] == []


@pytest.mark.parametrize(
    ("family", "stacked"),
    [
        *(pytest.param(family, False, marks=pytest.mark.whole if at % 3 else ()) for at, family in enumerate(CONFIGS)),
        pytest.param("mixtral", True, marks=pytest.mark.whole),
        ("deepseek-v3", True),
    ],
)
def test_two_ranks_read_their_halves_and_no_more(family: str, stacked: bool, tmp_path: Path) -> None:
    save_theirs(family, tmp_path, save_original_format=not stacked)
    whole = load_model(tmp_path)
    all_bytes = sum(each.numel() * 4 for each in all_tensors(tmp_path).values())
    for number in range(2):
        module = on_meta(tmp_path)
        for name, each in weights_of(module).items():
            part = each[half_of(number, name, tuple(each.shape))]
            owner, _, key = name.rpartition(".")
            held = module.get_submodule(owner)
            setattr(held, key, torch.nn.Parameter(part) if isinstance(each, torch.nn.Parameter) else part)
        if whole.settings.tied:
            module.head.weight = module.embed.weight
        assert load(tmp_path, module, slices=partial(half_of, number)) == all_bytes // 2
        for name, each in weights_of(whole).items():
            assert weights_of(module)[name].equal(each[half_of(number, name, tuple(each.shape))])


def test_only_the_asked_weights_are_read(tmp_path: Path) -> None:
    save_theirs("deepseek-v3", tmp_path, max_shard_size="20KB")
    whole, module = load_model(tmp_path), on_meta(tmp_path)
    only = [name for name in weights_of(whole) if name.startswith("layers.2.")]
    assert load(tmp_path, module, only=only) == sum(weights_of(whole)[name].numel() * 4 for name in only)
    for name, each in weights_of(module).items():
        assert each.is_meta == (name not in only)
        assert each.is_meta or each.equal(weights_of(whole)[name])


def test_files_without_an_asked_weight_need_not_be_there(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path, max_shard_size="20KB")
    homes = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    last = {file for tensor, file in homes.items() if tensor.startswith("model.layers.3.")}
    for file in set(homes.values()) - last:
        (tmp_path / file).unlink()
    module = on_meta(tmp_path)
    load(tmp_path, module, only=[name for name in weights_of(module) if name.startswith("layers.3.")])
    assert not module.get_parameter("layers.3.mlp.up_proj.weight").is_meta


@every_family
def test_any_part_of_any_weight_can_be_read(family: str, tmp_path: Path) -> None:
    save_theirs(family, tmp_path)
    whole = weights_of(load_model(tmp_path))
    generator = torch.Generator().manual_seed(0)
    with Checkpoint(tmp_path) as checkpoint:
        for name, weight in whole.items():
            ends = [sorted(torch.randint(0, size + 1, (2,), generator=generator).tolist()) for size in weight.shape]
            region = tuple(slice(*each) for each in ends)
            before = checkpoint.bytes_read
            part = checkpoint.read(name, region)
            assert part.equal(weight[region])
            assert checkpoint.bytes_read - before == part.numel() * 4


def test_a_loaded_module_keeps_its_memory_its_types_and_its_ties(tmp_path: Path) -> None:
    save_theirs("llama, tied", tmp_path)
    module = Transformer(load_model(tmp_path).settings).to(torch.float64)
    before: dict[str, Any] = {name: each.data_ptr() for name, each in module.named_parameters()}
    load(tmp_path, module)
    assert before == {name: each.data_ptr() for name, each in module.named_parameters()}
    assert {each.dtype for each in module.parameters()} == {torch.float64}
    from_meta = on_meta(tmp_path)
    load(tmp_path, from_meta)
    assert from_meta.head.weight is from_meta.embed.weight
    assert from_meta.embed.weight.requires_grad
