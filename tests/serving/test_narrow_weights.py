"""Weights in fewer bits: as close as their bits allow, on one device and on ranks."""

from pathlib import Path

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.ranks.spawn import Ranks
from shardwise.serving.limits import Limits
from shardwise.serving.load import load_engine
from shardwise.serving.narrow_weights import Narrow, num_parameters
from shardwise.serving.sharded import load_sharded
from tests.nets.families import save_theirs
from tests.serving.answers import answer, ask, prompts


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("shape", [(8, 64), (3, 5, 100), (4, 33)])
def test_a_weight_comes_back_within_half_a_step(kind: str, shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    narrow = Narrow(weight, kind)
    apart = (narrow.wide() - weight).abs()
    if kind == "fp8":  # Three bits behind the leading one: half a step is a sixteenth; or of the smallest numbers.
        assert (apart <= weight.abs() / 16 + weight.abs().amax(-1, keepdim=True) / 448 / 512).all()
        assert narrow.codes.element_size() == 1
    else:
        step = (weight.amax() - weight.amin()) / 15
        assert apart.max() <= step / 2 + 1e-4
        assert narrow.codes.numel() == -(-shape[-1] // 64) * 32 * weight[..., 0].numel()
    assert torch.equal(Narrow(torch.zeros(shape), kind).wide(), torch.zeros(shape))


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
    assert max(four, eight) < plain
    assert four < eight or family != "llama"  # Experts of 24 inputs have a scale for each.
    assert found["int4"].summary.precision == "float32, weights in int4"
    given = prompts(3)
    for engine in found.values():
        assert all(len(each) == 4 for each in answer(engine, [ask(each, str(each), 4) for each in given]))


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
