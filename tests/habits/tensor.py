"""Programs of users under tensor parallelism: what people write in modules and losses, each against plain torch.

A program is a module, a batch and a loss, trained for two steps on one rank and on two. `PROGRAMS` has all of them by
name, and what is to become of each: everything cut that can be, some layers left whole, or a refusal.
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.wires import make_wires
from tests.stages.small import small_matrices

WORDS, WIDTH, HIDDEN, LENGTH = 32, 16, 24, 6

Loss = Callable[[Any, dict[str, Tensor]], Tensor]


def entropy(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The cross entropy as everybody writes it."""
    scores = output.logits if hasattr(output, "logits") else output
    return functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten())


def tokens() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randint(WORDS, (4, LENGTH)) for name in ("ids", "labels")}


class Feed(nn.Module):
    """Two layers, and what is written between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu, *, reads: int = HIDDEN) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(reads, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))


class Model(nn.Module):
    """An embedding, blocks with residuals, and a head."""

    def __init__(self, make: Callable[[], nn.Module] = Feed, *, num_blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def features(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.features(ids))


@dataclass(kw_only=True)
class Program:
    """What a user wrote. `whole`: layers that are to stay whole, by a part of their names; `refused`: what is said."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Loss] = lambda module: entropy
    batch: Callable[[], dict[str, Tensor]] = tokens
    whole: tuple[str, ...] = ()
    refused: str = ""
    plan: str = "tp=2"
    options: dict[str, Any] = field(default_factory=dict)
    #: Looks at what training has left: of the whole run, and of the one in parts.
    left: Callable[[nn.Module, Any], None] | None = None


PROGRAMS: dict[str, Program] = {}


def program(name: str, make: Callable[[], nn.Module], **rest: Any) -> None:
    assert name not in PROGRAMS, name
    PROGRAMS[name] = Program(make=make, **rest)


def feed(name: str, between: Callable[[Tensor], Tensor], *, reads: int = HIDDEN, whole: tuple[str, ...] = ()) -> None:
    program(name, lambda: Model(lambda: Feed(between, reads=reads)), whole=whole)


# -- Constants of the whole width -------------------------------------------------------------------------------------

ALL_OF_FEED = ("up", "down")


def _first_half_gates(h: Tensor) -> Tensor:
    return h[..., :12].sigmoid() * h[..., 12:]


def _negate_first(h: Tensor) -> Tensor:
    return torch.cat([-h[..., :8], h[..., 8:]], -1)


feed("the root of the number of channels", lambda h: h.relu() / math.sqrt(h.shape[-1]), whole=ALL_OF_FEED)
feed("one number for the number of channels", lambda h: h.tanh() * (8 / h.size(-1)), whole=ALL_OF_FEED)
feed("half of the channels gate the others", _first_half_gates, reads=12, whole=ALL_OF_FEED)
feed("half of the channels, by chunks", lambda h: math.prod(h.chunk(2, -1)), reads=12)  # type: ignore[arg-type]
feed("some channels are negated", _negate_first, whole=ALL_OF_FEED)
feed("channels are rolled", lambda h: h.relu().roll(5, -1), whole=ALL_OF_FEED)
feed("channels are flipped", lambda h: h.relu().flip(-1), whole=ALL_OF_FEED)
feed("a mean over groups of eight", lambda h: h.unflatten(-1, (-1, 8)).mean(-2), reads=8, whole=ALL_OF_FEED)
feed("a mean inside of groups of eight", lambda h: h.unflatten(-1, (-1, 8)).mean(-1), reads=3)
feed("a softmax over channels", lambda h: h.softmax(-1), whole=ALL_OF_FEED)
feed("a mean that is taken off", lambda h: h - h.mean(-1, keepdim=True), whole=ALL_OF_FEED)
feed("the largest channels only", lambda h: h * (h >= h.topk(4, -1).values[..., -1:]), whole=ALL_OF_FEED)
feed("a ramp over channels", lambda h: h * torch.linspace(0, 1, h.shape[-1], dtype=h.dtype), whole=ALL_OF_FEED)
feed("numbers of channels in float", lambda h: h * torch.arange(h.shape[-1]).float().cos(), whole=ALL_OF_FEED)
feed("every second channel", lambda h: h[..., ::2].relu(), reads=12, whole=ALL_OF_FEED)
feed("an interleaved gate", lambda h: h[..., ::2] * h[..., 1::2].sigmoid(), reads=12)
feed("a softplus and a square", lambda h: functional.softplus(h).square())
feed("a maxout", lambda h: h.unflatten(-1, (12, 2)).amax(-1), reads=12, whole=ALL_OF_FEED)


class Attention(nn.Module):
    """Attention as in tutorials. What the head count is called is up to who writes it."""

    def __init__(self, style: str = "num_heads") -> None:
        super().__init__()
        self.style, self.heads_are_four = style, True
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.d_k = WIDTH // 4
        if style in ("num_heads", "nhead", "H"):
            setattr(self, style, 4)
        if style == "scale":
            self.num_heads, self.embed_dim = 4, WIDTH

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.style == "literal width":
            q, k, v = (each.view(batch, length, -1, 4).transpose(1, 2) for each in (q, k, v))
        elif self.style == "literal":
            q, k, v = (each.view(batch, length, 4, -1).transpose(1, 2) for each in (q, k, v))
        elif self.style == "scale":
            q, k, v = (each.view(batch, length, -1, self.d_k).transpose(1, 2) for each in (q, k, v))
        else:
            heads = getattr(self, self.style)
            q, k, v = (each.view(batch, length, heads, -1).transpose(1, 2) for each in (q, k, v))
        width = self.embed_dim // self.num_heads if self.style == "scale" else q.shape[-1]
        scores = (q @ k.mT) / math.sqrt(width)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class SeparateAttention(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.name = name
        setattr(self, name, 4)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = getattr(self, self.name)
        q, k, v = (layer(x).view(batch, length, heads, width // heads) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)), is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, width))


class Norms(nn.Module):
    """A norm over the channels of each head, whose number is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.norm = nn.GroupNorm(4, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(self.norm(h.flatten(0, 1)).view_as(h))


program("heads in num_heads", lambda: Model(Attention))
program("heads in nhead", lambda: Model(lambda: Attention("nhead")))
program("heads in H", lambda: Model(lambda: Attention("H")))
program("heads as a literal", lambda: Model(lambda: Attention("literal")), whole=("qkv", "out"))
program("widths of heads as a literal", lambda: Model(lambda: Attention("literal width")))
program("a scale of embed_dim // num_heads", lambda: Model(lambda: Attention("scale")), whole=("qkv", "out"))
program("width // nhead of the input", lambda: Model(lambda: SeparateAttention("nhead")), whole=("q", "k", "v", "o"))
program("width // heads of the input", lambda: Model(lambda: SeparateAttention("heads")), whole=("q", "k", "v", "o"))
program("a norm of groups of channels", lambda: Model(Norms), whole=ALL_OF_FEED)


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


program("nn.MultiheadAttention", lambda: Model(TorchAttention))
program(
    "nn.TransformerEncoderLayer",
    lambda: Model(lambda: nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, dropout=0.0, batch_first=True)),
)

# -- What hangs on a layer --------------------------------------------------------------------------------------------


class BitLinear(nn.Linear):
    """Weights of -1, 0 and 1, with a scale of the whole matrix (as in BitNet)."""

    def forward(self, input: Tensor) -> Tensor:
        scale = self.weight.abs().mean()
        rounded = (self.weight / (scale + 1e-5)).round().clamp(-1, 1) * scale
        return functional.linear(input, self.weight + (rounded - self.weight).detach(), self.bias)


class LoraLinear(nn.Linear):
    """As loralib's: two small matrices beside the weight."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.lora_A = nn.Parameter(torch.randn(2, self.in_features) / 4)
        self.lora_B = nn.Parameter(torch.randn(self.out_features, 2) / 4)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + input @ self.lora_A.T @ self.lora_B.T


class NamedLinear(nn.Linear):
    """A subclass that changes nothing but its first numbers."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.1)
        nn.init.zeros_(self.bias)


def with_layers(kind: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = Feed()
        made.up, made.down = kind(WIDTH, HIDDEN), kind(HIDDEN, WIDTH)  # type: ignore[assignment]
        return made

    return lambda: Model(make)


def changed(change: Callable[[Feed], Any], *, where: int = 0) -> Callable[[], nn.Module]:
    """A model of which one block was changed after it was made."""

    def make() -> nn.Module:
        module = Model()
        change(module.blocks[where])  # type: ignore[arg-type]
        return module

    return make


def _patch(block: Feed) -> None:
    own = block.up.forward
    block.up.forward = lambda x: own(x) * 1.5  # type: ignore[method-assign, assignment]


def _scale(module: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out * 1.5


def _scale_given(module: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5,)


def _scale_back(module: nn.Module, given: Any, made: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in given)


def _scale_back_first(module: nn.Module, made: Any) -> Any:
    return tuple(each * 0.5 for each in made)


def _centre(gradient: Tensor) -> Tensor:
    return gradient - gradient.mean()


def _mark(block: Feed) -> None:
    block.up.weight.no_decay = True  # type: ignore[attr-defined]
    block.up.temperature = 0.5  # type: ignore[assignment]
    block.between = lambda h: h * block.up.temperature


def _marked(module: nn.Module, engine: Any) -> None:
    found = dict(engine.module.named_parameters())["blocks.0.up.weight"]
    assert found.no_decay is True


FIRST_UP, FIRST = ("blocks.0.up",), ("blocks.0.up", "blocks.0.down")
program("BitLinear", with_layers(BitLinear), whole=ALL_OF_FEED)
program("loralib's Linear", with_layers(LoraLinear), whole=ALL_OF_FEED)
program("a subclass with its own first numbers", with_layers(NamedLinear))
program("a patched forward", changed(_patch), whole=FIRST)
program("a forward hook", changed(lambda block: block.up.register_forward_hook(_scale)), whole=FIRST)
program("a hook before forward", changed(lambda block: block.down.register_forward_pre_hook(_scale_given)), whole=FIRST)
program("a backward hook", changed(lambda block: block.up.register_full_backward_hook(_scale_back)), whole=FIRST)
program(
    "a hook before backward",
    changed(lambda block: block.down.register_full_backward_pre_hook(_scale_back_first)),
    whole=FIRST,
)
program("a gradient hook of a weight", changed(lambda block: block.up.weight.register_hook(_centre)), whole=FIRST)
program("attributes of a weight and of a layer", changed(_mark), left=_marked)
program("a hook on the embedding", lambda: _hooked_embedding())
program("old weight_norm", changed(lambda block: nn.utils.weight_norm(block.up)), whole=FIRST)
program("weight_norm", changed(lambda block: parametrizations.weight_norm(block.up)), whole=FIRST)
program("spectral_norm", changed(lambda block: parametrizations.orthogonal(block.down)), whole=FIRST)


def _hooked_embedding() -> nn.Module:
    module = Model()
    module.embed.register_forward_hook(_scale)
    return module


class WithParameter(nn.Module):
    """A scale for each channel between two layers, with a gradient hook."""

    def __init__(self, *, hooked: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.scale = nn.Parameter(torch.rand(HIDDEN))
        if hooked:
            self.scale.register_hook(_centre)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh() * self.scale)


program("a scale of each channel", lambda: Model(lambda: WithParameter(hooked=False)))
program("a scale with a hook", lambda: Model(lambda: WithParameter(hooked=True)), whole=ALL_OF_FEED)

# -- A weight that is used again --------------------------------------------------------------------------------------


class Tied(Model):
    """The head is the embedding's, and something else is made of the matrix too."""

    def __init__(self, more: str = "") -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.more = more

    def forward(self, ids: Tensor) -> Any:
        x = self.features(ids)
        if self.more == "soft":
            x = x + functional.softmax(x @ self.embed.weight.T, -1) @ self.embed.weight
        scores = self.head(x)
        if self.more == "second":
            return scores + functional.linear(x.roll(1, 1), self.embed.weight)
        if self.more == "penalty":
            return scores, self.embed.weight.square().mean()
        return scores


def penalised(output: Any, batch: dict[str, Tensor]) -> Tensor:
    return entropy(output[0], batch) + 0.3 * output[1]


def weight_decay_in(module: nn.Module) -> Loss:
    weight = module.get_parameter("embed.weight")
    return lambda output, batch: entropy(output, batch) + 0.3 * weight.square().mean()


def decay_of_all(module: nn.Module) -> Loss:
    def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
        return entropy(output, batch) + 0.1 * sum(each.norm() for each in module.parameters() if each.dim() > 1)

    return loss


class Spread(Feed):
    """A regulariser of a weight inside of forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.up.weight.norm() / 5


program("a tied head", Tied)
program("a tied matrix, used softly", lambda: Tied("soft"), whole=("head", "embed"))
program("a second head of the tied matrix", lambda: Tied("second"), whole=("head", "embed"))
program("a penalty in forward", lambda: Tied("penalty"), loss=lambda _: penalised, whole=("head", "embed"))
program("a penalty in the loss", Tied, loss=weight_decay_in, whole=("head", "embed"))
program("a penalty of all matrices", Model, loss=decay_of_all, whole=("head", "up", "down"))
program("a norm of a weight in forward", lambda: Model(Spread), whole=ALL_OF_FEED)


def _embedding(**options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Model()
        module.embed = nn.Embedding(WORDS, WIDTH, **options)
        return module

    return make


def few_words() -> dict[str, Tensor]:
    batch = tokens()
    return {**batch, "ids": batch["ids"] % 3 + 14}


program("scale_grad_by_freq", _embedding(scale_grad_by_freq=True), batch=few_words, whole=("embed",))
program("padding_idx", _embedding(padding_idx=15), batch=few_words)
program("max_norm", _embedding(max_norm=1.0), batch=few_words, whole=("embed",))
program("sparse gradients", _embedding(sparse=True), refused="sparse=False")

# -- Scores that are changed ------------------------------------------------------------------------------------------


def scored(name: str, change: Callable[[Tensor, dict[str, Tensor]], Tensor | None], **rest: Any) -> None:
    """A loss that does something to scores first. What returns None has done it in place."""

    def loss(output: Any, batch: dict[str, Tensor]) -> Tensor:
        made = change(output, batch)
        return entropy(output if made is None else made, batch)

    program(name, Model, loss=lambda _: loss, **rest)


def _set_word(scores: Tensor, _: Any) -> None:
    scores[..., 3] = -1e4


def _set_view(scores: Tensor, _: Any) -> None:
    scores.view(-1, WORDS)[:, 5].fill_(-1e4)


def _set_flat(scores: Tensor, _: Any) -> None:
    flat = scores.flatten(0, 1)
    flat[:, 20] -= 3


def _mask(scores: Tensor, _: Any) -> None:
    scores.masked_fill_(torch.arange(WORDS) > 28, -1e4)


def _sub(scores: Tensor, _: Any) -> None:
    scores.sub_(scores.detach().mean(-1, keepdim=True)).mul_(2)


def _add_prior(scores: Tensor, _: Any) -> None:
    scores += torch.linspace(0, 1, WORDS)


def _late(scores: Tensor, batch: dict[str, Tensor]) -> Tensor:
    flat = scores.view(-1, WORDS)
    scores[..., 7] = 2.0
    return flat.view(4, LENGTH, WORDS)


def _of_copy(scores: Tensor, _: Any) -> None:
    other = scores.clone()
    other[..., 3] = -1e4
    assert float(other.amax()) > -1e4


def _in_function(scores: Tensor, _: Any) -> None:
    torch.clamp_(scores, -0.5, 0.5)


def _mixtures(scores: Tensor, _: Any) -> Tensor:
    return torch.stack([scores, scores / 2]).logsumexp(0)


def _beside(scores: Tensor, _: Any) -> Tensor:
    return torch.cat([scores, scores * 0.5], 1)[:, :LENGTH]


def _temperature(scores: Tensor, _: Any) -> Tensor:
    scores.div_(0.5)
    return scores.float() * 1.5


scored("a word is forbidden", _set_word)
scored("a word is forbidden in a view", _set_view)
scored("a word is forbidden in flat scores", _set_flat)
scored("masked_fill_", _mask)
scored("sub_ and mul_", _sub)
scored("+= of a prior", _add_prior)
scored("a view from before a change", _late)
scored("a copy that is changed", _of_copy)
scored("clamp_ by its function", _in_function)
scored("stacked scores", _mixtures)
scored("concatenated scores", _beside)
scored("a temperature in place", _temperature)


class Capped(Model):
    """Scores changed in forward, and returned."""

    def forward(self, ids: Tensor) -> Any:
        scores = self.head(self.features(ids))
        scores[:, :, -1] = 0.0
        return scores


program("scores changed in forward", Capped)

# -- Recomputation, and families --------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed = SeparateHeads(), Feed()

    def _inner(self, x: Tensor) -> Tensor:
        return self.feed(x + self.attention(x))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._inner, x, use_reentrant=False)
        return out


class SeparateHeads(nn.Module):
    """Three layers that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Twice(nn.Module):
    """One layer that is called twice on what it read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh() * self.gate(x).sigmoid() + self.up(x))


program("checkpoint without reentrance", lambda: Model(Checkpointed))
program("a layer called twice", lambda: Model(Twice))


def hf(name: str, **config: Any) -> Callable[[], nn.Module]:
    """A small model of transformers, with gradient checkpointing where asked for."""

    def make() -> nn.Module:
        import transformers

        checkpoints = config.get("checkpoints", False)
        rest = {key: each for key, each in config.items() if key != "checkpoints"}
        made: Any = getattr(transformers, f"{name}Config")(**rest)
        model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(made)
        if checkpoints:
            model.gradient_checkpointing_enable()
        return model  # type: ignore[no-any-return]

    return make


LLAMA = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 32}
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
SEQ2SEQ = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": HIDDEN, "decoder_ffn_dim": HIDDEN, "dropout": 0.0,
    "max_position_embeddings": 32, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip


def hf_tokens() -> dict[str, Tensor]:
    batch = tokens()
    return {"input_ids": batch["ids"], "labels_": batch["labels"]}


def pairs() -> dict[str, Tensor]:
    batch = tokens()
    return {"input_ids": batch["ids"], "decoder_input_ids": batch["labels"], "labels_": batch["labels"]}


def hf_loss(module: nn.Module) -> Loss:
    return lambda output, batch: entropy(output, {"labels": batch["labels_"]})


program(
    "llama with its default checkpointing", hf("Llama", **LLAMA, checkpoints=True), batch=hf_tokens, loss=hf_loss
)
program(
    "gpt2 with its default checkpointing", hf("GPT2", **GPT2, **NO_DROPOUT, checkpoints=True), batch=hf_tokens,
    loss=hf_loss,
)  # fmt: skip


def seq2seq(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(**SEQ2SEQ)
        kind = "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration"
        return getattr(transformers, kind)(config)  # type: ignore[no-any-return]

    return make


program("marian", seq2seq("Marian"), batch=pairs, loss=hf_loss)
program("pegasus", seq2seq("Pegasus"), batch=pairs, loss=hf_loss)

# -- Experts of one's own ---------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Experts in the form of transformers; what they do with the weights of a token's choices is their own."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.num_experts, self.style = 4, style
        self.up = nn.Parameter(torch.randn(4, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(4, HIDDEN, WIDTH) / 4)

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        made = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            row, place = (chosen == expert).nonzero(as_tuple=True)
            given, weight = tokens[row], weights[row, place, None]
            if self.style == "before":
                out = (given * weight @ self.up[expert]).relu() @ self.down[expert]
            elif self.style == "inside":
                out = ((given @ self.up[expert]) * weight).tanh() @ self.down[expert]
            elif self.style == "together":
                hidden = given @ self.up[expert]
                out = ((hidden - hidden.mean(0)).relu() @ self.down[expert]) * weight if len(row) else given
            else:
                out = ((given @ self.up[expert]).relu() @ self.down[expert]) * weight
            made = made.index_add(0, row, out)
        return made


class Mixture(nn.Module):
    def __init__(self, style: str) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = Experts(style)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        return self.experts(flat, chosen, weights).view_as(x)


for _style, _refused in (
    ("after", ""), ("before", ""), ("inside", "experts"), ("together", "experts"),
):  # fmt: skip
    program(
        f"experts that weigh {_style}", lambda style=_style: Model(lambda: Mixture(style)),  # type: ignore[misc]
        plan="dp=2,ep=2", refused=_refused,
    )  # fmt: skip


# -- Run --------------------------------------------------------------------------------------------------------------


@dataclass
class Verdict:
    """What came of a program: how far it is from one rank, what was said, which layers are whole."""

    worst: float = -1.0
    where: str = ""
    refused: str = ""
    error: str = ""
    whole: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def plainly(each: Program, num_steps: int) -> tuple[list[float], dict[str, Tensor], nn.Module]:
    """The program in plain torch."""
    module, batch = _made(each), each.batch()
    loss_of, steps = each.loss(module), optimizer(module.parameters())
    losses = []
    for _ in range(num_steps):
        steps.zero_grad()
        loss = loss_of(_called(module, batch), batch)
        loss.backward()  # type: ignore[no-untyped-call]
        steps.step()
        losses.append(loss.item())
    return losses, {name: each.detach() for name, each in module.state_dict().items()}, module


def _made(each: Program) -> nn.Module:
    torch.manual_seed(0)
    return each.make().train()


def _called(module: nn.Module, batch: dict[str, Tensor]) -> Any:
    names = ("ids", "input_ids", "decoder_input_ids", "x")
    return module(**{key: value for key, value in batch.items() if key in names})


def judged(name: str, num_steps: int, wires: Any) -> Verdict:
    """The program on this rank of several, against one."""
    each, verdict = PROGRAMS[name], Verdict()
    losses, expected, reference = plainly(each, num_steps)
    module = _made(each)
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            engine = parallelize(
                module, each.plan, loss=each.loss(module), optimizer=optimizer, example=each.batch(), wires=wires,
                **each.options,
            )  # fmt: skip
        verdict.warned = tuple(str(one.message) for one in warned)
        with engine:
            found = [engine.train_step(each.batch()) for _ in range(num_steps)]
            state = engine.state_dict()
            shapes = {name: tuple(one.shape) for name, one in engine.module.named_parameters()}
            verdict.whole = tuple(name for name, one in expected.items() if shapes.get(name) == tuple(one.shape))
            _compare(verdict, dict(zip(map(str, range(num_steps)), losses, strict=True)), found, expected, state)
            if each.left is not None:
                each.left(reference, engine)
    except ShardwiseError as error:
        verdict.refused = str(error)
    except Exception as error:  # A verdict too: the ranks are needed for others.
        verdict.error = f"{type(error).__name__}: {error}"
    return verdict


def _compare(
    verdict: Verdict, losses: dict[str, float], found: list[float], expected: dict[str, Tensor], state: dict[str, Any]
) -> None:
    verdict.worst = 0.0
    pairs = [(f"loss {step}", torch.tensor(each), torch.tensor(found[int(step)])) for step, each in losses.items()]
    if missing := set(expected) ^ set(state):
        verdict.worst, verdict.where = math.inf, f"names: {sorted(missing)}"
        return
    pairs += [(name, each, state[name]) for name, each in expected.items()]
    for name, whole, mine in pairs:
        if whole.shape != mine.shape:
            verdict.worst, verdict.where = math.inf, name
            return
        if whole.is_floating_point():
            error = float((whole - mine.cpu()).abs().max() / (whole.abs().max() + 1e-6))
            if not error <= verdict.worst:
                verdict.worst, verdict.where = error, name


@contextmanager
def _settings() -> Iterator[None]:
    with small_matrices():
        yield


def judge(names: list[str], num_steps: int = 2) -> dict[str, Verdict]:
    """Several programs on this rank. Those of one plan share their wires."""
    found: dict[str, Verdict] = {}
    with _settings():
        for plan in dict.fromkeys(PROGRAMS[name].plan for name in names):
            wires = make_wires(Plan.parse(plan), limit_seconds=60)
            for name in names:
                if PROGRAMS[name].plan == plan:
                    found[name] = judged(name, num_steps, wires)
            if wires.watch is not None:
                wires.watch.close()
    return found


__all__ = ["PROGRAMS", "Program", "Verdict", "copy", "judge"]
