"""One instruction of a schedule, and its text form.

    2F0             stage 2, forward of microbatch 0
    2B0 2I0 2W0     its full backward; its input gradient alone; its weight gradient alone
    4F3&3B1         a forward and a backward that share the device (overlapped pair)
    0SEND_F2>1      stage 0 sends microbatch 2's activation to stage 1
    1RECV_F2<0      stage 1 receives it
    1SEND_B2>0      stage 1 sends microbatch 2's gradient back to stage 0
    0RECV_B2<1      stage 0 receives it
    2GATHER0        stage 2's sharded parameters are brought in for the first time
    2RELEASE0       and let go again
    2REDUCE0        stage 2's gradients of step 0 are reduced over its data-parallel replicas
    2REDUCE0~1      and those that it shares with other stages, over the stages of tie 1
    2STEP0          stage 2's weights take step 0
    2OFFLOAD3       stage 2's saved activations of microbatch 3 leave the device
    2RELOAD3        and come back

`B` is `I` and `W` at once. The dependencies of an instruction are defined in `needs.py`, and nowhere else.
"""

import re
from enum import StrEnum
from typing import NamedTuple

from shardwise.errors import ShardwiseError, unknown


class Kind(StrEnum):
    """What an instruction does."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own letter for the input gradient
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    GATHER = "GATHER"
    RELEASE = "RELEASE"
    REDUCE = "REDUCE"
    STEP = "STEP"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"


#: The kinds that occupy the device. All others run beside computation.
COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.STEP})
BACKWARD = frozenset({Kind.B, Kind.I})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
OFFLOADS = frozenset({Kind.OFFLOAD, Kind.RELOAD})


class Instruction(NamedTuple):
    """One instruction. A named tuple and not a dataclass, because a schedule may hold millions.

    `microbatch` is the microbatch; for REDUCE and STEP it is the step, for GATHER and RELEASE the index
    of that gather.
    `peer` is the other stage of a SEND or RECV, and the tie of a REDUCE between stages.
    `beside` is the backward that shares the device with this forward.
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None
    beside: "Instruction | None" = None

    def __str__(self) -> str:
        """Return the text form, which `parse` reads back."""
        kind, stage, microbatch, peer, beside = self
        text = f"{stage}{kind}{microbatch}"
        if peer is not None:
            text += f"{_PEER_MARK[kind]}{peer}"
        return text if beside is None else f"{text}&{beside}"

    @property
    def parts(self) -> "tuple[Instruction, ...]":
        """The instruction itself, or the two halves of an overlapped pair."""
        if self.beside is None:
            return (self,)
        return (self._replace(beside=None), self.beside)


def forward(stage: int, microbatch: int) -> Instruction:
    """Return `2F0`."""
    return Instruction(Kind.F, stage, microbatch)


def backward(stage: int, microbatch: int) -> Instruction:
    """Return `2B0`."""
    return Instruction(Kind.B, stage, microbatch)


def overlapped(ahead: Instruction, back: Instruction) -> Instruction:
    """Return `4F3&3B1`: a forward and a backward priced and run as one, both results at its end."""
    assert ahead.kind is Kind.F, f"{ahead} is not a forward"
    assert back.kind in BACKWARD, f"{back} is not a backward"
    return ahead._replace(beside=back)


_PEER_MARK = {Kind.SEND_F: ">", Kind.SEND_B: ">", Kind.RECV_F: "<", Kind.RECV_B: "<", Kind.REDUCE: "~"}
_PATTERN = re.compile(r"(\d+)([A-Z_]+)(\d+)(?:([<>~])(\d+))?")


def parse(text: str) -> Instruction:
    """Read one instruction from its text form."""
    ahead, pair, back = text.partition("&")
    if not pair:
        return _parse_single(text)
    first, second = _parse_single(ahead), _parse_single(back)
    if first.kind is not Kind.F or second.kind not in BACKWARD:
        raise ShardwiseError(
            f"'{text}' pairs {first.kind} with {second.kind}, but a pair is a forward beside a backward",
            remedy="a pair like 4F3&3B1",
        )
    return overlapped(first, second)


def _parse_single(text: str) -> Instruction:
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ShardwiseError(
            f"'{text}' is not an instruction: it must be a stage, a kind and a microbatch",
            remedy="2F0, 1I3, 0SEND_F2>1, 1RECV_F2<0, 4F3&3B1 or 2STEP0",
        )
    stage, word, microbatch, mark, peer = match.groups()
    if word not in Kind.__members__:
        raise unknown("instruction", word, list(Kind.__members__))
    kind = Kind[word]
    if mark != _PEER_MARK.get(kind) and not (kind is Kind.REDUCE and mark is None):
        wanted = _PEER_MARK.get(kind)
        should = f"{stage}{word}{microbatch}" + (f"{wanted}{peer or int(stage) + 1}" if wanted else "")
        raise ShardwiseError(
            f"'{text}': {word} " + (f"names its peer stage after '{wanted}'" if wanted else "has no peer"),
            remedy=should,
        )
    return Instruction(kind, int(stage), int(microbatch), None if peer is None else int(peer))
