"""First values depend on the seed and the name, and on nothing else."""

import math
from functools import partial

import pytest
import torch

from shardwise.errors import ShardwiseError
from shardwise.nets.initialise import initialise
from shardwise.nets.settings import Rope, Settings
from shardwise.nets.transformer import Transformer
from shardwise.nets.weights import weights_of
from tests.nets.families import tokens
from tests.nets.small import LATENT, MIXTURE, small

SETTINGS = small(attention=LATENT, mixture=MIXTURE, tied=True)


def on_meta(settings: Settings) -> Transformer:
    with torch.device("meta"):
        return Transformer(settings)


def made(settings: Settings = SETTINGS, seed: int = 3) -> Transformer:
    module = on_meta(settings)
    initialise(module, seed)
    return module


def halves(number: int, name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
    del name
    half = slice(number * (shape[0] // 2), (number + 1) * (shape[0] // 2))
    return (half, *(slice(None) for _ in shape[1:]))


def test_a_model_on_the_meta_device_and_one_with_values_become_the_same() -> None:
    torch.manual_seed(17)
    there = Transformer(SETTINGS)
    initialise(there, seed=3)
    other = made().state_dict()
    assert all(each.equal(other[name]) for name, each in there.state_dict().items())
    assert there(tokens()).equal(made()(tokens()))


def test_each_weight_is_the_same_whichever_others_are_made() -> None:
    whole = weights_of(made())
    for name in list(whole)[::7]:
        module = on_meta(SETTINGS)
        initialise(module, 3, only=[name])
        weights = weights_of(module)
        assert weights[name].equal(whole[name])
        assert [other for other, each in weights.items() if not each.is_meta] == [name]


def test_a_part_of_a_weight_is_a_part_of_the_whole_one() -> None:
    settings = small(vocabulary=96)
    whole = weights_of(made(settings))
    for number in range(2):
        module = on_meta(settings)
        for name, each in weights_of(module).items():
            owner, _, key = name.rpartition(".")
            part = each.detach()[halves(number, name, tuple(each.shape))]
            setattr(module.get_submodule(owner), key, torch.nn.Parameter(part))
        initialise(module, 3, slices=partial(halves, number))
        for name, each in weights_of(module).items():
            assert each.equal(whole[name][halves(number, name, tuple(whole[name].shape))])


def test_another_seed_and_another_name_give_other_numbers() -> None:
    first, second = weights_of(made()), weights_of(made(seed=4))
    drawn = [name for name, each in first.items() if each.detach().std() > 0]
    assert len(drawn) > 20
    assert [name for name in drawn if first[name].equal(second[name])] == []
    one, other = (first[f"layers.{layer}.mlp.experts.up_proj"] for layer in (0, 1))
    assert not one.equal(other)


def test_spread_is_that_of_gpt2_and_smaller_where_residuals_add_up() -> None:
    weights = weights_of(made(small(attention=LATENT, mixture=MIXTURE)))
    for name, deviation in {
        "embed.weight": 0.02,
        "layers.1.mlp.experts.up_proj": 0.02,
        "layers.1.mlp.experts.down_proj": 0.02 / math.sqrt(8),
        "layers.1.attention.o_proj.weight": 0.02 / math.sqrt(8),
    }.items():
        assert float(weights[name].detach().std()) == pytest.approx(deviation, rel=0.1)
    assert bool((weights["layers.1.attention.kv_a_norm.weight"] == 1).all())


def test_ties_stay() -> None:
    module = made()
    assert module.head.weight is module.embed.weight


def test_settings_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ShardwiseError, match="latent attention has rotary positions, and rope is None"):
        small(attention=LATENT, rope=None)
    with pytest.raises(ShardwiseError, match="experts are gated and have no bias"):
        small(mixture=MIXTURE, mlp=small().mlp.__class__(width=8, gated=False))


def test_more_tokens_than_learned_positions_are_refused() -> None:
    with pytest.raises(ShardwiseError, match="a sequence of 65 tokens is longer than the 64 learned positions"):
        made(small(rope=None))(tokens(length=65))
    assert made(small(rope=Rope()))(tokens(length=65)).shape == (2, 65, 97)
