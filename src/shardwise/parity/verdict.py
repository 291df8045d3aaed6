"""The result of a check."""

from dataclasses import dataclass

from shardwise.parity.compare import Comparison
from shardwise.parity.coverage import Coverage, Halves
from shardwise.planner.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a check. `owners` are the ranks that hold the first tensor that differs.

    `halves` is the result in bf16, or the reason why it was not tried. If the ranks agree with one device on
    microbatches but not on whole batches, `by_microbatches` says by how much these differ.
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
        """Whether nothing differs, neither in fp32 nor in bf16."""
        return self.comparison.is_same and (isinstance(self.halves, str) or self.halves.problem is None)
