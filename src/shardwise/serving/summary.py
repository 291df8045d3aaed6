"""What an engine takes: bytes by part, and how many blocks that leaves room for."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.units import format_bytes

if TYPE_CHECKING:
    from shardwise.serving.forecast import Forecast  # Loads torch.


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of one rank, the fullest. `reserve_bytes` are for what a step needs beside weights and blocks."""

    model: str
    device: str
    precision: str
    num_ranks: int
    num_parameters: int
    weight_bytes: int
    kv_bytes: int
    reserve_bytes: int
    num_blocks: int
    block_size: int
    block_bytes: int
    max_length: int
    #: As it was told or chosen; none: one device.
    plan: str = ""
    forecast: "Forecast | None" = None

    @property
    def num_tokens(self) -> int:
        """How many tokens the cache holds."""
        return self.num_blocks * self.block_size

    def lines(self) -> list[str]:
        """For people."""
        where = self.device
        if self.num_ranks > 1:
            where = f"{self.num_ranks} ranks ({self.plan}) on {self.device}, of the fullest"
        return [
            f"{self.model} in {self.precision} on {where}",
            f"weights   {format_bytes(self.weight_bytes)} ({self.num_parameters:,} parameters in all)",
            f"KV cache  {format_bytes(self.kv_bytes)}: {self.num_blocks:,} blocks of {self.block_size} tokens,"
            f" {format_bytes(self.block_bytes)} each; {self.num_tokens:,} tokens",
            f"a step    {format_bytes(self.reserve_bytes)} kept for what it computes",
            f"a prompt and its answer have at most {self.max_length:,} tokens",
            "nothing is predicted: the planner does not know this device" if self.forecast is None
            else self.forecast.line(),
        ]  # fmt: skip
