"""The result of a probe, as a value: figures of every device, pair and collective, and the outliers among them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.cluster.curve import Curve
from shardwise.cluster.kernel import Kernel
from shardwise.cluster.pairs import Pairs, SlowDevice, SlowLink, slow_devices, slow_in_links, slow_links


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """One device, measured. Rates are bytes/s; a copy in its memory counts both the bytes read and the bytes written.

    `to_device`, `to_host` and `both_ways` (each direction when both are in use) are rates between host and device, 0 if
    there is no such link. `spread` is the deviation of the samples from their median, as a share, for the worst figure.
    `kernels` are measured on CPUs only.
    """

    host: str
    device: str
    kind: str
    memory_bytes: int
    flops_per_second: Mapping[str, float]
    copied: float
    to_device: float = 0.0
    to_host: float = 0.0
    both_ways: float = 0.0
    disk_write: float = 0.0
    disk_read: float = 0.0
    num_cores: int = 1
    host_bytes: int = 0
    spread: float = 0.0
    kernels: tuple[Kernel, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.host} {self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """All measurements. Those that were not requested are empty."""

    backend: str
    devices: tuple[DeviceFigures, ...]
    pairs: Pairs | None = None
    curves: tuple[Curve, ...] = ()
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def hosts(self) -> dict[str, list[int]]:
        """The numbers of each host's devices, in the order of ranks."""
        found: dict[str, list[int]] = {}
        for number, each in enumerate(self.devices):
            found.setdefault(each.host, []).append(number)
        return found

    def slow_links(self) -> tuple[SlowLink, ...]:
        return () if self.pairs is None else slow_links(self.pairs)

    def slow_devices(self) -> tuple[SlowDevice, ...]:
        """Return devices that are slower than others of their kind in matmuls, copies or links."""
        found = [] if self.pairs is None else list(slow_in_links(self.pairs))
        for kind in dict.fromkeys(each.kind for each in self.devices):
            alike = [number for number, each in enumerate(self.devices) if each.kind == kind]
            rates = {"copies in memory": [self.devices[number].copied for number in alike]}
            for precision in self.devices[alike[0]].flops_per_second:
                every = [self.devices[number].flops_per_second.get(precision, 0.0) for number in alike]
                rates[f"{precision} matmuls"] = every
            rates["copies to the device"] = [self.devices[number].to_device for number in alike]
            rates["copies to the host"] = [self.devices[number].to_host for number in alike]
            for what, values in rates.items():
                found += [
                    SlowDevice(device=alike[each.device], what=what, rate=each.rate, usual=each.usual)
                    for each in slow_devices(what, values)
                ]
        return tuple(found)
