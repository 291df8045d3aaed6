"""Devices and nodes by name.

Figures are from facts.md, sections 3.1 (data sheets), 3.2 (best measured matmul), 3.3 (multiprocessors) and 2.3
(links). Figures from memory, without a source, are marked (M) there and here. TFLOP/s are dense. A program can use 0.99
of the memory on the data sheet (in GB, read as GiB): an H200 of 141 GB shows 139.8 GiB.
"""

from shardwise.cluster.device import Device
from shardwise.cluster.kernel import Kernel
from shardwise.cluster.topology import Fabric, Host, Link, NodeKind
from shardwise.errors import ShardwiseError, nearest

_VISIBLE = 0.99
_TERA = 1e12
_GIGA = 1e9


# Best fp8 matmul as a share (3.2): H100 1403 of 1979, H200 1453, B200 3433 of 4500, GB200 3616 of 5000; MI300X 990 (M).
_FP8 = {"h100": 0.709, "h200": 0.734, "b200": 0.763, "gb200": 0.723, "mi300x": 0.38}
# Share of the memory bandwidth that kernels reach: .91 on A100, .67 on B200 (3.2).
_STREAMED = {"blackwell": 0.67}


def _gpu(
    name: str,
    gigabytes: float,
    terabytes_per_second: float,
    num_units: int,
    efficiency: float,
    **teraflops: float,
) -> Device:
    generations = {"v100": "volta", "a100": "ampere", "a800": "ampere", "h": "hopper", "gh": "hopper", "b": "blackwell"}
    generations |= {"gb": "blackwell", "l4": "ada", "rtx3": "ampere", "rtx4": "ada", "rtx5": "blackwell", "mi": "cdna"}
    # Second-level caches, MiB (makers' white papers, M).
    caches = {"volta": 6, "ampere": 40, "hopper": 50, "blackwell": 126, "ada": 72, "cdna": 256}
    begun = [prefix for prefix in generations if name.startswith(prefix)]
    architecture = generations[max(begun, key=len)] if begun else "other"
    return Device(
        name=name,
        memory_bytes=int(gigabytes * _VISIBLE * 2**30),
        flops_per_second={precision: value * _TERA for precision, value in teraflops.items()},
        memory_bytes_per_second=terabytes_per_second * _TERA,
        num_units=num_units,
        matmul_efficiency=efficiency,
        fp8_efficiency=_FP8.get(name.partition("-")[0], 0.0),
        memory_efficiency=_STREAMED.get(architecture, 0.9),
        cache_bytes=caches.get(architecture, 0) * 2**20,
        architecture=architecture,
    )


# One core of an aarch64 server with torch 2.13, fp32, measured by a probe: rates per second, in the units of
# `cluster/kernel.py`, and seconds per call.
_PROCESSOR = tuple(
    Kernel(kind=kind, forward=forward * _GIGA, backward=backward * _GIGA, forward_call=calls[0], backward_call=calls[1])
    for kind, forward, backward, calls in (
        ("matmul", 52.0, 36.0, (30e-6, 125e-6)),
        ("operands", 0.8, 5.5, (0.0, 0.0)),
        ("attention", 28.0, 19.0, (36e-6, 134e-6)),
        ("scores", 0.23, 0.16, (0.0, 0.0)),
        ("norm", 34.0, 16.0, (67e-6, 180e-6)),
        ("nonlinearity", 4.6, 6.6, (20e-6, 84e-6)),
        ("rotation", 11.0, 17.0, (220e-6, 305e-6)),
        ("loss", 4.0, 3.6, (47e-6, 83e-6)),
        ("elementwise", 24.0, 19.0, (9e-6, 66e-6)),
        ("optimizer", 8.6, 8.6, (0.0, 0.0)),
    )
)


# Best matmul, as a share of the peak (3.2): A100 .869, A100 PCIe .81, H100 and H200 .803, B200 .776, GB200 .729, B300
# 1769 of 2250, MI300X .51, MI325X .60, MI355X 1565 of 2500. Without a measurement: .8 for NVIDIA, .51 for AMD.
# fp32 without tensor cores, and fp4, are from memory (M).
DEVICES = {
    device.name: device
    for device in (
        _gpu("v100-16g", 16, 0.90, 80, 0.80, fp16=125, fp32=15.7),
        _gpu("v100-32g", 32, 0.90, 80, 0.80, fp16=125, fp32=15.7),
        _gpu("v100-pcie-32g", 32, 0.90, 80, 0.80, fp16=112, fp32=14),
        _gpu("a100-40g", 40, 1.555, 108, 0.869, bf16=312, fp16=312, tf32=156, fp32=19.5),
        _gpu("a100-80g", 80, 2.00, 108, 0.869, bf16=312, fp16=312, tf32=156, fp32=19.5),
        _gpu("a100-pcie-40g", 40, 1.555, 108, 0.81, bf16=312, fp16=312, tf32=156, fp32=19.5),
        _gpu("a100-pcie-80g", 80, 1.94, 108, 0.81, bf16=312, fp16=312, tf32=156, fp32=19.5),
        _gpu("a800", 80, 2.00, 108, 0.869, bf16=312, fp16=312, tf32=156, fp32=19.5),
        _gpu("h100-80g", 80, 3.35, 132, 0.803, fp8=1979, bf16=989, fp16=989, tf32=494.5, fp32=67),
        # The H100 of Grand Teton: HBM2e, and 500 of 700 W. Clocks scale with the cube root of power: x (5/7)^(1/3).
        _gpu("h100-96g-hbm2e-500w", 96, 2.40, 132, 0.803, fp8=1769, bf16=884, fp16=884, tf32=442, fp32=60),
        _gpu("h100-pcie", 80, 2.00, 114, 0.80, fp8=1513, bf16=756, fp16=756, tf32=378, fp32=51),
        _gpu("h100-nvl", 94, 3.9, 132, 0.80, fp8=1670, bf16=835, fp16=835, tf32=417, fp32=60),
        _gpu("h200", 141, 4.80, 132, 0.803, fp8=1979, bf16=989, fp16=989, tf32=494.5, fp32=67),
        _gpu("gh200", 96, 4.0, 132, 0.838, fp8=1979, bf16=989, fp16=989, tf32=494.5, fp32=67),
        _gpu("h20", 96, 4.0, 78, 0.90, fp8=296, bf16=148, fp16=148, tf32=74, fp32=44),
        _gpu("b200", 180, 8.0, 148, 0.776, fp4=9000, fp8=4500, bf16=2250, fp16=2250, tf32=1125, fp32=75),
        _gpu("gb200", 186, 8.0, 152, 0.729, fp4=10000, fp8=5000, bf16=2500, fp16=2500, tf32=1250, fp32=80),
        _gpu("b300", 288, 8.0, 148, 0.786, fp4=13500, fp8=4500, bf16=2250, fp16=2250, tf32=1125, fp32=75),
        _gpu("gb300", 288, 8.0, 152, 0.786, fp4=15000, fp8=5000, bf16=2500, fp16=2500, tf32=1250, fp32=80),
        _gpu("l4", 24, 0.30, 58, 0.80, fp8=242, bf16=121, fp16=121, tf32=60, fp32=30),
        _gpu("l40s", 48, 0.86, 142, 0.80, fp8=733, bf16=362, fp16=362, tf32=183, fp32=91),
        _gpu("rtx3090", 24, 0.936, 82, 0.80, bf16=71, fp16=71, tf32=35.6, fp32=35.6),
        _gpu("rtx4090", 24, 1.01, 128, 0.80, fp8=330, bf16=165.2, fp16=165.2, tf32=82.6, fp32=82.6),
        _gpu("rtx5090", 32, 1.79, 170, 0.80, fp8=419, bf16=209.5, fp16=209.5, tf32=104.8, fp32=104.8),
        _gpu("mi250x", 128, 3.28, 220, 0.51, bf16=383, fp16=383, fp32=47.9),
        _gpu("mi300x", 192, 5.3, 304, 0.51, fp8=2610, bf16=1307, fp16=1307, tf32=653.7, fp32=163),
        _gpu("mi325x", 256, 6.0, 304, 0.60, fp8=2610, bf16=1307, fp16=1307, tf32=653.7, fp32=163),
        _gpu("mi355x", 288, 8.0, 256, 0.626, fp8=5000, bf16=2500, fp16=2500, fp32=157),
        _gpu("tpu-v4", 32, 1.2, 2, 0.80, bf16=275),
        _gpu("tpu-v5e", 16, 0.82, 1, 0.80, bf16=197),
        _gpu("tpu-v5p", 95, 2.76, 2, 0.80, bf16=459),
        # One process on one core: defaults, which a probe replaces. Measured with one thread of torch 2.13 on a
        # two-core machine: 36 GFLOP/s in fp32 matmuls (1024 cubed), 34 GB/s read and written by a long copy, and the
        # rates of each kind of operation.
        Device(
            name="cpu",
            memory_bytes=4 * 2**30,
            flops_per_second={"fp32": 40e9},
            memory_bytes_per_second=34e9,
            num_units=1,
            matmul_efficiency=0.9,
            memory_efficiency=1.0,
            architecture="cpu",
            kernels=_PROCESSOR,
        ),
    )
}

_ALIASES = {
    "a100": "a100-80g",
    "a100-sxm": "a100-80g",
    "a100-pcie": "a100-pcie-80g",
    "h100": "h100-80g",
    "h100-sxm": "h100-80g",
    "h200-141g": "h200",
    "v100": "v100-32g",
    "3090": "rtx3090",
    "4090": "rtx4090",
    "5090": "rtx5090",
}

# Links between the devices of a node: unidirectional GB/s of each device, and the latency of a step (facts 2.2, 2.3).
_NVLINK2 = Link(name="nvlink2", bytes_per_second=150 * _GIGA, latency_seconds=3.4e-6)
_NVLINK3 = Link(name="nvlink3", bytes_per_second=300 * _GIGA, latency_seconds=3.4e-6)
_NVLINK3_A800 = Link(name="nvlink3", bytes_per_second=200 * _GIGA, latency_seconds=3.4e-6)  # (M)
_NVLINK4 = Link(name="nvlink4", bytes_per_second=450 * _GIGA, latency_seconds=3.4e-6, in_switch=True)
_NVLINK5 = Link(name="nvlink5", bytes_per_second=900 * _GIGA, latency_seconds=3.4e-6, in_switch=True)
_PCIE3 = Link(name="pcie3", bytes_per_second=12 * _GIGA, latency_seconds=5.7e-6, is_shared=True)
_PCIE4 = Link(name="pcie4", bytes_per_second=25 * _GIGA, latency_seconds=5.7e-6, is_shared=True)
_PCIE5 = Link(name="pcie5", bytes_per_second=50 * _GIGA, latency_seconds=5.7e-6, is_shared=True)
_XGMI = Link(name="xgmi", bytes_per_second=448 * _GIGA, latency_seconds=3.4e-6)
_XGMI_250 = Link(name="xgmi", bytes_per_second=350 * _GIGA, latency_seconds=3.4e-6)
_XGMI_355 = Link(name="xgmi", bytes_per_second=535.5 * _GIGA, latency_seconds=3.4e-6)
_ICI = Link(name="ici", bytes_per_second=100 * _GIGA, latency_seconds=1e-6)  # (M)
_SHARED_MEMORY = Link(name="shared memory", bytes_per_second=2.4 * _GIGA, latency_seconds=190e-6, is_shared=True)

# Links of each device to other nodes (2.3): EDR 100 Gb/s, HDR 200, NDR 400, XDR 800. With NCCL's simple protocol, a
# step over the network takes 14 us (2.2).
_EDR = Fabric(name="100Gb/s a GPU", bytes_per_second=12.5 * _GIGA, latency_seconds=14e-6)
_HDR = Fabric(name="200Gb/s a GPU", bytes_per_second=25 * _GIGA, latency_seconds=14e-6)
_NDR = Fabric(name="400Gb/s a GPU", bytes_per_second=50 * _GIGA, latency_seconds=14e-6)
_XDR = Fabric(name="800Gb/s a GPU", bytes_per_second=100 * _GIGA, latency_seconds=14e-6)
_ETHERNET = Fabric(name="25Gb/s a node", bytes_per_second=0.39 * _GIGA, latency_seconds=30e-6)
_LOOPBACK = Fabric(name="loopback", bytes_per_second=1.3 * _GIGA, latency_seconds=300e-6)

# RAM and CPU of a node, from the makers' descriptions of DGX and HGX systems (M). Pinned copies: 55.2 GB/s on PCIe 5
# (peers.md, measured), half of it on PCIe 4. Fused AdamW on 16 cores updates 3.75e9 parameters/s (peers.md, measured).
# In a DGX-1 and a DGX A100, two devices share the uplink of one PCIe switch; in a DGX H100 each has its own. RAM: two
# sockets of 6 DDR4-2933, 8 DDR4-3200 and 8 DDR5-4800 channels, two Graces, two channels of DDR5 (makers, M).
_HOST3 = Host(
    memory_bytes=768 * 2**30,
    device_bytes_per_second=12e9,
    num_cores=40,
    devices_on_link=2,
    memory_bytes_per_second=281e9,
)
_HOST4 = Host(
    memory_bytes=1024 * 2**30,
    device_bytes_per_second=25e9,
    num_cores=128,
    devices_on_link=2,
    memory_bytes_per_second=409e9,
)
_HOST5 = Host(memory_bytes=2048 * 2**30, device_bytes_per_second=55e9, num_cores=112, memory_bytes_per_second=614e9)
_HOST_C2C = Host(memory_bytes=960 * 2**30, device_bytes_per_second=380e9, num_cores=144, memory_bytes_per_second=1e12)
_HOST_PC = Host(memory_bytes=128 * 2**30, device_bytes_per_second=25e9, num_cores=16, memory_bytes_per_second=80e9)
_HOST_CPU = Host(memory_bytes=8 * 2**30, device_bytes_per_second=6e9, num_cores=2, memory_bytes_per_second=34e9)


def _node(devices_per_node: int, link: Link, fabric: Fabric, host: Host, *, domain: int | None = None) -> NodeKind:
    return NodeKind(
        devices_per_node=devices_per_node, link=link, domain=domain or devices_per_node, fabric=fabric, host=host
    )


# The usual node of each device. NVL72: 4 devices in a node, 72 in one NVLink domain.
NODES = {
    "v100-16g": _node(4, _NVLINK2, _EDR, _HOST3),
    "v100-32g": _node(4, _NVLINK2, _EDR, _HOST3),
    "v100-pcie-32g": _node(4, _PCIE3, _EDR, _HOST3),
    "a100-40g": _node(8, _NVLINK3, _HDR, _HOST4),
    "a100-80g": _node(8, _NVLINK3, _HDR, _HOST4),
    "a100-pcie-40g": _node(8, _PCIE4, _HDR, _HOST4),
    "a100-pcie-80g": _node(8, _PCIE4, _HDR, _HOST4),
    "a800": _node(8, _NVLINK3_A800, _HDR, _HOST4),
    "h100-80g": _node(8, _NVLINK4, _NDR, _HOST5),
    "h100-96g-hbm2e-500w": _node(8, _NVLINK4, _NDR, _HOST5),
    "h100-pcie": _node(8, _PCIE5, _HDR, _HOST5),
    "h100-nvl": _node(8, _PCIE5, _NDR, _HOST5),
    "h200": _node(8, _NVLINK4, _NDR, _HOST5),
    "gh200": _node(1, _NVLINK4, _NDR, _HOST_C2C),
    "h20": _node(8, _NVLINK4, _NDR, _HOST5),
    "b200": _node(8, _NVLINK5, _NDR, _HOST5),
    "gb200": _node(4, _NVLINK5, _NDR, _HOST_C2C, domain=72),
    "b300": _node(8, _NVLINK5, _XDR, _HOST5),
    "gb300": _node(4, _NVLINK5, _XDR, _HOST_C2C, domain=72),
    "l4": _node(8, _PCIE4, _ETHERNET, _HOST4),
    "l40s": _node(8, _PCIE4, _HDR, _HOST4),
    "rtx3090": _node(8, _PCIE4, _ETHERNET, _HOST_PC),
    "rtx4090": _node(8, _PCIE4, _ETHERNET, _HOST_PC),
    "rtx5090": _node(8, _PCIE5, _ETHERNET, _HOST_PC),
    "mi250x": _node(4, _XGMI_250, _HDR, _HOST4),
    "mi300x": _node(8, _XGMI, _NDR, _HOST5),
    "mi325x": _node(8, _XGMI, _NDR, _HOST5),
    "mi355x": _node(8, _XGMI_355, _NDR, _HOST5),
    "tpu-v4": _node(4, _ICI, _HDR, _HOST4, domain=4096),
    "tpu-v5e": _node(4, _ICI, _HDR, _HOST4, domain=256),
    "tpu-v5p": _node(4, _ICI, _HDR, _HOST4, domain=8960),
    "cpu": _node(64, _SHARED_MEMORY, _LOOPBACK, _HOST_CPU),
}


def get_device(name: str) -> Device:
    """Return the device with this name. The error for an unknown name suggests the nearest known one."""
    key = name.strip().lower()
    key = _ALIASES.get(key, key)
    if key not in DEVICES:
        near = nearest(key, [*DEVICES, *_ALIASES])
        raise ShardwiseError(
            f"unknown device {name!r}; known: {', '.join(DEVICES)}",
            remedy=near or "cluster.toml, which can describe any device",
        )
    return DEVICES[key]


def find_device(called: str) -> str | None:
    """Return the catalogue's name for the name that a GPU reports, or None: `NVIDIA A100-SXM4-80GB` is `a100-80g`."""
    squeezed = "".join(letter for letter in called.lower() if letter.isalnum())
    found = [name for name in DEVICES if name.split("-")[0] in squeezed]
    if not found:
        return None
    # `gh200` contains `h200`, so the longest match counts; among variants, the one with most of its parts in the name.
    longest = max(len(name.split("-")[0]) for name in found)
    found = [name for name in found if len(name.split("-")[0]) == longest]
    return max(found, key=lambda name: (sum(part in squeezed for part in name.split("-")), -len(name)))
