"""The sizes and options of a transformer, as values. No tensors and no devices."""

from dataclasses import dataclass
from typing import Literal

from shardwise.errors import ShardwiseError

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Positions are divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """Llama 3.1: low frequencies are divided by a factor, high ones stay, with a ramp between.

    A frequency is low if it turns fewer than `low_turns` times in `original_length` tokens, and high if it turns more
    than `high_turns` times.
    """

    factor: float
    low_turns: float
    high_turns: float
    original_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al. 2023): the ramp of section 3.2, and the sharper logits of section 3.4.

    `magnitude` and `magnitude_all` are DeepSeek's `mscale` and `mscale_all_dim`.
    """

    factor: float
    original_length: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    magnitude: float | None = None
    magnitude_all: float | None = None
    attention_factor: float | None = None
    #: Whether the ends of the ramp are rounded to whole dims.
    rounded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """The frequency of each pair is divided by a number of its own, as GGUF files have it."""

    by: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions. The two numbers of a pair are adjacent if `interleaved`, otherwise half a head apart."""

    theta: float = 10000.0
    scaling: Linear | Llama3 | Yarn | Divided | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Multi-head attention. With fewer key and value heads than query heads it is GQA."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    #: RMS norms of queries and keys, within each head (Qwen3).
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ShardwiseError(
                f"{self.num_heads} heads of queries cannot share {self.num_kv_heads} heads of keys and values evenly",
                remedy=f"a number of KV heads that divides {self.num_heads}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values are cached as one short vector per token.

    A head of queries and keys has `nope_dim` numbers without position and `rope_dim` rotated ones, which all key heads
    share. Queries go through a short vector too, of `q_rank`, unless that is None.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """The dense layers: down(activation(gate) * up), or down(activation(up)) if not `gated`."""

    width: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Mixture of experts. Each token goes to `num_chosen` of `num_experts`, and to all `num_shared`.

    Experts are chosen by their scores, sigmoid or softmax. With `num_groups` they are chosen only from the best
    `num_chosen_groups` groups. `correction` adds a number to each expert's score for the choice only; bias-based
    balancing moves it. Chosen scores are normalised to a sum of 1 if `normalised`, then multiplied by `scale`.
    """

    num_experts: int
    num_chosen: int
    #: The width of one expert; shared experts are one MLP of `num_shared` times that.
    width: int
    num_shared: int = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    normalised: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    #: The maximum number of tokens of one expert, as a multiple of its even share; None drops no token.
    capacity: float | None = None
    #: The weight of the balancing loss. If it is not 0, the model returns that loss with its logits.
    auxiliary: float = 0.0
    #: Layers with a dense MLP instead of experts.
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.num_chosen <= self.num_experts:
            raise ShardwiseError(
                f"a token cannot go to {self.num_chosen} of {self.num_experts} experts",
                remedy=f"num_chosen from 1 to {self.num_experts}",
            )
        if self.num_experts % self.num_groups or not 1 <= self.num_chosen_groups <= self.num_groups:
            raise ShardwiseError(
                f"{self.num_experts} experts in {self.num_groups} groups, of which {self.num_chosen_groups} are chosen,"
                " is not possible",
                remedy=f"num_groups that divides {self.num_experts}, and at most as many chosen",
            )
        reachable = self.num_experts // self.num_groups * self.num_chosen_groups
        if self.num_chosen > reachable:
            raise ShardwiseError(
                f"{self.num_chosen_groups} of {self.num_groups} groups have {reachable} experts, and a token is to go"
                f" to {self.num_chosen}",
                remedy="more num_chosen_groups, or a smaller num_chosen",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """Dropout probabilities in training: of the embeddings, of attention weights, and of what is added to the
    residual."""

    embedding: float = 0.0
    attention: float = 0.0
    residual: float = 0.0

    def __post_init__(self) -> None:
        for what in ("embedding", "attention", "residual"):
            if not 0 <= getattr(self, what) < 1:
                raise ShardwiseError(
                    f"dropout of {what} with a probability of {getattr(self, what)}", remedy=f"{what}=0.1, or 0"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One transformer. `shardwise.nets.hf` reads it from a `config.json`."""

    vocabulary: int
    width: int
    num_layers: int
    #: The longest sequence that the model is meant for. Learned positions allow none longer.
    length: int
    attention: Heads | Latent
    mlp: Mlp
    mixture: Mixture | None = None
    #: None: learned positions.
    rope: Rope | None = Rope()
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = 1e-6
    #: How many tokens a query sees, itself included, in `windowed_layers` (None: in every layer).
    window: int | None = None
    windowed_layers: tuple[int, ...] | None = None
    #: Whether the head shares the embedding's weight.
    tied: bool = False
    dropout: Dropout = Dropout()

    def __post_init__(self) -> None:
        if isinstance(self.attention, Latent) and self.rope is None:
            raise ShardwiseError("latent attention has rotary positions, and rope is None", remedy="rope=Rope()")
        if self.rope is not None and self.rotated_dim % 2:
            raise ShardwiseError(
                f"positions rotate pairs of numbers, and a head has {self.rotated_dim} to rotate",
                remedy=f"heads of {self.rotated_dim + 1} or {self.rotated_dim - 1}",
            )
        if self.mixture is not None and (self.mlp.bias or not self.mlp.gated):
            raise ShardwiseError(
                "experts are gated and have no bias, and the mlp is not gated or has one",
                remedy="Mlp(gated=True, bias=False)",
            )

    def is_windowed(self, layer: int) -> bool:
        return self.window is not None and (self.windowed_layers is None or layer in self.windowed_layers)

    def is_mixture(self, layer: int) -> bool:
        return self.mixture is not None and layer not in self.mixture.dense_layers

    @property
    def rotated_dim(self) -> int:
        """The number of rotated numbers of a head."""
        return self.attention.rope_dim if isinstance(self.attention, Latent) else self.attention.head_dim

    @property
    def has_correction(self) -> bool:
        return self.mixture is not None and self.mixture.correction

    @property
    def has_auxiliary(self) -> bool:
        return self.mixture is not None and self.mixture.auxiliary != 0
