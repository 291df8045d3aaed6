"""The module that a recipe trains: our transformer, a model from a Hugging Face folder, or a user's own module.

    shardwise train --set model.source=my_package.my_module:factory

`factory()` returns a module, or a module and its `loss(output, batch)`. Batches have `input_ids` and `labels`, each
[rows, sequence], and `documents` with data.masks. The module's `forward` receives those that it names as parameters.
Batches of images (data.source=images:224) have `images`, uint8 [rows, 3, height, width], and `labels`, [rows].
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from shardwise.errors import ShardwiseError
from shardwise.nets.loss import next_token_loss
from shardwise.stages.factory import find_factory
from shardwise.stages.stage import Batch, Loss
from shardwise.training.checkpoint.parts import Held
from shardwise.training.convert_own import describe_hf
from shardwise.training.data.images import check_images, find_size
from shardwise.training.model import DOCUMENTS, Ours, example_of_tokens, num_parameters
from shardwise.training.recipe import Recipe

_OPTION = "--set model.source="


class Own:
    """A user's module, whole on every rank until it is split. Its initial weights are those that it comes with.

    It has the same interface as `Ours`.
    """

    def __init__(self, recipe: Recipe) -> None:
        assert recipe.model.source is not None, "an own module has a source"
        self._recipe, self._source = recipe, recipe.model.source
        self._size = find_size(recipe.data.source)
        self._factory = find_factory(self._source, _OPTION)
        module, self.loss = self._made()
        if self._size is not None:
            check_images(recipe.data.sequence, self._source, inspect.signature(module.forward).parameters)
        #: Whether attention is masked between documents: as the recipe says, or else if the module takes `documents`.
        self.masks = self._masks_for(module)
        self._hf = describe_hf(module)

    def make(self, *, tp: int, device: torch.device) -> nn.Module:  # noqa: ARG002 - it is whole, however it is cut
        return self._made()[0].to(device)

    def fill(self, held: Held) -> None:
        held.take_over()

    def flops_per_token(self, module: nn.Module) -> float:
        if self._size is None:
            return 6.0 * num_parameters(module)
        # Convolutions use each weight at many positions, so FLOPs are counted on meta images; batch norms need two.
        with torch.device("meta"):
            example = self.example(2)
        with FlopCounterMode(display=False) as counter:
            copy.deepcopy(module).to("meta")(**example)
        return 3.0 * int(counter.get_total_flops()) / 2

    def description(self) -> dict[str, Any]:
        return {"source": self._source, **({} if self._hf is None else {"hf": self._hf})}

    def for_planner(self) -> dict[str, Any]:
        module = self._made()[0]
        takes = inspect.signature(module.forward).parameters
        example = self.example(self._recipe.batch)
        return {"model": module, "example": {name: each for name, each in example.items() if name in takes}}

    def sample(self) -> nn.Module:
        """Return the module on the meta device: its blocks may all be different."""
        return self.make(tp=1, device=torch.device("meta"))

    def example(self, num_rows: int) -> dict[str, Tensor]:
        """Return a batch of zeros."""
        if self._size is not None:
            return {"images": torch.zeros(num_rows, 3, self._size, self._size, dtype=torch.uint8)}
        return example_of_tokens(num_rows, self._recipe.data.sequence)

    def _made(self) -> tuple[nn.Module, Loss]:
        torch.manual_seed(self._recipe.seed)
        made = self._factory()
        module, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, _next_token_loss)
        if not isinstance(module, nn.Module) or not callable(loss):
            raise ShardwiseError(
                f"{self._source} returns a {type(made).__name__}, and not a module, or a module and a loss",
                remedy="return module, or: return module, loss",
            )
        return module, loss

    def _masks_for(self, module: nn.Module) -> bool:
        takes, masks = inspect.signature(module.forward).parameters, self._recipe.data.masks
        if masks and DOCUMENTS not in takes:
            raise ShardwiseError(
                f"data.masks=true, and the module of {self._source} takes no {DOCUMENTS}, but {', '.join(takes)}",
                remedy="--set data.masks=none, which has them where the module takes them",
            )
        return DOCUMENTS in takes if masks is None else masks


#: It makes the module of a run, knows its initial weights, and describes it for checkpoints.
Subject = Ours | Own


def subject_of(recipe: Recipe, vocabulary: int) -> Subject:
    """Return the subject of a recipe, for tokens of this vocabulary size."""
    if recipe.model.source is None and find_size(recipe.data.source) is not None:
        check_images(recipe.data.sequence, None)
    return Own(recipe) if recipe.model.source is not None else Ours(recipe, vocabulary)


def _next_token_loss(output: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss of a language model, for modules that return logits, or an object with `logits`."""
    return next_token_loss(getattr(output, "logits", output), batch)
