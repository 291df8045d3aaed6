"""What a source imports, read from its syntax tree.

An import inside a function counts like any other: it is knowledge all the same.
"""

import ast
from collections.abc import Iterable, Iterator
from functools import cache

from tests.promises.sources import Source, all_sources, nodes_of


def imported_names(source: Source, nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Every dotted name that the nodes import, relative ones made absolute. `from a import b` gives `a.b`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = source.module.split(".")
            above = here[: len(here) - node.level + source.is_package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


@cache
def known_modules(source: Source) -> frozenset[str]:
    """The modules of Shardwise that a source imports, anywhere in it."""
    known = set()
    for name in imported_names(source, nodes_of(source)):
        if name.split(".")[0] == "shardwise":
            # `from shardwise.units import format_bytes` is knowledge of `shardwise.units`.
            known.add(name if name in _all_modules() else name.rpartition(".")[0])
    return frozenset(known)


@cache
def _all_modules() -> frozenset[str]:
    return frozenset(source.module for source in all_sources())


def module_level_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """What runs at import: everything but the bodies of functions, and of `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        yield node
        yield from module_level_nodes(node)
