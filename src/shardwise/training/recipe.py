"""A recipe: the whole configuration of a training run, except where it runs. A value, validated on construction.

    shardwise train                                   the recipe `bytes`
    shardwise train bytes --set optimizer.rate=1e-3
    shardwise train mine.toml                         the same fields in a file; defaults are those of `bytes`

`RECIPES` are the built-in ones.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from shardwise.errors import ShardwiseError, os_errors_as, unknown
from shardwise.training import fields

#: Types annotated with their valid values. `_check` refuses others.
Positive = Annotated[int, "positive"]
Count = Annotated[int, "not negative"]
Amount = Annotated[float, "not negative"]
Share = Annotated[float, "share"]

#: The part of a `wsd` run in which the rate falls.
_LAST_PART = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """A transformer given by its sizes, or a Hugging Face model with its weights (`folder`), or the module that a
    user's function returns (`source`, as `package.module:factory`). The last two ignore the sizes.

    `kv_heads` defaults to `heads`, and `mlp` to 8/3 of the width. `experts` is 0 for dense layers. `dropout` applies to
    embeddings, to attention and before residuals; `none` keeps the value of the model in `folder`.
    """

    folder: str | None = None
    source: str | None = None
    width: Positive = 128
    layers: Positive = 4
    heads: Positive = 4
    kv_heads: Positive | None = None
    mlp: Positive | None = None
    experts: Count = 0
    chosen_experts: Positive = 2
    tied: bool = False
    dropout: Share | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DataChoice:
    """The training data: a token file of `shardwise data`; or `stdlib`, the sources of Python's standard library; or,
    for a user's module, `images:224`, random images of that size. Then a row is one image, and `sequence` is 1.

    A row has `sequence` tokens. With `masks`, no token attends to another document; `none` enables masks if the module
    takes `documents`, as ours do. `held_out` is the share of tokens, at the end of the data, that is kept for
    evaluation. `limit_bytes` are read of `stdlib`.
    """

    source: str = "stdlib"
    sequence: Positive = 128
    masks: bool | None = None
    held_out: Share = 0.02
    limit_bytes: Positive = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerChoice:
    """AdamW or SGD. The rate rises over `warmup` steps, then falls by `schedule` to `final` times its peak.

    `wsd` stays at the peak, and falls to `final` in the last fifth. `clip` bounds the gradient norm, for which all
    ranks synchronize. With 0 the norm is not computed, except for fp16, which skips steps whose norm is not finite.
    `states` is the format of AdamW's moments: 8, 4 or 2 bytes a parameter.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    rate: Amount = 3e-3
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    warmup: Count = 20
    final: Share = 0.1
    beta1: Share = 0.9
    beta2: Share = 0.95
    decay: Amount = 0.01
    clip: Amount = 1.0
    states: Literal["fp32", "bf16", "8bit"] = "fp32"

    def learning_rate_at(self, step: int, num_steps: int) -> float:
        """Return the rate of a step, counted from 0. It depends on the step alone, so resumed runs have the same rates.

        cosine   /‾‾\\__        linear   /\\.        constant  /‾‾‾‾‾        wsd   /‾‾‾‾\\
        """
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, num_steps - self.warmup)
        if self.schedule == "constant":
            return self.rate
        if self.schedule == "wsd":
            done = max(0.0, done - (1 - _LAST_PART)) / _LAST_PART
        height = 0.5 * (1 + math.cos(math.pi * done)) if self.schedule == "cosine" else 1 - done
        return self.rate * (self.final + (1 - self.final) * height)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceChoice:
    """Load balancing of experts. 0 turns each of these off.

    With `bias_rate`, routers add a bias to the scores when they choose experts. After every step, the bias of an expert
    with more than the mean load decreases by `bias_rate`, and that of one with less increases (DeepSeek-V3). `loss` is
    the weight of an auxiliary loss that grows with imbalance; `none` keeps the value of the model in `folder`. Every
    `place_every` steps, experts move between the ranks of ep by their measured load; results do not change.
    """

    bias_rate: Amount = 0.0
    loss: Amount | None = None
    place_every: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointChoice:
    """A checkpoint every `every` steps (0: only at the end). The last `keep` are kept. `on_failure`: if one cannot be
    written, continue with a warning, or stop."""

    every: Count = 100
    keep: Positive = 2
    on_failure: Literal["warn", "stop"] = "warn"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationChoice:
    """Every `every` steps (0: only at the end) the loss of `batches` held-out batches; at the end a sampled text of
    `sample` tokens."""

    every: Count = 100
    batches: Positive = 4
    sample: Count = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A training run: `steps` steps of `batch` rows. A line is printed every `log` steps. With `tensorboard`, metrics
    are also written for TensorBoard. `bucket_bytes` is the size of one gradient reduction over the replicas. Without
    `kernels`, plain operators compute everything. `graphs`: steps are captured as CUDA graphs where that is possible
    (`on`), or possible and faster (`auto`).

    `precision` and `compile` (each block, by inductor) default to `auto`: fp32 and off on CPUs; on a GPU, bf16 and on
    where they are faster.
    """

    name: str = "bytes"
    steps: Positive = 200
    batch: Positive = 32
    seed: Count = 0
    precision: Literal["auto", "fp32", "bf16", "fp16", "fp8", "fp8-rows"] = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    log: Positive = 10
    tensorboard: bool = False
    bucket_bytes: Positive = 16 * 2**20
    kernels: bool = True
    graphs: Literal["auto", "on", "off"] = "off"
    model: ModelChoice = field(default_factory=ModelChoice)
    data: DataChoice = field(default_factory=DataChoice)
    optimizer: OptimizerChoice = field(default_factory=OptimizerChoice)
    balance: BalanceChoice = field(default_factory=BalanceChoice)
    checkpoint: CheckpointChoice = field(default_factory=CheckpointChoice)
    evaluation: EvaluationChoice = field(default_factory=EvaluationChoice)

    def __post_init__(self) -> None:
        _check(self)

    def changed(self, entries: dict[str, Any], *, source: str = "--set") -> "Recipe":
        """Return a recipe with some keys changed."""
        made: Recipe = fields.updated(self, entries, source=source)
        return made

    def to_toml(self) -> str:
        return fields.to_toml(self)

    def differing(self, other: "Recipe") -> dict[str, tuple[Any, Any]]:
        """Return the keys in which two recipes differ, each with both values."""
        mine, theirs = fields.leaves(self), fields.leaves(other)
        return {key: (mine[key].value, theirs[key].value) for key in mine if mine[key] != theirs[key]}


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a TOML file. Missing keys have their defaults."""
    try:
        with os_errors_as(f"the recipe {path} cannot be read", remedy="shardwise train bytes, or a file that is there"):
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ShardwiseError(f"the recipe {path} is not text: {error}", remedy="a TOML file in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ShardwiseError(
            f"the recipe {path} is not valid TOML: {error}", remedy="lines like: steps = 100"
        ) from None
    return Recipe(name=path.stem).changed(fields.dotted(tree), source=path.name)


def get_recipe(word: str) -> Recipe:
    """Return the built-in recipe of this name, or the one in this file."""
    if word in RECIPES:
        return RECIPES[word]
    path = Path(word)
    if path.is_dir():
        has_run = (path / "recipe.toml").is_file()
        raise ShardwiseError(
            f"{word} is the folder of a run, not a recipe" if has_run else f"{word} is a folder, not a recipe",
            remedy=f"shardwise train --folder {word}" + (", which goes on with it" if has_run else ""),
        )
    if "/" in word and not path.suffix and not path.exists():
        raise ShardwiseError(
            f"there is no recipe {word}", remedy=f"shardwise train --folder {word}, to train there; or a TOML file"
        )
    if path.suffix or "/" in word or path.is_file():
        return read_recipe(path)
    error = unknown("recipe", word, RECIPES)
    raise ShardwiseError(
        error.problem, remedy=f"shardwise train {error.remedy or next(iter(RECIPES))}, or the path of a TOML file"
    )


def _check(recipe: Recipe) -> None:
    """Refuse recipes that no data and no machine could make valid."""
    leaves = fields.leaves(recipe)
    for key, (value, _, _) in leaves.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ShardwiseError(f"{key}={value} is not a finite number", remedy=f"{key}=0.1")
    for key, (value, _, bound) in leaves.items():
        if value is None or (key == "optimizer.final" and value == 1):
            continue
        if bound == "positive" and value < 1:
            raise ShardwiseError(f"{key}={value}: it must be at least 1", remedy=f"{key}=1")
        if bound == "not negative" and value < 0:
            raise ShardwiseError(f"{key}={value} is negative", remedy=f"{key}=0")
        if bound == "share" and not 0 <= value < 1:
            raise ShardwiseError(f"{key}={value} is a share from 0 to 1", remedy=f"{key}=0.1")
    _check_model(recipe.model)
    balance = {key: each.value for key, each in leaves.items() if key.startswith("balance.") and each.value}
    _check_balance(recipe.model, balance)
    _check_states(recipe)


def _check_model(model: ModelChoice) -> None:
    if model.dropout is not None and model.source is not None:
        raise ShardwiseError(
            f"model.dropout={model.dropout} is for transformers of ours, and model.source={model.source} makes its own",
            remedy="dropout in that module",
        )
    if model.folder is not None and model.source is not None:
        raise ShardwiseError(
            f"model.folder={model.folder} and model.source={model.source} are two models", remedy="one of them"
        )
    if model.width % model.heads or (model.width // model.heads) % 2:
        raise ShardwiseError(
            f"model.width={model.width} does not give model.heads={model.heads} heads of an even size each",
            remedy=f"model.width={2 * model.heads * max(1, round(model.width / (2 * model.heads)))}",
        )
    if model.kv_heads is not None and model.heads % model.kv_heads:
        raise ShardwiseError(
            f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}",
            remedy=f"model.kv_heads={math.gcd(model.heads, model.kv_heads)}",
        )
    if model.experts and model.chosen_experts > model.experts:
        raise ShardwiseError(
            f"model.chosen_experts={model.chosen_experts} of model.experts={model.experts}",
            remedy=f"model.chosen_experts={min(2, model.experts)}",
        )


def _check_states(recipe: Recipe) -> None:
    states = recipe.optimizer.states
    if states != "fp32" and recipe.optimizer.name != "adamw":
        raise ShardwiseError(
            f"optimizer.states={states} is for AdamW's moments, and optimizer.name={recipe.optimizer.name} has others",
            remedy="optimizer.states=fp32, or optimizer.name=adamw",
        )
    if states == "8bit" and recipe.balance.place_every:
        raise ShardwiseError(
            f"optimizer.states=8bit has scales that experts share, and balance.place_every={recipe.balance.place_every}"
            " takes experts apart",
            remedy="optimizer.states=bf16, or balance.place_every=0",
        )


def _check_balance(model: ModelChoice, asked: Mapping[str, Any]) -> None:
    """Refuse balancing without experts, as far as that is known without the model. `asked` has the keys not off."""
    for key, value in asked.items():
        if model.folder is None and model.source is None and not model.experts:
            raise ShardwiseError(
                f"{key}={value} balances experts, and model.experts=0 has none", remedy=f"model.experts=8, or {key}=0"
            )
        if model.source is not None and key != "balance.place_every":
            raise ShardwiseError(
                f"{key}={value} is for routers of ours, and the module of model.source={model.source} has its own",
                remedy=f"{key}=0, or a loss in that module",
            )


#: The built-in recipes. `bytes` is the default of `shardwise train`: a small transformer over bytes, on text that every
#: machine has; 0.86 million parameters, about two minutes on two cores. `tiny` is the smallest with every part of
#: `bytes`; it takes seconds, for experiments. `resnet50` is a convolutional network on random images, for GPUs.
RECIPES: Mapping[str, Recipe] = {
    "bytes": Recipe(),
    "tiny": Recipe(
        name="tiny",
        steps=8,
        batch=8,
        log=2,
        model=ModelChoice(width=32, layers=2, heads=2),
        data=DataChoice(sequence=32, limit_bytes=100_000),
        optimizer=OptimizerChoice(warmup=2),
        checkpoint=CheckpointChoice(every=4),
        evaluation=EvaluationChoice(every=4, batches=1, sample=16),
    ),
    "resnet50": Recipe(
        name="resnet50",
        steps=100,
        batch=256,
        model=ModelChoice(source="shardwise.nets.resnet:resnet50"),
        data=DataChoice(source="images:224", sequence=1, held_out=0.0),
        optimizer=OptimizerChoice(name="sgd", rate=0.1, decay=1e-4, clip=0.0),
        checkpoint=CheckpointChoice(every=0),
        evaluation=EvaluationChoice(every=0, sample=0),
    ),
}
