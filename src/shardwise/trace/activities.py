"""The activities of a GPU, stream by stream, by its own clock: kernels, NCCL, copies by direction.

A rank's events are its instructions; its activities are what its device executed for them, and on which stream. The
kind of an activity follows from its name in CUDA and NCCL.
"""

import re
from enum import StrEnum
from typing import NamedTuple


class ActivityKind(StrEnum):
    """The kind of a GPU activity."""

    KERNEL = "kernels"
    NCCL = "NCCL"
    HOST_TO_DEVICE = "host to device"
    DEVICE_TO_HOST = "device to host"
    DEVICE_TO_DEVICE = "device to device"
    PEER = "peer to peer"
    MEMORY_SET = "memory set"


#: Copies between memories. A copy within the device's own memory counts as work, like a kernel.
COPIES = frozenset({ActivityKind.HOST_TO_DEVICE, ActivityKind.DEVICE_TO_HOST, ActivityKind.PEER})
#: Activities in which the device itself works.
WORK = frozenset({ActivityKind.KERNEL, ActivityKind.DEVICE_TO_DEVICE, ActivityKind.MEMORY_SET})

_COPY_MARKS = {
    "htod": ActivityKind.HOST_TO_DEVICE,
    "dtoh": ActivityKind.DEVICE_TO_HOST,
    "ptop": ActivityKind.PEER,
    "dtod": ActivityKind.DEVICE_TO_DEVICE,
}
_COLLECTIVE = re.compile(r"nccl(?:Dev)?Kernel_?([A-Za-z]+)")
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")
#: Prefixes of a kernel's name that are left out.
_TEMPLATE = re.compile(r"^(?:void |std::|at::native::|\(anonymous namespace\)::)+")
_LONGEST_NAME = 60


class Activity(NamedTuple):
    """One activity of a GPU. A named tuple, because a step may have tens of thousands.

    `launched` is the time of its launch by the host, None if unknown; `instruction` is the one that launched it.
    `purpose` is the purpose of a collective and `group` its ranks, if known. Activities of several ranks with the same
    purpose and group are matched in order: the first of each are one collective, and so on.
    """

    rank: int
    stream: int
    kind: ActivityKind
    name: str
    start: float
    end: float
    launched: float | None = None
    instruction: str = ""
    purpose: str = ""
    group: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def later(self, seconds: float) -> "Activity":
        """Return the same activity by another clock."""
        launched = None if self.launched is None else self.launched + seconds
        return self._replace(start=self.start + seconds, end=self.end + seconds, launched=launched)

    @property
    def what(self) -> str:
        """Its name as a cause of waiting."""
        return self.purpose or (collective_of(self.name) if self.kind is ActivityKind.NCCL else self.name)

    @property
    def is_pageable(self) -> bool:
        """Whether a copy is from or to memory of the host that is not pinned: the host waits for it."""
        return self.kind in COPIES and "pageable" in self.name.lower()


def kind_of(name: str) -> ActivityKind:
    """Return the kind of an activity, by its name."""
    lower = name.lower()
    if lower.startswith("nccl"):
        return ActivityKind.NCCL
    if lower.startswith("memset"):
        return ActivityKind.MEMORY_SET
    if lower.startswith("memcpy"):
        return next((kind for mark, kind in _COPY_MARKS.items() if mark in lower), ActivityKind.DEVICE_TO_DEVICE)
    return ActivityKind.KERNEL


def collective_of(name: str) -> str:
    """Return `NCCL all reduce` for `ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)`."""
    found = _COLLECTIVE.match(name)
    return "NCCL" if found is None else f"NCCL {_WORDS.sub(' ', found[1]).lower()}"


def short_name(name: str) -> str:
    """Return a kernel's name without its templates and arguments, short enough to read."""
    plain = _TEMPLATE.sub("", name)
    short = re.split(r"[<(]", plain, maxsplit=1)[0] if not plain.startswith("Mem") else plain
    return (short or plain)[:_LONGEST_NAME]
