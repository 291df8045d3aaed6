"""Small models of our own, to change one setting at a time."""

from typing import Any

from shardwise.nets.settings import Heads, Latent, Mixture, Mlp, Settings

HEADS = Heads(num_heads=4, num_kv_heads=2, head_dim=8)
LATENT = Latent(num_heads=4, q_rank=12, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=6)
MIXTURE = Mixture(num_experts=6, num_chosen=2, width=16)


def small(**changed: Any) -> Settings:
    given: dict[str, Any] = {
        "vocabulary": 97,
        "width": 32,
        "num_layers": 4,
        "length": 64,
        "attention": HEADS,
        "mlp": Mlp(width=48),
        **changed,
    }
    return Settings(**given)
