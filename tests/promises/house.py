"""What is held of the source, each as a function from all sources to the sentences about those that break it.

A promise is one test over all files: its failure lists every offender, and not the first.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain

from tests.promises.imports import known_modules
from tests.promises.sources import Source, nodes_of

MOST_LINES_OF_A_FILE = 450
MOST_LINES_OF_A_FUNCTION = 70
MOST_LINES_OF_A_CLASS = 250
#: What users call: it puts together, and computes nothing itself.
MOST_LINES_OF_THE_ENGINE = 200
MOST_MODULES_IMPORTED = 15
#: A room with more files than this has a drawing at its head, of at most so many lines, with some of its files in it.
MOST_FILES_WITHOUT_DRAWING = 15
MOST_LINES_OF_A_DRAWING = 12
FEWEST_FILES_DRAWN = 4
NAMES_THAT_SAY_NOTHING = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "base",
    "core",
    "manager",
    "wrapper",
    "misc",
    "v2",
}
READS_THE_ENVIRONMENT = {"environ", "environb", "getenv", "putenv"}
#: A line with a stroke, or with columns.
_IS_DRAWN = re.compile(r"--|->|──|\||\S {2,}\S")

Sources = Iterable[Source]
Offenders = Iterator[str]


def global_statements(sources: Sources) -> Offenders:
    for source in sources:
        for node in nodes_of(source):
            if isinstance(node, ast.Global):
                yield f"{source.name}:{node.lineno} has a global statement"


def readers_of_the_environment(sources: Sources) -> Offenders:
    for source in sources:
        if source.name == "environment.py":
            continue
        attributes = {node.attr for node in nodes_of(source) if isinstance(node, ast.Attribute)}
        imports = (node.names for node in nodes_of(source) if isinstance(node, ast.ImportFrom))
        names = attributes | {alias.name for alias in chain.from_iterable(imports)}
        for name in sorted(names & READS_THE_ENVIRONMENT):
            yield f"{source.name} uses {name}; environment.py alone reads the environment"


def long_files(sources: Sources) -> Offenders:
    for source in sources:
        if source.name == "torch_private.py":
            continue  # A list, of all private names in one file: it is as long as it is.
        if (length := len(source.text.splitlines())) > MOST_LINES_OF_A_FILE:
            yield f"{source.name} has {length} lines, more than {MOST_LINES_OF_A_FILE}"


def long_functions(sources: Sources) -> Offenders:
    yield from _too_long(sources, (ast.FunctionDef, ast.AsyncFunctionDef), MOST_LINES_OF_A_FUNCTION)


def long_classes(sources: Sources) -> Offenders:
    yield from _too_long(sources, (ast.ClassDef,), MOST_LINES_OF_A_CLASS)
    engine = [source for source in sources if source.name == "engine/engine.py"]
    yield from _too_long(engine, (ast.ClassDef,), MOST_LINES_OF_THE_ENGINE)


def _too_long(sources: Sources, kinds: tuple[type[ast.AST], ...], most: int) -> Offenders:
    for source in sources:
        for node in nodes_of(source):
            if isinstance(node, kinds) and isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > most:
                    yield f"{source.name}:{node.lineno} {node.name} has {length} lines, more than {most}"


def modules_that_do_not_say_what_they_are(sources: Sources) -> Offenders:
    for source in sources:
        if source.text and not ast.get_docstring(source.tree):
            yield f"{source.name} has no docstring"


def names_that_say_nothing(sources: Sources) -> Offenders:
    for source in sources:
        words = chain.from_iterable(part.split("_") for part in source.name.removesuffix(".py").split("/"))
        for word in sorted(NAMES_THAT_SAY_NOTHING.intersection(words)):
            yield f"{source.name} is called {word}, which says nothing"


def class_names_of_two(sources: Sources) -> Offenders:
    """Public classes of one room with one name: who reads it has to ask which."""
    homes = defaultdict[tuple[str, str], list[str]](list)
    for source in sources:
        room = source.name.split("/")[0]
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[room, node.name].append(source.name)
    for (_, name), files in homes.items():
        if len(files) > 1:
            yield f"{name} is the name of {len(files)} classes: {', '.join(files)}"


def large_rooms_without_a_drawing(sources: Sources) -> Offenders:
    """Drawings are in the docstrings of rooms, and what they name is there."""
    names, heads = defaultdict[str, set[str]](set), dict[str, str]()
    counts = defaultdict[str, int](int)
    for source in sources:
        room, _, rest = source.name.partition("/")
        if rest:
            names[room] |= {part.removesuffix(".py") for part in rest.split("/")}
            counts[room] += 1
        if rest == "__init__.py":
            heads[room] = ast.get_docstring(source.tree) or ""
    for room in sorted(names):
        drawn = [
            line for line in heads.get(room, "").splitlines() if re.search(r"-->|--|->|\||\S {2,}\S|──", line.strip())
        ]
        words = set(re.findall(r"[a-z][a-z0-9_]*/?", " ".join(drawn)))
        if not drawn:
            if counts[room] > MOST_FILES_WITHOUT_DRAWING:
                yield f"{room}/ has {counts[room]} files, and no drawing in its __init__.py"
            continue
        if len(drawn) > MOST_LINES_OF_A_DRAWING:
            yield f"{room}/ has a drawing of {len(drawn)} lines, more than {MOST_LINES_OF_A_DRAWING}"
        if len({word.rstrip("/") for word in words} & names[room]) < FEWEST_FILES_DRAWN:
            yield f"{room}/ has a drawing with fewer than {FEWEST_FILES_DRAWN} of its files"
        for word in sorted(words):
            if ("_" in word or word.endswith("/")) and word.rstrip("/") not in names[room]:
                yield f"{room}/ draws {word}, which is not there"


def private_names_of_others(sources: Sources) -> Offenders:
    """What two files need has a public name, and a home that both know."""
    for source in sources:
        for node in nodes_of(source):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "shardwise":
                for alias in node.names:
                    if alias.name.startswith("_") and not alias.name.startswith("__"):
                        yield f"{source.name} imports {alias.name} of {node.module}, which is private there"


def files_that_know_too_many(sources: Sources) -> Offenders:
    for source in sources:
        if source.name == "__init__.py":  # The public names: it knows where each is, and loads none.
            continue
        if (count := len(known_modules(source) - {source.module})) > MOST_MODULES_IMPORTED:
            yield f"{source.name} imports {count} modules of ours, more than {MOST_MODULES_IMPORTED}"
