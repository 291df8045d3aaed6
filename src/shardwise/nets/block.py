"""One block: attention and a feed-forward layer, each after a norm and with a residual."""

from torch import Tensor, nn

from shardwise.nets.attention import Attention
from shardwise.nets.cache import Cache
from shardwise.nets.feedforward import FeedForward
from shardwise.nets.latent import LatentAttention
from shardwise.nets.mask import AttentionMask
from shardwise.nets.moe import MoE
from shardwise.nets.norm import add_normed, normed
from shardwise.nets.rotary import Rotation
from shardwise.nets.settings import Latent, Settings


def make_norm(settings: Settings) -> nn.Module:
    kind = nn.RMSNorm if settings.norm == "rms" else nn.LayerNorm
    return kind(settings.width, settings.norm_epsilon)


def make_dropout(probability: float) -> nn.Module:
    """Return a dropout layer. Without dropout it is an identity: torch's layer would copy its input."""
    return nn.Dropout(probability) if probability else nn.Identity()


class Block(nn.Module):
    """One block. `balance` is the sum of balancing losses so far, or None. It is passed along with the hidden states,
    so that a pipeline carries it to the loss."""

    def __init__(self, settings: Settings, layer: int) -> None:
        super().__init__()
        is_latent = isinstance(settings.attention, Latent)
        self.attention_norm = make_norm(settings)
        self.attention = LatentAttention(settings, layer) if is_latent else Attention(settings, layer)
        self.attention_dropout = make_dropout(settings.dropout.residual)
        self.mlp_norm = make_norm(settings)
        self.mlp = MoE(settings) if settings.is_mixture(layer) else FeedForward(settings.width, settings.mlp)
        self.mlp_dropout = make_dropout(settings.dropout.residual)
        self.kernels = True

    def forward(
        self,
        hidden: Tensor,
        balance: Tensor | None,
        rotation: Rotation | None,
        mask: AttentionMask,
        cache: Cache | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        attended = self.attention(normed(self.attention_norm, hidden, kernels=self.kernels), rotation, mask, cache)
        attended = self.attention_dropout(attended)
        given, hidden = add_normed(self.mlp_norm, attended, hidden, kernels=self.kernels)
        if not isinstance(self.mlp, MoE):
            return hidden + self.mlp_dropout(self.mlp(given)), balance
        output, auxiliary = self.mlp(given)
        total = balance if auxiliary is None or balance is None else balance + auxiliary
        return hidden + self.mlp_dropout(output), total
