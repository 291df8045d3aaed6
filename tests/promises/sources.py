"""The source of Shardwise as syntax trees, for promises about how it is written."""

import ast
import gc
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwise"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
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
def nodes_of(source: Source) -> tuple[ast.AST, ...]:
    """All of a syntax tree. Many promises look through it, and a walk through every file takes a second."""
    return tuple(ast.walk(source.tree))


@cache
def all_sources() -> tuple[Source, ...]:
    """Every file of the package."""
    # Nearly a million nodes that stay. While they come the collector would look through them again and again: 4 s of 5.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        found = tuple(read_source(path) for path in sorted(PACKAGE.rglob("*.py")))
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
    return found


def read_source(path: Path) -> Source:
    return parse_source(path, path.read_text(encoding="utf-8"))


def parse_source(path: Path, text: str) -> Source:
    """The source that a path of the package would have with this text."""
    parts = ("shardwise", *path.relative_to(PACKAGE).with_suffix("").parts)
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return Source(path=path, module=module, text=text, tree=ast.parse(text, filename=str(path)))
