"""GGUF files, where the package that reads them is installed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.nets.hf.catalogue import FAMILIES
from shardwise.nets.hf.entries import Entries
from shardwise.nets.hf.naming import LLAMA, Naming
from shardwise.nets.weights import shapes_of
from shardwise.serving.gguf_file import to_theirs
from shardwise.serving.load import load_engine
from tests.nets.families import make_theirs
from tests.serving.answers import answer, ask, expected, prompts

gguf = pytest.importorskip("gguf")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def beside(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of a projection as such files have Llama's: the two numbers of a pair beside each other."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def test_names_are_those_of_the_files() -> None:
    assert to_theirs("layers.3.attention.q_proj.weight") == "blk.3.attn_q.weight"
    assert to_theirs("layers.0.mlp.down_proj.weight") == "blk.0.ffn_down.weight"


def write_llama(path: Path, theirs: Any, more: dict[str, np.ndarray[Any, Any]] | None = None, **entries: int) -> None:
    """Write a model of transformers as such a file, with its weights as they are after quantisation, and more."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(32)
    writer.add_block_count(4)
    writer.add_context_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_feed_forward_length(48)
    writer.add_layer_norm_rms_eps(theirs.config.rms_norm_eps)
    writer.add_rope_freq_base(theirs.config.rope_parameters["rope_theta"])
    writer.add_eos_token_id(95)
    writer.add_eot_token_id(96)
    for key, value in entries.items():
        writer.add_uint32(f"llama.{key.replace('__', '.')}", value)
    settings = FAMILIES["llama"].read(Entries(theirs.config.to_dict()))
    naming, held = Naming(parts=LLAMA, is_stacked=False), dict(theirs.state_dict())
    for name in shapes_of(settings):
        if name == "head.weight" and settings.tied:
            continue
        weight = held[naming.translate(name)].clone()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = beside(weight, 4 if "q_proj" in name else 2)
        kind = gguf.GGMLQuantizationType.Q8_0
        numbers = np.ascontiguousarray(weight.numpy())
        if weight.dim() == 2 and weight.shape[1] % 32 == 0:
            packed = gguf.quantize(numbers, kind)
            writer.add_tensor(to_theirs(name), packed, raw_dtype=kind)
            weight = torch.from_numpy(gguf.dequantize(packed, kind).copy())
        else:
            writer.add_tensor(to_theirs(name), numbers)
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # Back to where transformers has them.
            heads = 4 if "q_proj" in name else 2
            weight = weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        with torch.no_grad():
            held[naming.translate(name)].copy_(weight)
    for name, each in (more or {}).items():
        writer.add_tensor(name, each)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_answers_are_equal(path: Path, theirs: Any) -> None:
    engine = load_engine(path, kv_bytes=2**20, device="cpu")
    assert engine.eos_token_ids == {95, 96}, "a turn may end otherwise than a text"
    engine.eos_token_ids = frozenset()
    given = prompts(3)
    found = answer(engine, [ask(prompt, f"r{number}") for number, prompt in enumerate(given)])
    assert found == [expected(theirs, prompt) for prompt in given]


def test_a_file_answers_as_transformers_does_with_the_same_weights(tmp_path: Path) -> None:
    theirs: Any = make_theirs("llama, tied")
    write_llama(tmp_path / "small.gguf", theirs)
    assert_answers_are_equal(tmp_path / "small.gguf", theirs)


def test_divisors_of_frequencies_are_used(tmp_path: Path) -> None:
    # The form in which files have the positions of Llama 3.1 and later: nothing else in them tells of it.
    theirs: Any = make_theirs("llama")
    plain = theirs.config.rope_parameters["rope_theta"] ** -(torch.arange(0, 8, 2) / 8)
    divisors = (plain / theirs.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert divisors.max() > 2
    write_llama(tmp_path / "small.gguf", theirs, {"rope_freqs.weight": divisors})
    assert_answers_are_equal(tmp_path / "small.gguf", theirs)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"expert_count": 8}, "llama.expert_count=8, and only 0 is computed"),
        ({"rope__dimension_count": 4}, "llama.rope.dimension_count=4, and only 8 is computed"),
        ({"attention__value_length": 16}, "llama.attention.value_length=16, and only 8 is computed"),
        ({}, "has tensors that are not read: blk.0.attn_q.bias2"),
    ],
)
def test_what_a_file_has_beyond_what_is_computed_is_refused(entries: Any, said: str, tmp_path: Path) -> None:
    more = {} if entries else {"blk.0.attn_q.bias2": np.zeros(32, np.float32)}
    write_llama(tmp_path / "small.gguf", make_theirs("llama, tied"), more, **entries)
    with pytest.raises(ShardwiseError, match=said):
        load_engine(tmp_path / "small.gguf", kv_bytes=2**20, device="cpu")


def test_a_file_of_no_language_model_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "llama")
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_tensor("a", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ShardwiseError, match=r"small\.gguf lacks token_embd\.weight"):
        load_engine(tmp_path / "small.gguf", kv_bytes=2**20, device="cpu")
