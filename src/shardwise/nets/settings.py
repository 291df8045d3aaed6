"""What a transformer is: its sizes and its choices, as values. No tensor and no device."""

from dataclasses import dataclass
from typing import Literal

from shardwise.errors import ShardwiseError

Activation = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3:
    """Llama 3.1: long waves divided by a factor, short ones left alone, and a ramp between.

    A wave is long if it turns fewer than `low_turns` times in `original_length` tokens, and short if it turns more than
    `high_turns` times.
    """

    factor: float
    low_turns: float
    high_turns: float
    original_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN (Peng et al. 2023): the ramp of section 3.2, and logits made sharper as in section 3.4.

    `magnitude` and `magnitude_all` are DeepSeek's `mscale` and `mscale_all_dim`.
    """

    factor: float
    original_length: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    magnitude: float | None = None
    magnitude_all: float | None = None
    attention_factor: float | None = None
    #: Whether the ends of the ramp are whole dimensions.
    rounded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions. The two numbers of a pair lie next to each other if `interleaved`, else half a head apart."""

    theta: float = 10000.0
    scaling: Linear | Llama3 | Yarn | None = None
    interleaved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Attention by heads. With fewer heads of keys and values than of queries it is GQA."""

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
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values are kept as one short vector a token.

    A head of queries and keys has `nope_dim` numbers without position and `rope_dim` rotated ones, which all heads of
    keys share. Queries go through a short vector too, of `q_rank`, unless that is None.
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

    Experts are chosen by their scores, by sigmoid or softmax. With `num_groups` they are chosen only from the best
    `num_chosen_groups` of these. `correction` adds a number to each expert's score for choosing alone; balancing by
    bias moves it. Chosen scores are made to sum to 1 if `normalised`, then multiplied by `scale`.
    """

    num_experts: int
    num_chosen: int
    #: Of one expert; shared experts are one MLP of `num_shared` times that.
    width: int
    num_shared: int = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    normalised: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    #: The most tokens of one expert, as a multiple of its even share; None drops no token.
    capacity: float | None = None
    #: Weight of the balancing loss. If it is not 0, the model returns that loss beside its logits.
    auxiliary: float = 0.0
    #: Layers that are dense all the same.
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
    """What is dropped at random in training: numbers of the embeddings, weights of attention, and numbers that are
    about to be added to the residual. Each is a probability."""

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
    #: The longest sequence that it is meant for. With learned positions there can be none longer.
    length: int
    attention: Heads | Latent
    mlp: Mlp
    mixture: Mixture | None = None
    #: None: positions are learned.
    rope: Rope | None = Rope()
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = 1e-6
    #: How many tokens a query sees, itself included, in `windowed_layers` (None: in every layer).
    window: int | None = None
    windowed_layers: tuple[int, ...] | None = None
    #: Whether the head is the embedding.
    tied: bool = False
    dropout: Dropout = Dropout()

    def __post_init__(self) -> None:
        if isinstance(self.attention, Latent) and self.rope is None:
            raise ShardwiseError("latent attention has rotary positions, and rope is None", remedy="rope=Rope()")
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
        """How many numbers of a head are rotated."""
        return self.attention.rope_dim if isinstance(self.attention, Latent) else self.attention.head_dim

    @property
    def has_correction(self) -> bool:
        return self.mixture is not None and self.mixture.correction

    @property
    def has_auxiliary(self) -> bool:
        return self.mixture is not None and self.mixture.auxiliary != 0
