"""Small models trained on ranks that share out the tokens, and the same on one device."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim import SGD

from shardwise.engine.parallelize import parallelize
from shardwise.errors import ShardwiseError
from shardwise.execution.backward import input_gradients
from shardwise.execution.compute_policy import saving_nothing
from shardwise.ranks.collectives import Group
from shardwise.sharding.context.mask import Mask
from shardwise.sharding.context.parallel import ContextParallel
from shardwise.sharding.context.sequence_shards import IGNORED, shift_labels
from shardwise.stages.split import split
from shardwise.stages.split.arguments import Signature

VOCABULARY = 97
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {
    **SMALL,
    "intermediate_size": 64,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DRY_GPT2 = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


class Own(nn.Module):
    """Somebody's own transformer: one layer, learned positions, torch's attention under a name of its own."""

    def __init__(self, *, dropout: float = 0.0, masked: bool = False) -> None:
        super().__init__()
        self.dropout, self.masked = dropout, masked
        self.embed, self.positions = nn.Embedding(VOCABULARY, 32), nn.Embedding(64, 32)
        self.qkv, self.head = nn.Linear(32, 96), nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + self.positions(position_ids)
        query, key, value = (part.view(*part.shape[:2], 4, 8).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        size = input_ids.shape[1]
        mask = torch.ones(size, size, dtype=torch.bool).tril() if self.masked else None
        seen = scaled_dot_product_attention(query, key, value, mask, self.dropout, not self.masked)
        logits: Tensor = self.head(hidden + seen.transpose(1, 2).flatten(2))
        return logits


class OwnMask(NamedTuple):
    """What a layer is told of what it sees."""

    window: int | None


def attend_here(query: Tensor, key: Tensor, value: Tensor, mask: OwnMask, scale: float) -> Tensor:
    places = torch.arange(query.shape[2])
    distance = places[:, None] - places
    seen = (distance >= 0) & (distance < (mask.window or query.shape[2]))
    return scaled_dot_product_attention(query, key, value, seen, scale=scale)


class Attending(Own):
    """One whose attention is a function that can be put in its place, as in `shardwise.nets`."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = attend_here

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + self.positions(position_ids)
        query, key, value = (part.view(*part.shape[:2], 4, 8).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        seen = self.attend(query, key, value, OwnMask(7), 0.4)
        logits: Tensor = self.head(hidden + seen.transpose(1, 2).flatten(2))
        return logits


class ByHand(Own):
    """One that multiplies and normalises itself."""

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + self.positions(position_ids)
        query, key, value = self.qkv(hidden).chunk(3, -1)
        logits: Tensor = self.head((query @ key.mT).softmax(-1) @ value)
        return logits


class Multihead(Own):
    """One with torch's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids) + self.positions(position_ids)
        logits: Tensor = self.head(self.attention(hidden, hidden, hidden)[0])
        return logits


def _causal(config: Any) -> nn.Module:
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _causal(hf.LlamaConfig(**GATED)),
    "qwen3": lambda: _causal(hf.Qwen3Config(**GATED, head_dim=8)),
    "mistral": lambda: _causal(hf.MistralConfig(**GATED, sliding_window=5)),
    "gemma2": lambda: _causal(
        hf.Gemma2Config(**GATED, head_dim=8, sliding_window=6, attn_logit_softcapping=0.05, query_pre_attn_scalar=4)
    ),
    "gpt2": lambda: _causal(hf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, **DRY_GPT2)),
    "gpt2 with dropout": lambda: _causal(hf.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)),
    "bert": lambda: hf.BertForMaskedLM(
        hf.BertConfig(
            **SMALL,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ),
    "roberta": lambda: hf.RobertaForMaskedLM(hf.RobertaConfig(**SMALL, intermediate_size=64)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=1)),
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=4)),
    "gpt-oss": lambda: _causal(hf.GptOssConfig(**{**GATED, "num_local_experts": 2}, head_dim=8)),
    "llama4": lambda: _causal(hf.Llama4TextConfig(**GATED, head_dim=8, attention_chunk_size=8)),
    "own": Own,
    "own with a mask": lambda: Own(masked=True),
    "own with dropout": lambda: Own(dropout=0.1),
    "own with attend": Attending,
    "by hand": ByHand,
    "multihead": Multihead,
}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


def make_batch(name: str, kind: str, length: int) -> dict[str, Any]:
    """A batch of two sequences for a model; `kind` says what is particular about it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
    batch: dict[str, Any] = {"input_ids": ids, "labels": shift_labels(ids)}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, length - 7 :], mask[1, :3] = 0, 0
        batch["attention_mask"] = mask
        batch["labels"] = batch["labels"].masked_fill(mask == 0, IGNORED)
    if kind == "packed":
        starts = torch.tensor([[0] * 9 + [9] * (length - 9), [0] * 5 + [5] * (length - 5)])
        batch["position_ids"] = torch.arange(length) - starts
    if name.startswith("own"):
        batch.setdefault("position_ids", torch.arange(length).repeat(2, 1))
    return batch


def loss_of(module: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The sum over this batch's labels. A model's own loss would shift them, which is done already."""
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    args, kwargs = Signature(module).arguments(inputs)
    output = module(*args, **kwargs)
    logits = output if isinstance(output, Tensor) else output.logits
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


def plain_results(name: str, kind: str, length: int) -> dict[str, Tensor]:
    """The mean loss and every gradient, on one device."""
    module, batch = make_model(name), make_batch(name, kind, length)
    loss = loss_of(module, batch) / (batch["labels"] != IGNORED).sum()
    torch.autograd.backward(loss)
    return _named(module, loss)


def shared_results(name: str, kind: str, length: int, form: Any, masks: Mask | None = None) -> dict[str, Tensor]:
    """The same on a rank: sums over all ranks, divided by the number of labels that all have."""
    group = Group(dist.group.WORLD)
    module, context = make_model(name), ContextParallel(group, form=form, masks=masks)
    context.attach(module)
    part = context.cut(make_batch(name, kind, length))
    with context.running(part):
        loss = loss_of(module, part)
    torch.autograd.backward(loss)
    count = (part["labels"] != IGNORED).sum()
    dist.all_reduce(count)
    results = _named(module, loss)
    for each in results.values():
        dist.all_reduce(each)
        each /= count
    assert context.num_calls
    return results


def _named(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    return {"loss": loss.detach().clone(), **gradients}


def pipelined_results(name: str, length: int) -> dict[str, Tensor]:
    """The same in two stages: each forward twice, as when it is recomputed, and each backward in two halves."""
    group = Group(dist.group.WORLD)
    module, context = make_model(name), ContextParallel(group)
    whole = make_batch(name, "whole", length)
    stages = split(module, 2, {key: each for key, each in whole.items() if key != "labels"})
    context.attach(module)
    context.attach_stages(stages)
    first, second = stages.stages
    assert first is not None
    assert second is not None
    part = context.cut(whole)
    with saving_nothing():
        made, _ = first.run({}, part)
    made, _ = first.run({}, part)
    leaves = {key: each.detach().requires_grad_(each.requires_grad) for key, each in made.items()}
    with saving_nothing():
        second.run(leaves, part)
    _, output = second.run(leaves, part)
    loss = cross_entropy(output.logits.flatten(0, 1), part["labels"].flatten(), ignore_index=IGNORED, reduction="sum")
    wanted = [key for key, each in leaves.items() if each.requires_grad]
    late = input_gradients([loss], [None], [leaves[key] for key in wanted])
    early = input_gradients([made[key] for key in wanted], [leaves[key].grad for key in wanted], [])
    late.run()
    early.run()
    count = (part["labels"] != IGNORED).sum()
    dist.all_reduce(count)
    results = _named(module, loss)
    for each in results.values():
        dist.all_reduce(each)
        each /= count
    return results


def _summed(output: Any, batch: Mapping[str, Any]) -> tuple[Tensor, int]:
    labels = batch["labels"].flatten()
    return cross_entropy(output.logits.flatten(0, 1), labels, reduction="sum"), labels.numel()


def tried_minimax(kinds: tuple[str, str]) -> tuple[bool, str]:
    """Whether MiniMax is held against the whole sequence under cp, and what is said against it."""
    torch.manual_seed(0)
    config = hf.MiniMaxConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=2, num_experts_per_tok=1, block_size=16,
        layer_types=list(kinds), use_cache=False, max_position_embeddings=64,
    )  # fmt: skip
    batch = {name: torch.randint(97, (2, 16)) for name in ("input_ids", "labels")}
    try:
        with parallelize(
            hf.MiniMaxForCausalLM(config), "cp=2", loss=_summed, example=batch, optimizer=partial(SGD, lr=0.1)
        ) as engine:
            return engine.sharded.is_tried, ""
    except ShardwiseError as error:
        return True, error.problem
