"""Dropout of a transformer: in training alone, and as a folder's configuration says."""

import pytest
import torch
from torch import Tensor

from shardwise.errors import ShardwiseError
from shardwise.nets.hf.catalogue import FAMILIES, config_for
from shardwise.nets.hf.entries import Entries
from shardwise.nets.initialise import initialise
from shardwise.nets.settings import Dropout, Heads, Mlp, Settings
from shardwise.nets.transformer import Transformer
from tests.nets.small import LATENT, MIXTURE, small

TOKENS = torch.arange(24).view(2, 12)
GPT2 = {
    "attention": Heads(num_heads=4, num_kv_heads=4, head_dim=8, qkv_bias=True, output_bias=True),
    "mlp": Mlp(width=48, activation="gelu_tanh", gated=False, bias=True),
    "rope": None,
    "norm": "layer",
}


def logits_of(settings: Settings, *, trains: bool) -> Tensor:
    model = Transformer(settings)
    initialise(model, seed=1)
    torch.manual_seed(2)
    found: Tensor = model.train(trains)(TOKENS)
    return found


@pytest.mark.parametrize("where", ["embedding", "attention", "residual"])
@pytest.mark.parametrize("changed", [{}, {"attention": LATENT, "mixture": MIXTURE}])
def test_each_kind_drops_in_training_and_not_in_evaluation(where: str, changed: dict[str, object]) -> None:
    plain, wet = small(**changed), small(**changed, dropout=Dropout(**{where: 0.5}))
    expected = logits_of(plain, trains=True)
    assert not torch.allclose(logits_of(wet, trains=True), expected, rtol=1e-2)
    assert torch.equal(logits_of(wet, trains=False), logits_of(plain, trains=False))
    torch.testing.assert_close(logits_of(plain, trains=False), expected)


def test_each_kind_has_its_own_entry_in_the_configuration_of_gpt2() -> None:
    settings = small(**GPT2, dropout=Dropout(embedding=0.1, attention=0.2, residual=0.3))
    family, config = config_for(settings)
    assert family.name == "gpt2"
    assert (config["embd_pdrop"], config["attn_pdrop"], config["resid_pdrop"]) == (0.1, 0.2, 0.3)
    assert family.read(Entries(config)) == settings
    without = {key: each for key, each in config.items() if not key.endswith("pdrop")}
    assert family.read(Entries(without)).dropout == Dropout()


def test_gated_families_drop_weights_of_attention_alone() -> None:
    family, config = config_for(small(dropout=Dropout(attention=0.2)))
    assert (family.name, config["attention_dropout"]) == ("llama", 0.2)
    with pytest.raises(ShardwiseError, match=r"a config\.json of llama cannot say dropout="):
        FAMILIES["llama"].config(small(dropout=Dropout(residual=0.2)))


@pytest.mark.parametrize("probability", [-0.1, 1.0])
def test_a_probability_is_less_than_one(probability: float) -> None:
    with pytest.raises(ShardwiseError, match="dropout of residual with a probability of") as caught:
        Dropout(residual=probability)
    assert caught.value.remedy == "residual=0.1, or 0"
