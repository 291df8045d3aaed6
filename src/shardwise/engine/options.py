"""What is said beside a plan: how a module is trained, and what cannot be seen of it."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.sharding.context.mask import Mask
from shardwise.sharding.context.sequence_shards import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All that `parallelize` takes by name, and says what it means."""

    clip: float | None = None
    compile: bool | str = False
    seed: int = 0
    pad: bool = False
    through_blocks: bool = False
    measure: bool = False
    tensor: Mapping[str, str] | None = None
    tensor_chunks: int | None = None
    positions: str | None = "position_ids"
    entries: Mapping[str, Entry | int | None] | None = None
    masks: Mask | None = None
    bucket_bytes: int | None = None
