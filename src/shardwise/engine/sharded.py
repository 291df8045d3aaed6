"""This rank's part of every layer: of matrices (tp), of experts (ep), of sequences (cp)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from shardwise.engine.fp8_layers import Fp8Layers, restore_layers, use_fp8
from shardwise.engine.lone_rows import norms_explained
from shardwise.engine.options import Options
from shardwise.errors import ShardwiseError
from shardwise.planner.plan import Plan
from shardwise.ranks.mesh import Mesh
from shardwise.ranks.wires import Wires
from shardwise.sharding.context.parallel import ContextParallel
from shardwise.sharding.context.trial import Alike, try_parts
from shardwise.sharding.dropout import Dropouts
from shardwise.sharding.expert import ExpertSharding, shard_experts
from shardwise.sharding.tensor import ByFirst, Sharding, Shards, find_trackers, layers_called, shard
from shardwise.stages.batch import home_of, length_of
from shardwise.stages.stage import Batch, Loss


class Sharded:
    """Cuts a module in place. Layers are cut first, and stages afterwards.

    With `tensor` or `experts` it assembles whole parameters from parts, and cuts parts from whole ones. All ranks call
    it alike. The cut of `tp` is tried by one rank, with `by_first`, or by each.
    """

    def __init__(
        self, module: nn.Module, plan: Plan, mesh: Mesh, microbatch: Batch, options: Options, loss: Loss | None = None,
        by_first: ByFirst | None = None,
    ) -> None:  # fmt: skip
        self._plan, self._mesh, self._by_first = plan, mesh, by_first
        self.tensor = self._shard(module, microbatch, options, loss) if plan.tp > 1 else None
        self.context: ContextParallel | None = None
        alike = Alike(is_tried=False)
        if plan.cp > 1 and options.verify:
            alike = try_parts(module, partial(self._make_context, options), microbatch, loss)
        #: Whether parts of sequences are known to give the result of the whole; and for which sequences they do not.
        self.is_tried, self._unfit = alike
        #: The placement of experts on ranks, if they are sharded or replicated.
        self.experts: ExpertSharding | None = None
        if plan.dp * plan.cp > 1:
            self.experts = shard_experts(
                module, mesh, real=self._real_tokens, verify=options.verify, example=microbatch
            )
        self._has_attended = self.is_tried
        #: The layers that are computed in 8 bits.
        self.fp8: Fp8Layers | None = None

    def explained(self, module: nn.Module, microbatch: Batch) -> AbstractContextManager[None]:
        """Say of torch's error about a batch norm which keys of the plan have left it one row."""
        return norms_explained(module, self._plan, length_of(microbatch))

    @property
    def is_in_parts(self) -> bool:
        """Whether this rank has parts of parameters."""
        return self.tensor is not None or bool(self.experts is not None and self.experts.parameters)

    def attach_fp8(self, module: nn.Module, device: torch.device, options: Options) -> None:
        """Compute linear layers in 8 bits, if the plan says so. Trials of the module come before this."""
        scales = self._plan.fp8_scales
        if scales is not None:
            self.fp8 = use_fp8(module, scales, device, kernels=options.kernels)

    def attach_context(self, module: nn.Module, options: Options) -> ContextParallel | None:
        """Let attention see the tokens of other ranks."""
        if self._plan.cp == 1:
            return None
        self.context = self._make_context(options)
        self.context.is_strict = not self.is_tried
        self.context.unfit = self._unfit
        self.context.attach(module)
        return self.context

    def make_tried_context(self, options: Options) -> Callable[[], ContextParallel] | None:
        """Return a factory of contexts for trials like the one that was made; None if there was none."""
        return partial(self._make_context, options) if self.is_tried else None

    def _make_context(self, options: Options) -> ContextParallel:
        return ContextParallel(
            self._mesh.group("cp"),
            form=cast(Literal["ring", "all-to-all"], self._plan.context),
            positions=options.positions,
            entries=options.entries,
            # Padding tokens would count in buffers that forwards write.
            pads=options.buffers is None,
            masks=options.masks,
        )

    def detach(self, module: nn.Module) -> None:
        """Restore the module's own attention and linear layers."""
        if self.context is not None:
            self.context.detach()
        if self.fp8 is not None:
            self.undo(module)

    @staticmethod
    def undo(module: nn.Module) -> None:
        """Restore the module's own linear layers, if an engine has replaced them."""
        restore_layers(module)

    def attach_dropouts(
        self, module: nn.Module, seed: int, callers: Collection[str], before: Sequence[Mapping[str, int]], *,
        may_rest: bool,
    ) -> Dropouts | None:  # fmt: skip
        """Make dropout masks, also of `callers` of dropout functions, independent of the plan. None if there are none,
        or, unless they `may_rest`, if all drop nothing so far."""
        trackers = find_trackers(module)
        dropouts = Dropouts(
            seed=seed,
            # The channels of this rank, inside sharded layers.
            channels=lambda: next((each.channels for each in trackers if each.is_inside), None),
            attends=self._plan.cp == 1,
            before=before,
        )
        drops = dropouts.attach(module, callers)
        if not drops and not (may_rest and dropouts.resting):
            return None
        if self.context is not None:
            self.context.drops = dropouts.weight_drop
        return dropouts

    def evaluating(self, module: nn.Module) -> AbstractContextManager[None]:
        """Return a context for evaluations, in which layers that ranks share must be called, not read."""
        return layers_called(module) if self._plan.tp * self._plan.pp > 1 else nullcontext()

    def check_attention(self, module: nn.Module, wires: Wires) -> None:
        """Refuse a module whose attention was not found: it would silently see only the tokens of one rank."""
        if self.context is None or self._has_attended:
            return
        numbers = torch.tensor([self.context.num_calls], dtype=torch.float64)
        wires.sum(numbers, "the number of attentions")
        if not numbers.any():
            raise ShardwiseError(
                f"no attention of {type(module).__name__} was found, so tokens would see those of one rank alone",
                remedy="torch.nn.functional.scaled_dot_product_attention in the module, or cp=1",
            )
        self._has_attended = True

    def of(self, name: str) -> Any:
        """Return how a parameter is sharded over tensor parallel ranks; `shape` is the whole, with the experts of
        all."""
        if self.tensor is not None:
            return self.tensor.of(name)
        assert self.experts is not None, "without parts nothing is asked"
        return Shards(shape=tuple(self.experts.twin.get_parameter(name).shape))

    def gather(self, name: str, local: Tensor) -> Tensor:
        """Return a whole parameter, or a tensor that is sharded like it, from the parts of all ranks."""
        part = local if self.experts is None else self.experts.gather(name, local)
        return part if self.tensor is None else self.tensor.gather(name, part)

    def local(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor."""
        part = whole if self.tensor is None else self.tensor.local(name, whole)
        return part if self.experts is None else self.experts.local(name, part)

    def _shard(self, module: nn.Module, microbatch: Batch, options: Options, loss: Loss | None) -> Sharding:
        """Keep this rank's part of every layer that can be sharded."""
        sharding = shard(
            module,
            self._mesh,
            options.tensor,
            sequence=self._plan.sp,
            example=microbatch,
            num_chunks=options.tensor_chunks,
            loss=loss,
            verify=options.verify,
            by_first=self._by_first,
        )
        if any(each.is_meta for each in module.parameters()):
            sharding.materialise(module, seed=options.seed, device=home_of(microbatch))
        return sharding

    def _real_tokens(self) -> Tensor | None:
        """Return which of this rank's tokens in the current sequences are not padding."""
        return None if self.context is None else self.context.real_tokens()
