"""Small models as their libraries write them: nanoGPT, timm's ViT, a UNet, recurrent nets, BERT, LoRA, mixtures."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.harness import Batch, Net, Parallelize, Result, batch, cross_entropy, program, sgd

NO_LAYERS = {"pp": "no module that has parameters", "ep": "has no experts"}
TOKENS = {"cp": "mixes the tokens|a part of a sequence|mix"}


def run(
    parallelize: Parallelize, model: nn.Module, *, loss: Any = cross_entropy, optimizer: Any = sgd,
    batches: Callable[[int], Batch] = batch, **options: Any,
) -> Result:  # fmt: skip
    engine = parallelize(model.double(), loss=loss, optimizer=optimizer, example=batches(0), **options)
    found = {f"loss {step}": engine.train_step(batches(step)) for step in range(3)}
    return found | {name: each for name, each in engine.state_dict().items() if isinstance(each, Tensor)}


def decayed(parameters: Any) -> torch.optim.Optimizer:
    """Matrices decay, and others do not."""
    every = [each for each in parameters if each.requires_grad]
    groups = [
        {"params": [each for each in every if each.dim() >= 2], "weight_decay": 0.1},
        {"params": [each for each in every if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.n_head, self.n_embd = 2, 8

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (each.view(b, t, self.n_head, c // self.n_head).transpose(1, 2) for each in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(8), CausalAttention(), nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """As in nanoGPT: with labels it gives its loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(12, 8),
                "wpe": nn.Embedding(6, 8),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([GPTBlock() for _ in range(2)]),
                "ln_f": nn.LayerNorm(8),
            }
        )
        self.lm_head = nn.Linear(8, 12, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        places = torch.arange(0, x.shape[1], dtype=torch.long, device=x.device)
        h = self.transformer.drop(self.transformer.wte(x) + self.transformer.wpe(places))
        for block in self.transformer.h:
            h = block(h)
        logits = self.lm_head(self.transformer.ln_f(h))
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.reshape(-1), ignore_index=-1)


@program(TOKENS)
def nano_gpt(parallelize: Parallelize) -> Result:
    """Tied, with decay by shape, clipped, and a loss of its own."""
    return run(parallelize, GPT(), loss=lambda output, _: output[1], optimizer=decayed, clip=1.0)


class Beside(nn.Module):
    """As PEFT puts it around a layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * 2.0


@program(TOKENS)
def lora(parallelize: Parallelize) -> Result:
    """A frozen model, of which a few layers have small ones beside them."""
    model = GPT().requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn, block.mlp[0] = Beside(block.attn.c_attn), Beside(block.mlp[0])
        for each in (block.attn.c_attn, block.mlp[0]):
            each.lora_A.requires_grad_(), each.lora_B.requires_grad_()
    return run(parallelize, model, loss=lambda output, given: cross_entropy(output[0], given), optimizer=decayed)


class Attention(nn.Module):
    """timm's."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 4
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj, self.k_norm = nn.Linear(8, 24), nn.Linear(8, 8), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q * self.scale) @ self.k_norm(k).transpose(-2, -1)).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, c))


class VisionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(8), Attention(), nn.LayerNorm(8)
        self.fc1, self.act, self.fc2 = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
        self.gamma_1, self.gamma_2 = (nn.Parameter(torch.full((8,), 0.1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma_1 * self.attn(self.norm1(x))
        return x + self.gamma_2 * self.fc2(self.act(self.fc1(self.norm2(x))))


class VisionTransformer(nn.Module):
    def __init__(self, pool: str) -> None:
        super().__init__()
        self.patch_embed, self.pool = nn.Conv2d(3, 8, 2, 2), pool
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8) * 0.02)
        self.blocks = nn.Sequential(*[VisionBlock() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0] if self.pool == "cls" else x[:, 1:].mean(1))


def images(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, 4, 4, generator=generator).double()
    return {"x": x, "labels": torch.randint(12, (4,), generator=generator)}


def smoothed(output: Tensor, given: Batch) -> Tensor:
    return functional.cross_entropy(output, given["labels"], label_smoothing=0.1)


@program(but="cp")
def vision_transformer(parallelize: Parallelize) -> Result:
    """By its class token, with smoothed labels."""
    return run(parallelize, VisionTransformer("cls"), loss=smoothed, optimizer=decayed, batches=images)


@program(but="cp")
def vision_transformer_by_its_mean(parallelize: Parallelize) -> Result:
    """By the mean of its tokens."""
    return run(parallelize, VisionTransformer("mean"), loss=smoothed, batches=images)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(2, 16), nn.SiLU())
        self.middle, self.time = (
            nn.Conv2d(16, 16, 3, padding=1),
            nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 16)),
        )
        self.up, self.out = nn.ConvTranspose2d(16, 8, 2, 2), nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(x)
        h = self.middle(self.down(skip)) + self.time(x.mean((1, 2, 3))[:, None])[:, :, None, None]
        return self.out(torch.cat([self.up(h), skip], 1))


@program(but="cp")
def unet(parallelize: Parallelize) -> Result:
    """A skip from the first layers to the last, and a time for each row."""
    return run(parallelize, UNet(), loss=lambda output, given: functional.mse_loss(output, given["x"]), batches=images)


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=0)
        self.rnn = nn.GRU(8, 8, 2, batch_first=True) if kind == "gru" else nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 12)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


@program(TOKENS)
def recurrent_language_model(parallelize: Parallelize) -> Result:
    """A GRU of two layers, tied, with a word for padding."""
    return run(parallelize, Recurrent("gru"))


@program(TOKENS)
def an_lstm(parallelize: Parallelize) -> Result:
    """Its gates are parts of one memory."""
    return run(parallelize, Recurrent("lstm"))


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.kinds = nn.Embedding(12, 8, padding_idx=0), nn.Embedding(8, 8), nn.Embedding(2, 8)
        self.norm = nn.LayerNorm(8, eps=1e-12)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooler, self.classifier = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        padding = x == 0
        padding[:, 0] = False
        h = self.words(x) + self.places(torch.arange(x.shape[1])) + self.kinds(torch.zeros_like(x))
        h = self.encoder(self.norm(h), src_key_padding_mask=padding)
        return self.classifier(torch.tanh(self.pooler(h[:, 0])))


def sentences(seed: int) -> Batch:
    given = batch(seed)
    return {"x": given["x"], "labels": given["labels"][:, 0] % 3}


@program(but="cp")
def bert(parallelize: Parallelize) -> Result:
    """A class for each sentence, by its first token; padding is masked."""
    entropy = lambda output, given: functional.cross_entropy(output, given["labels"])  # noqa: E731
    return run(parallelize, Bert(), loss=entropy, batches=sentences)


class Exits(Net):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(8, 12) for _ in range(2)])

    def forward(self, x: Tensor) -> Any:
        h, found = self.embed(x), []
        for layer, head in zip(self.layers, self.heads, strict=True):
            h = layer(h)
            found.append(head(h))
        return [*found, self.head(self.norm(h))]


@program()
def early_exits(parallelize: Parallelize) -> Result:
    """A head after each block, and a weight for the loss of each."""

    def weighed(output: list[Tensor], given: Batch) -> Any:
        return sum(weight * cross_entropy(each, given) for weight, each in zip((0.3, 0.3, 1.0), output, strict=True))

    return run(parallelize, Exits(), loss=weighed)


class Mixture(nn.Module):
    """The two best of four, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 8)
        weights, which = self.gate(flat).softmax(-1).topk(2, -1)
        weights, made = weights / weights.sum(-1, keepdim=True), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(which == number)
            if row.numel():
                made.index_add_(0, row, expert(flat[row]) * weights[row, place, None])
        return x + made.view_as(x)


@program()
def a_mixture_by_hand(parallelize: Parallelize) -> Result:
    """Experts that are called only if a token came to them."""
    return run(parallelize, Net(block=Mixture))


class Twice(Net):
    """One block for all layers, in which a layer waits for better days."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.layers[0]] * 3)
        self.layers[0].spare = nn.Linear(8, 8)


@program()
def a_block_used_again_with_a_layer_that_nobody_calls(parallelize: Parallelize) -> Result:
    """What has no gradient does not decay, also where stages share it."""
    return run(parallelize, Twice(), optimizer=lambda every: torch.optim.SGD(every, lr=0.1, weight_decay=0.2))


class Table(nn.Module):
    """Weights of its own, and no layers: an Elman net by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.step = nn.Parameter(torch.randn(12, 6)), nn.Parameter(0.3 * torch.randn(6, 6))
        self.head, self.bias = nn.Parameter(torch.randn(6, 12)), nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        hidden, every = torch.zeros(len(x), 6, dtype=self.words.dtype), []
        for words in self.words[x].unbind(1):
            hidden = torch.tanh(words + hidden @ self.step)
            every.append(hidden)
        return torch.stack(every, 1) @ self.head + self.bias


@program({"pp": "there are no units", **TOKENS}, always=True)
def weights_and_no_layers(parallelize: Parallelize) -> Result:
    """The module is all that there is to call."""
    return run(parallelize, Table())


@program({"pp": "there are no units"}, but="cp")
def one_layer_alone(parallelize: Parallelize) -> Result:
    """`DDP(nn.Linear(6, 3))`, as the first examples have it."""

    def rows(seed: int) -> Batch:
        drawn = torch.randn(4, 9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return {"input": drawn[:, :6], "labels": drawn[:, 6:]}

    def squares(output: Tensor, given: Batch) -> Tensor:
        return functional.mse_loss(output, given["labels"])

    return run(parallelize, nn.Linear(6, 3), loss=squares, batches=rows)


class ByFunction(nn.Module):
    """Layers that are not called: their weights are handed to functions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.embedding(x, self.embed.weight), self.head.weight, self.head.bias)


@program(NO_LAYERS)
def layers_that_only_hold_weights(parallelize: Parallelize) -> Result:
    """No layer is called, so there is nothing to cut between."""
    return run(parallelize, ByFunction())
