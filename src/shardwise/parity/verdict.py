"""How a plan compares with one device."""

from dataclasses import dataclass

from shardwise.parity.compare import Comparison
from shardwise.parity.coverage import Coverage, Halves
from shardwise.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a plan compares with one device. `owners` are the ranks that hold the first tensor that differs.

    `halves` is how its bf16 compares; or why that was not tried. `by_microbatches` says, where ranks train what one
    device trains on microbatches and not on whole batches, by how much these differ.
    """

    plan: Plan
    num_parameters: int
    comparison: Comparison
    owners: tuple[str, ...]
    halves: Halves
    by_microbatches: str | None
    coverage: Coverage

    @property
    def is_same(self) -> bool:
        """Whether nothing differs, in fp32 nor in bf16."""
        return self.comparison.is_same and (isinstance(self.halves, str) or self.halves.problem is None)
