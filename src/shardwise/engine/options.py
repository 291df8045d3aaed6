"""The keyword arguments of `parallelize`."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from shardwise.execution.compute_policy import ComputePolicy
from shardwise.planner.plan import Plan
from shardwise.sharding.context.mask import Mask
from shardwise.sharding.context.sequence_shards import Entry
from shardwise.stages.batch import home_of
from shardwise.stages.stage import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All keyword arguments of `parallelize`, which documents them."""

    clip: float | None = None
    compile: bool | str = False
    seed: int = 0
    pad: bool = False
    through_blocks: bool = False
    measure: bool = False
    tensor: Mapping[str, str] | None = None
    tensor_chunks: int | None = None
    verify: bool = True
    positions: str | None = "position_ids"
    entries: Mapping[str, Entry | int | None] | None = None
    masks: Mask | None = None
    bucket_bytes: int | None = None
    buffers: str | None = None
    kernels: bool = True
    batch: str = "same"
    masters: bool = True
    graphs: bool | Literal["auto"] = False

    @property
    def is_local(self) -> bool:
        """Whether every replica brings rows of its own."""
        return self.batch == "local"

    def precision_of(self, plan: Plan, example: Batch) -> Callable[[], AbstractContextManager[Any]]:
        """Return the context in which forwards of such batches compute."""
        return partial(ComputePolicy.of(plan, casts=self.masters).precision, home_of(example))
