"""GGUF files, where the package that reads them is installed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.serving.gguf_file import to_theirs
from shardwise.serving.load import load_engine
from tests.nets.families import make_theirs
from tests.serving.answers import answer, ask, expected, prompts

gguf = pytest.importorskip("gguf")


def beside(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of a projection as such files have Llama's: the two numbers of a pair beside each other."""
    return weight.view(num_heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def test_names_are_those_of_the_files() -> None:
    assert to_theirs("layers.3.attention.q_proj.weight") == "blk.3.attn_q.weight"
    assert to_theirs("layers.0.mlp.down_proj.weight") == "blk.0.ffn_down.weight"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_file_answers_as_transformers_does_with_the_same_weights(tmp_path: Path) -> None:
    theirs: Any = make_theirs("llama, tied")
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(32)
    writer.add_block_count(4)
    writer.add_context_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_feed_forward_length(48)
    writer.add_layer_norm_rms_eps(theirs.config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_eos_token_id(95)
    writer.add_eot_token_id(96)
    from shardwise.nets.hf.catalogue import FAMILIES
    from shardwise.nets.hf.entries import Entries
    from shardwise.nets.hf.naming import LLAMA, Naming
    from shardwise.nets.weights import shapes_of

    settings = FAMILIES["llama"].read(Entries(theirs.config.to_dict()))
    naming, held = Naming(parts=LLAMA, is_stacked=False), dict(theirs.state_dict())
    for name in shapes_of(settings):
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
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    engine = load_engine(path, kv_bytes=2**20, device="cpu")
    assert engine.eos_token_ids == {95, 96}, "a turn may end otherwise than a text"
    engine.eos_token_ids = frozenset()
    given = prompts(3)
    found = answer(engine, [ask(prompt, f"r{number}") for number, prompt in enumerate(given)])
    assert found == [expected(theirs, prompt) for prompt in given]
