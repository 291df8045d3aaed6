"""One device: what it holds and how fast it goes."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.cluster.kernel import Kernel
from shardwise.errors import ShardwiseError, unknown

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device as its maker and those who measured it describe it.

    `memory_bytes` is what a program can allocate, context included. `flops_per_second` is the dense peak of the data
    sheet for each precision; `matmul_efficiency` the share of it that the best shape of a matmul reaches,
    and `fp8_efficiency` the same in 8 bits (0: not measured, and taken alike).
    `memory_efficiency` is the share of `memory_bytes_per_second` that a long copy reaches. `num_units` are streaming
    multiprocessors (compute units, cores): what a matmul's tiles are dealt out to. `cache_bytes` is the
    last cache before that memory. `architecture` is the generation, for
    what kernels of one generation have in common. `kernels` are what a probe of a processor has measured of each kind.
    """

    name: str
    memory_bytes: int
    flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    num_units: int
    matmul_efficiency: float
    fp8_efficiency: float = 0.0
    memory_efficiency: float = 0.9
    cache_bytes: int = 0
    architecture: str = "other"
    kernels: tuple[Kernel, ...] = ()

    @property
    def streaming_bytes_per_second(self) -> float:
        """The memory's rate, less where kernels reach less of it than on other devices."""
        return self.memory_bytes_per_second * min(self.memory_efficiency / 0.9, 1.0)

    def peak(self, precision: str) -> float:
        """FLOP/s of the data sheet in a precision. One that the device lacks runs as the next wider one does."""
        precision = precision.removesuffix("-rows")  # What has a scale of its own does not matter to the data sheet.
        if precision not in PRECISIONS:
            raise unknown("precision", precision, PRECISIONS)
        wider = {"fp4": "fp8", "fp8": "bf16", "bf16": "fp16", "fp16": "tf32", "tf32": "fp32"}
        found: str | None = precision
        while found is not None and found not in self.flops_per_second:
            found = wider.get(found)
        if found is None:
            known = ", ".join(self.flops_per_second)
            raise ShardwiseError(
                f"{self.name} computes in {known}, and neither in {precision} nor in anything wider",
                remedy=f"precision={next(iter(self.flops_per_second))}",
            )
        return self.flops_per_second[found]
