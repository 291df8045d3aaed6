"""Weights in fewer bits: as close as their bits allow, on one device and on ranks."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.kernels.narrow import RUN, make_narrow
from shardwise.ranks.spawn import Ranks
from shardwise.serving import assemble
from shardwise.serving.device_runner import DeviceRunner
from shardwise.serving.limits import Limits
from shardwise.serving.load import load_engine
from shardwise.serving.narrow_weights import num_parameters
from shardwise.serving.sharded import load_sharded
from tests.nets.families import save_theirs
from tests.serving.answers import answer, ask, both, engine_over, prompts


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("shape", [(8, 256), (3, 5, 100), (4, 33)])
def test_a_weight_comes_back_within_half_a_step(kind: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    narrow = make_narrow(weight, kind)
    apart = (narrow.wide() - weight).abs()
    if kind == "fp8":  # Three bits behind the leading one: half a step is a sixteenth; or of the smallest numbers.
        assert (apart <= weight.abs() / 16 + weight.abs().amax(-1, keepdim=True) / 448 / 512).all()
        assert narrow.codes.nbytes == -(-shape[-1] // RUN) * RUN * weight[..., 0].numel()
    else:
        step = (weight.amax() - weight.amin()) / 15
        assert apart.max() <= step / 2 + 1e-4
        assert narrow.codes.nbytes == -(-shape[-1] // RUN) * RUN // 2 * weight[..., 0].numel()
    assert torch.equal(make_narrow(torch.zeros(shape), kind).wide(), torch.zeros(shape))


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_they_are_counted_and_serve(family: str, tmp_path: Path) -> None:
    save_theirs(family, tmp_path)
    found = {
        kind: load_engine(tmp_path, kv_bytes=2**20, block_size=4, weights=kind, device="cpu")
        for kind in (None, "fp8", "int4")
    }
    counts = {each.summary.num_parameters for each in found.values()}
    assert len(counts) == 1
    plain, eight, four = (each.summary.weight_bytes for each in found.values())
    assert four < plain
    # Runs of 128 inputs: experts of 32 have three quarters of theirs for nothing.
    assert eight < plain or family == "qwen3-moe"
    assert found["int4"].summary.precision == "float32, weights in int4"
    given = prompts(3)
    for engine in found.values():
        assert all(len(each) == 4 for each in answer(engine, [ask(each, str(each), 4) for each in given]))


@pytest.mark.parametrize(("family", "kind"), [("qwen2, windows", "fp8"), ("qwen3", "int4"), ("gpt2", "int4")])
def test_the_layers_of_a_gpu_read_them_as_they_are_kept(
    family: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here by definitions: biases, norms of heads, no gate. What is multiplied together lies in one piece, once."""
    model = deepcopy(both(family)[1])
    given = [ask(prompt, f"r{number}") for number, prompt in enumerate(prompts(5))]
    plain = engine_over(model, weights=kind)
    wanted = answer(plain, given)
    monkeypatch.setattr(assemble, "make_runner", partial(DeviceRunner, kernels=False))
    fast = engine_over(model)
    assert answer(fast, given) == wanted
    assert fast.overlaps
    assert fast.summary.weight_bytes == plain.summary.weight_bytes
    attention: Any = model.layers[0].attention
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert len({layer.narrow.codes.untyped_storage().data_ptr() for layer in layers}) == 1


def test_ranks_keep_their_parts_narrow_and_give_the_tokens_of_one_device(two: Ranks, tmp_path: Path) -> None:
    """fp8 has a scale for each output: rows that are cut have the same, so pipelines and one device agree."""
    save_theirs("llama", tmp_path)
    one = load_engine(tmp_path, kv_bytes=2**20, block_size=4, weights="fp8", device="cpu")
    limits = Limits(kv_bytes=2**20, block_size=4, weights="fp8", token_budget=24, max_running=24)
    ranked = load_sharded(str(tmp_path), "pp=2", limits, ranks=two)
    given = [ask(each, str(number), 6) for number, each in enumerate(prompts(3))]
    assert answer(ranked, given) == answer(one, given)
    assert ranked.summary.num_parameters == one.summary.num_parameters == num_parameters(one.runner._part.model)  # type: ignore[union-attr]
    ranked.close()


def test_other_names_are_refused() -> None:
    with pytest.raises(ShardwiseError, match="weights"):
        load_engine("llama-3.1-8b", random_weights=True, weights="int3")
