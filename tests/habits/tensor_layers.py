"""What hangs on layers: forwards of their own, hooks, attributes, parametrizations; and recomputation, and families."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.habits.tensor_models import HIDDEN, LENGTH, WIDTH, WORDS, Feed, Loss, Model, entropy, program, tokens
from tests.stages.families import recompute

ALL_OF_FEED = ("up", "down")


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
        module = Model(num_blocks=2)
        change(module.blocks[where])  # type: ignore[arg-type]
        return module

    return make


def _patch(block: Feed) -> None:
    own = block.up.forward
    block.up.forward = lambda x: own(x) * 1.5  # type: ignore[method-assign, assignment]


def _scale(_: nn.Module, __: Any, out: Tensor) -> Tensor:
    return out * 1.5


def _scale_given(_: nn.Module, args: Any) -> Any:
    return (args[0] * 0.5,)


def _scale_back(_: nn.Module, given: Any, __: Any) -> Any:
    return tuple(None if each is None else each * 0.5 for each in given)


def _scale_back_first(_: nn.Module, made: Any) -> Any:
    return tuple(each * 0.5 for each in made)


def _centre(gradient: Tensor) -> Tensor:
    return gradient - gradient.mean()


def _mark(block: Feed) -> None:
    block.up.weight.no_decay = True  # type: ignore[attr-defined]
    block.up.temperature = 0.5  # type: ignore[assignment]
    block.between = lambda h: h * block.up.temperature


def _marked(_: nn.Module, engine: Any) -> None:
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


class PlainLinear(nn.Linear):
    """A forward of its own that comes to the same (as Falcon's)."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T + self.bias


class SlowLinear(nn.Linear):
    """The same numbers, and half of the gradient."""

    def forward(self, input: Tensor) -> Tensor:
        weight = (self.weight + self.weight.detach()) / 2
        return functional.linear(input, weight, self.bias)


class ScaledEmbedding(nn.Embedding):
    """As in Gemma."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * WIDTH**0.5


class NormedEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return functional.normalize(super().forward(input), dim=-1)


def _with_embedding(kind: Callable[..., nn.Embedding]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Model()
        module.embed = kind(WORDS, WIDTH)
        return module

    return make


def _freeze(block: Feed) -> None:
    block.up.weight.requires_grad_(False)


def _hook_of_holder(block: Feed) -> None:
    block.register_forward_hook(_scale)


def _after_step(block: Feed) -> None:
    block.up.bias.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    parameter.grad *= 0.5


class ByName(Feed):
    """Layers that are given what they read by its name."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(input=self.up(input=x).relu())


program("a forward of its own that is torch's", with_layers(PlainLinear))
program("a forward of its own with half of the gradient", with_layers(SlowLinear), whole=ALL_OF_FEED)
program("a scaled embedding", _with_embedding(ScaledEmbedding))
program("an embedding that is normed", _with_embedding(NormedEmbedding), whole=("embed",))
program("a frozen matrix", changed(_freeze))
program("a hook of the module around layers", changed(_hook_of_holder))
program("a hook after a gradient", changed(_after_step), whole=FIRST)
program("what layers read, by its name", lambda: Model(ByName))


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


class Written(nn.Module):
    """What a layer has read is written into before another reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1.0
        up = self.up(x)
        x += 0.5
        return self.down(up.tanh() * self.gate(x).sigmoid())


class Peeks(Twice):
    """A look without gradients first."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.up(x).abs().mean()
        return self.down(self.gate(x).sigmoid() * self.up(x)) + 0 * scale


class Latents(nn.Module):
    """Queries that are a parameter: the same tensor in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.up, self.gate, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        given = self.latents
        return x + self.down(self.up(given).tanh() * self.gate(given).sigmoid() + self.up(given))


class LastOnly(torch.autograd.Function):
    """Forward as it is; a gradient that counts channels."""

    @staticmethod
    def forward(_: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 12 / gradient.shape[-1]


class Backwards(Feed):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(LastOnly.apply(self.up(x).tanh()))  # type: ignore[no-untyped-call]
        return out


class Rooted(Feed):
    """Something that counts channels, where `autograd.grad` is refused."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._inner, x, use_reentrant=True)

    def _inner(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return self.down(hidden / hidden.shape[-1] ** 0.5)


program("an input that is written into", lambda: Model(Written), whole=("up", "gate", "down"))
program("a look without gradients", lambda: Model(Peeks), whole=ALL_OF_FEED)
program("latents that stay", lambda: Model(Latents))
program("a gradient that counts channels", lambda: Model(Backwards), whole=ALL_OF_FEED)
program("checkpoint without reentrance", lambda: Model(Checkpointed))
program("the root of the width in a checkpoint that is reentrant", lambda: Model(Rooted), whole=ALL_OF_FEED)
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
            recompute(model)
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
    "max_position_embeddings": 24, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip


def hf_tokens() -> dict[str, Tensor]:
    batch = tokens()
    return {"input_ids": batch["ids"], "labels_": batch["labels"]}


def pairs() -> dict[str, Tensor]:
    batch = tokens()
    return {"input_ids": batch["ids"], "decoder_input_ids": batch["labels"], "labels_": batch["labels"]}


def hf_loss(_: nn.Module) -> Loss:
    return lambda output, batch: entropy(output, {"labels": batch["labels_"]})


program("llama with its default checkpointing", hf("Llama", **LLAMA, checkpoints=True), batch=hf_tokens, loss=hf_loss)
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
