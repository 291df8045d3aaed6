"""The values of a configuration, asked for by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ShardwiseError

GIVE_THE_MODULE = "give the module itself: shardwise.model.trace.trace_model(module, example_batch)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """A configuration, and what errors call it."""

    values: Mapping[str, Any]
    source: str

    def count(self, *keys: str, default: int | None = None) -> int:
        """Return an integer of at least 1 under the first of these keys that exists."""
        for key in keys:
            value = self.values.get(key)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                    raise ShardwiseError(
                        f"{self.source} has {key} = {value!r}; it must be a whole number of at least 1",
                        remedy=f'"{key}": {default or 32}',
                    )
                return value
        if default is None:
            raise ShardwiseError(f"{self.source} says nothing about {keys[0]}", remedy=f'"{keys[0]}": 32')
        return default

    def find_count(self, *keys: str) -> int | None:
        """Like `count`, or None where no such key has a value (also 0, which configurations write for "none")."""
        for key in keys:
            if self.values.get(key):
                return self.count(key)
        return None

    def flag(self, key: str, default: bool = False) -> bool:
        """Yes or no."""
        value = self.values.get(key)
        return default if value is None else bool(value)

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self.values.get(key)
        return default if value is None else str(value)

    def items(self, key: str) -> list[Any] | None:
        """Return a list, or None."""
        value = self.values.get(key)
        return list(value) if isinstance(value, (list, tuple)) else None

    def drops(self, *keys: str, default: float = 0.0) -> bool:
        """Whether one of these probabilities of dropout is above zero."""
        return any((default if self.values.get(key) is None else self.values[key]) > 0 for key in keys)

    def heads(self, hidden: int, *keys: str) -> int:
        """Return the number of heads, which must divide the hidden width unless `head_dim` is given."""
        heads = self.count(*(keys or ("num_attention_heads",)))
        if self.values.get("head_dim") is None and hidden % heads:
            raise ShardwiseError(
                f"{self.source} has a hidden width of {hidden} and {heads} heads, which do not divide it",
                remedy=f'"head_dim": {hidden // heads}, or a number of heads that divides {hidden}',
            )
        return heads
