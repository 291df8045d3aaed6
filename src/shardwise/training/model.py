"""Our transformer: its module on the meta device, and its initial weights, drawn from the seed or read from files."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import ShardwiseError
from shardwise.nets.hf import Checkpoint
from shardwise.nets.hf.catalogue import FAMILIES, config_for
from shardwise.nets.hf.entries import Entries
from shardwise.nets.initialise import initial_value
from shardwise.nets.loss import next_token_loss
from shardwise.nets.router import Router
from shardwise.nets.settings import Dropout, Heads, Mixture, Mlp, Settings
from shardwise.nets.transformer import Transformer
from shardwise.nets.weights import place
from shardwise.stages.stage import Loss
from shardwise.training.checkpoint.parts import Held
from shardwise.training.recipe import Recipe

#: A gated MLP has three matrices instead of two of 4 x the width. At 8/3 it has as many parameters.
_GATED = 8 / 3
_MULTIPLE = 8
#: The entry of a batch that says of which document each token is.
DOCUMENTS = "documents"
#: The key of a description for router biases that the family does not have.
_BIAS = "bias"


def settings_of(recipe: Recipe, vocabulary: int) -> Settings:
    """Return the transformer of a recipe, for this vocabulary size, without the settings that only training needs."""
    choice = recipe.model
    if choice.folder is not None:
        with Checkpoint(choice.folder) as checkpoint:
            settings = checkpoint.settings
        if settings.vocabulary < vocabulary:
            raise ShardwiseError(
                f"the data has a vocabulary of {vocabulary} tokens, and the model in {choice.folder} has"
                f" {settings.vocabulary}",
                remedy=f"shardwise data INPUT --tokenizer {choice.folder} --save FILE",
            )
        return settings
    width = choice.mlp or -(-int(choice.width * _GATED) // _MULTIPLE) * _MULTIPLE
    mixture = None
    if choice.experts:
        mixture = Mixture(num_experts=choice.experts, num_chosen=choice.chosen_experts, width=width)
    return Settings(
        vocabulary=vocabulary,
        width=choice.width,
        num_layers=choice.layers,
        length=recipe.data.sequence,
        attention=Heads(
            num_heads=choice.heads,
            num_kv_heads=choice.kv_heads or choice.heads,
            head_dim=choice.width // choice.heads,
        ),
        mlp=Mlp(width=width),
        mixture=mixture,
        tied=choice.tied,
    )


def in_training(settings: Settings, recipe: Recipe) -> Settings:
    """Return the settings with those that only training needs: dropout, and the bias and loss of routers."""
    if recipe.model.dropout is not None:
        rate = recipe.model.dropout
        settings = replace(settings, dropout=Dropout(embedding=rate, attention=rate, residual=rate))
    choice, mixture, folder = recipe.balance, settings.mixture, recipe.model.folder
    if mixture is None:
        if choice.bias_rate or choice.loss or choice.place_every:
            raise ShardwiseError(
                f"the model in {folder} has no experts to balance", remedy="a recipe without its table balance"
            )
        return settings
    if choice.bias_rate and folder is not None and not mixture.correction:
        raise ShardwiseError(
            f"balance.bias_rate={choice.bias_rate} moves a bias that the routers of the model in {folder} do not have",
            remedy="balance.bias_rate=0 balance.loss=0.01",
        )
    has_bias = mixture.correction or choice.bias_rate > 0
    weight = mixture.auxiliary if choice.loss is None else choice.loss
    return replace(settings, mixture=replace(mixture, correction=has_bias, auxiliary=weight))


def make_module(settings: Settings, *, tp: int = 1, device: torch.device | str = "cpu") -> Transformer:
    """Return the module on the meta device. An engine allocates only what a rank holds."""
    with torch.device("meta"):
        module = Transformer(settings)
    for each in module.modules():
        if isinstance(each, Router) and tp > 1:
            # Tensor parallelism allocates parameters before the rest. A module partly on the meta device cannot be
            # traced, so buffers are allocated here.
            for name, _ in list(each.named_buffers()):
                place(each, name, device=device).zero_()
    return module


@torch.no_grad()
def draw(held: Held, settings: Settings, seed: int) -> None:
    """Initialise weights from the seed and each weight's name alone, with one whole weight in memory at a time."""
    drawn: tuple[str, torch.Tensor] | None = None
    for part in held.weights():
        if drawn is None or drawn[0] != part.entry:
            drawn = part.entry, initial_value(settings, part.entry, part.shape, seed)
        box = tuple(map(slice, part.box.start, part.box.stop))
        part.numbers.copy_(drawn[1][box])
    held.take_over()


@torch.no_grad()
def read_folder(held: Held, folder: str) -> None:
    """Load the weights of a Hugging Face folder. Each rank reads only its own parts."""
    with Checkpoint(folder) as checkpoint:
        checkpoint.check()
        for part in held.weights():
            checkpoint.fill(part.entry, part.numbers, tuple(map(slice, part.box.start, part.box.stop)))
    held.take_over()


def num_parameters(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def example_of_tokens(num_rows: int, sequence: int) -> dict[str, Tensor]:
    """Return a batch of zeros with all entries that a batch of tokens may have."""
    return dict.fromkeys(("input_ids", "labels", DOCUMENTS), torch.zeros(num_rows, sequence, dtype=torch.int64))


def described(settings: Settings, folder: str | None, *, has_bias: bool = False) -> dict[str, Any]:
    """Return a description from which the model can be made again, in JSON types: its family and configuration.

    `has_bias`: its routers have a balancing bias that the family does not have.
    """
    family = None
    if folder is not None:
        with Checkpoint(folder) as checkpoint:
            family = checkpoint.family
    chosen, config = config_for(settings, family)
    return {"family": chosen.name, "config": config, **({_BIAS: True} if has_bias else {})}


def settings_from(description: Mapping[str, Any], *, origin: Path) -> Settings:
    """Return the settings of a description that `described` has made."""
    if "source" in description:
        raise ShardwiseError(
            f"{origin} is of the module {description['source']}, for which Hugging Face's folders have no names",
            remedy="torch.distributed.checkpoint reads it as it is: HuggingFaceStorageReader of that folder",
        )
    if description.get("family") not in FAMILIES:
        raise ShardwiseError(
            f"{origin} does not say which transformer it is of", remedy="a checkpoint that shardwise train has made"
        )
    settings = FAMILIES[description["family"]].read(Entries(dict(description["config"])))
    if settings.mixture is None or not description.get(_BIAS):
        return settings
    return replace(settings, mixture=replace(settings.mixture, correction=True))


def check_sayable(description: Mapping[str, Any], *, origin: Path) -> None:
    """Refuse a model that a Hugging Face folder cannot express."""
    if description.get(_BIAS):
        raise ShardwiseError(
            f"the routers of {origin} choose with a bias (balance.bias_rate), for which a {description['family']} model"
            " has no place",
            remedy="a run with balance.loss=0.01 instead, or torch.distributed.checkpoint, which reads it as it is:"
            " HuggingFaceStorageReader of that folder",
        )


class Ours:
    """Our transformer, given by its sizes, or with the weights of a folder."""

    def __init__(self, recipe: Recipe, vocabulary: int) -> None:
        self._recipe = recipe
        self.loss: Loss = next_token_loss
        #: Whether attention is masked between documents. Our modules support it.
        self.masks = recipe.data.masks is not False
        self._plain = settings_of(recipe, vocabulary)
        self.settings = in_training(self._plain, recipe)

    def make(self, *, tp: int, device: torch.device) -> nn.Module:
        """Return the module, on the meta device or not."""
        return make_module(self.settings, tp=tp, device=device)

    def sample(self) -> nn.Module:
        """Return a module of its first blocks, with one of each kind, on the meta device."""
        kinds = [self.settings.is_mixture(layer) for layer in range(self.settings.num_layers)]
        return make_module(replace(self.settings, num_layers=1 + max(kinds.index(kind) for kind in set(kinds))))

    def example(self, num_rows: int) -> dict[str, Tensor]:
        """Return a batch of zeros."""
        return example_of_tokens(num_rows, self._recipe.data.sequence)

    def fill(self, held: Held) -> None:
        """Initialise the weights that a rank holds."""
        folder = self._recipe.model.folder
        if folder is None:
            draw(held, self.settings, self._recipe.seed)
        else:
            read_folder(held, folder)

    def flops_per_token(self, module: nn.Module) -> float:
        """Return the FLOPs of forward and backward: 6 a weight, without embeddings; causal attention at half."""
        assert isinstance(module, Transformer), "a transformer of ours"
        looked_up = sum(each.weight.numel() for each in (module.embed, module.positions) if each is not None)
        weights = num_parameters(module) - (0 if module.settings.tied else looked_up)
        settings = module.settings
        mixture = settings.mixture
        if mixture is not None:
            idle = mixture.num_experts - mixture.num_chosen
            layers = settings.num_layers - len(mixture.dense_layers)
            weights -= layers * idle * 3 * settings.width * mixture.width
        heads = settings.attention
        attended = heads.num_heads * (heads.head_dim if isinstance(heads, Heads) else heads.nope_dim + heads.rope_dim)
        return 6.0 * weights + 6.0 * settings.num_layers * self._recipe.data.sequence * attended

    def description(self) -> dict[str, Any]:
        """Return a description from which the model can be made again, in JSON types."""
        folder = self._recipe.model.folder
        begun = {} if folder is None else {"folder": str(Path(folder).resolve())}
        has_bias = self.settings.has_correction and not self._plain.has_correction
        return {**described(self._plain, folder, has_bias=has_bias), **begun}

    def for_planner(self) -> dict[str, Any]:
        """Return the model as `planner.plan` takes it."""
        return {"model": self.description()["config"], "sequence": self._recipe.data.sequence}
