"""Every error raised on purpose.

A user's mistake is a `ShardwiseError`: a sentence with the numbers in it, and a thing to type instead. A mistake of
ours is an `assert` with a sentence, and comes with its traceback.
"""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_MOST_NAMES = 3
#: Names of other programs, and ours for the same things.
_ALSO_CALLED = {
    "float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32",
    "lr": "optimizer.rate", "learning_rate": "optimizer.rate", "weight_decay": "optimizer.decay",
    "warmup_steps": "optimizer.warmup", "max_grad_norm": "optimizer.clip", "grad_clip": "optimizer.clip",
    "batch_size": "batch", "global_batch_size": "batch", "max_steps": "steps", "num_steps": "steps",
    "sequence_length": "data.sequence", "seq_length": "data.sequence", "seq_len": "data.sequence",
    "max_length": "data.sequence", "block_size": "data.sequence",
}  # fmt: skip


class ShardwiseError(Exception):
    """A user error: the problem, and what to type instead (`remedy`), if there is such a thing."""

    def __init__(self, problem: str, *, remedy: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return self.problem if self.remedy is None else f"{self.problem}\n  try: {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:
        # An error crosses from a failing rank to the process that started it. By default an exception is rebuilt from
        # its positional arguments only, and the remedy would be lost on the way.
        return _rebuilt, (type(self), self.problem, self.remedy)


def _rebuilt(kind: type[ShardwiseError], problem: str, remedy: str | None) -> ShardwiseError:
    return kind(problem, remedy=remedy)


@contextmanager
def os_errors_as(problem: str, *, remedy: str) -> Iterator[None]:
    """Convert an `OSError` within this context to a user error: `problem`, and the system's reason."""
    try:
        yield
    except OSError as error:
        raise ShardwiseError(f"{problem}: {error.strerror}", remedy=remedy) from None


def warn_plainly() -> None:
    """Print the warnings of this process in one line each, without the place in our source that gives them."""
    warnings.formatwarning = lambda message, *_args, **_keywords: f"warning: {message}\n"


def also_called(word: str, known: Iterable[str]) -> str | None:
    """Return the known word for what other programs call `word`, or None."""
    meant = _ALSO_CALLED.get(word.lower().replace("-", "_"))
    return meant if meant is not None and meant in known else None


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` was most likely meant to be, or None if none is near."""
    from difflib import get_close_matches  # Only ever needed on the way to an error.

    by_lower_case = {candidate.lower(): candidate for candidate in known}
    if (meant := also_called(word, by_lower_case.values())) is not None:
        return meant
    matches = get_close_matches(word.lower(), by_lower_case, n=1, cutoff=0.6)
    return by_lower_case[matches[0]] if matches else None


def some(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are, for an error."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def unknown(what: str, word: str, known: Iterable[str]) -> ShardwiseError:
    """Return the error for a word that should have been one of `known`. Its remedy is the nearest of them."""
    known = list(known)
    shown = word if len(word) <= 60 else f"{word[:57]}..."
    return ShardwiseError(f"unknown {what} {shown!r}; known: {', '.join(known)}", remedy=nearest(word, known))
