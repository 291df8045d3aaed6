"""The source of Shardwise as syntax trees, for promises about how it is written."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file: where it is, the module it makes, and what it says."""

    path: Path
    module: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The path as a person would say it."""
        return self.path.relative_to(PACKAGE).as_posix()

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"


@cache
def all_sources() -> tuple[Source, ...]:
    """Every file of the package."""
    return tuple(read_source(path) for path in sorted(PACKAGE.rglob("*.py")))


def read_source(path: Path) -> Source:
    parts = ("shardwise", *path.relative_to(PACKAGE).with_suffix("").parts)
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    text = path.read_text(encoding="utf-8")
    return Source(path=path, module=module, text=text, tree=ast.parse(text, filename=str(path)))
