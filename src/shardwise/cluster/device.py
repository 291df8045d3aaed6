"""One device: its memory and its speed."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.cluster.kernel import Kernel
from shardwise.errors import ShardwiseError, unknown

PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device, with figures from its data sheet and from measurements.

    `memory_bytes` is what a program can allocate, CUDA context included. `flops_per_second` is the dense peak of the
    data sheet for each precision. `matmul_efficiency` is the share of it that the best matmul shape reaches, and
    `fp8_efficiency` the same in fp8 (0: not measured, so `matmul_efficiency` is assumed).
    `memory_efficiency` is the share of `memory_bytes_per_second` that a long copy reaches. `num_units` is the number of
    streaming multiprocessors (compute units, cores) over which a matmul's tiles are distributed. `cache_bytes` is the
    size of the last-level cache. `architecture` is the generation, for constants that its kernels share. `kernels` are
    the measured rates of each kind of operation on a CPU.
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
        """The memory bandwidth, reduced on devices whose kernels reach less than the usual 0.9 of it."""
        return self.memory_bytes_per_second * min(self.memory_efficiency / 0.9, 1.0)

    def peak(self, precision: str) -> float:
        """Return the data sheet's FLOP/s in a precision, or in the next wider one if the device lacks it."""
        precision = precision.removesuffix("-rows")  # The peak does not depend on the granularity of scales.
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
