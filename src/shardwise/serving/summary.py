"""The memory of an engine by part, how many blocks that leaves room for, and its predicted performance."""

from dataclasses import dataclass

from shardwise.units import counted, format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted for `sequences` running at once in each replica. Tokens per second are of all replicas together."""

    prompt: int
    output: int
    sequences: int
    first_token_seconds: float
    each_token_seconds: float
    tokens_per_second: float

    def line(self) -> str:
        """Format for people."""
        return (
            f"predicted for prompts of {self.prompt} tokens and answers of {self.output},"
            f" {counted(self.sequences, 'sequence')} at once: the first token after"
            f" {format_seconds(self.first_token_seconds)}, then one every {format_seconds(self.each_token_seconds)};"
            f" {self.tokens_per_second:,.0f} tokens/s"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The memory of one rank, the fullest. `reserve_bytes` are for what a step needs beside weights and blocks."""

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
    #: The plan, given or chosen; empty: one device.
    plan: str = ""
    #: On a named cluster: the device of each rank, and what that placement gains.
    seats: tuple[int, ...] | None = None
    seating: str = ""
    forecast: Forecast | None = None
    #: The budgets of the tiers below the cache.
    host_bytes: int = 0
    file_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        """How many tokens the cache holds."""
        return self.num_blocks * self.block_size

    def lines(self) -> list[str]:
        """Format for people."""
        where = self.device
        if self.num_ranks > 1:
            where = f"{self.num_ranks} ranks ({self.plan}) on {self.device}, of the fullest"
        return [
            f"{self.model} in {self.precision} on {where}",
            *([self.seating] if self.seating else []),
            f"weights   {format_bytes(self.weight_bytes)} ({self.num_parameters:,} parameters in all)",
            f"KV cache  {format_bytes(self.kv_bytes)}: {self.num_blocks:,} blocks of {self.block_size} tokens,"
            f" {format_bytes(self.block_bytes)} each; {self.num_tokens:,} tokens",
            *self._tier_lines(),
            f"a step    {format_bytes(self.reserve_bytes)} kept for what it computes",
            f"a prompt and its answer have at most {self.max_length:,} tokens",
            "nothing is predicted: the planner does not know this device" if self.forecast is None
            else self.forecast.line(),
        ]  # fmt: skip

    def _tier_lines(self) -> list[str]:
        """Format the tiers. A host tier smaller than the cache evicts blocks before they are requested again."""
        lines = []
        for name, num_bytes in (("host", self.host_bytes), ("files", self.file_bytes)):
            if num_bytes:
                count = num_bytes // self.block_bytes
                small = ", fewer than the cache has, so they are soon evicted again" if count < self.num_blocks else ""
                lines.append(f"{name.ljust(9)} {format_bytes(num_bytes)} for evicted blocks: {count:,}{small}")
        return lines
