"""One thing that the doctor has found."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is wrong, the numbers that say so, what to type, and what it would gain.

    `kind` is one of the doctor's words for faults. `gain_seconds` is by how much the step would be shorter, from the
    trace played again with the fix; None where a fix is for memory, or its gain cannot be played. `about` says what
    kind of gain it is then.
    """

    kind: str
    problem: str
    evidence: str
    fix: str
    gain_seconds: float | None = None
    about: str = ""
    ranks: tuple[int, ...] = ()
