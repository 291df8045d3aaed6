"""docs/engine.md lists every public method and attribute of the engine once, and every argument of `parallelize`."""

import inspect
import re
from importlib import import_module
from typing import Any

import shardwise
from tests.promises.sources import ROOT

#: Where the class is that `parallelize` returns.
ENGINE = ("shardwise.engine.engine", "Engine")
#: What is public for the project's own rooms, and is no promise to users.
INTERNAL = {"execution", "loads", "sharded", "shown", "states", "steps", "wires"}


def engine_class() -> type[Any]:
    module, name = ENGINE
    found: type[Any] = getattr(import_module(module), name)
    return found


def first_cells() -> list[str]:
    """The first cell of each row of the page's tables."""
    lines = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8").splitlines()
    return [line.strip("| ").split(" | ")[0].strip() for line in lines if line.startswith("|")]


def named_on_the_page() -> list[str]:
    return [found[1] for cell in first_cells() if (found := re.match(r"`engine\.(\w+)", cell))]


def own_classes() -> list[type[Any]]:
    return [each for each in engine_class().__mro__ if each.__module__.startswith("shardwise.")]


def attributes() -> set[str]:
    """What instances get in addition to methods and properties, read from the source."""
    found: set[str] = set()
    for each in own_classes():
        found |= set(re.findall(r"\bself\.([a-z]\w*)", inspect.getsource(each))) | set(each.__annotations__)
    return {name for name in found if not name.startswith("_")}


def methods() -> set[str]:
    return {name for each in own_classes() for name in vars(each) if not name.startswith("_")}


def test_every_public_method_and_attribute_is_on_the_page_once() -> None:
    named = named_on_the_page()
    assert sorted(named) == sorted(set(named))
    assert set(named) >= methods() - INTERNAL
    assert (methods() | attributes()) - INTERNAL <= set(named)


def test_the_page_names_nothing_that_the_engine_lacks() -> None:
    assert set(named_on_the_page()) <= methods() | attributes()


def test_every_argument_of_parallelize_is_on_the_page() -> None:
    cells = first_cells()
    for argument in inspect.signature(shardwise.parallelize).parameters:
        assert cells.count(f"`{argument}`") == 1, argument


def test_a_method_is_shown_with_its_arguments() -> None:
    cells = "\n".join(first_cells())
    for name in methods() - INTERNAL:
        member = inspect.getattr_static(engine_class(), name)
        if inspect.isfunction(member):
            arguments = [each for each in inspect.signature(member).parameters if each != "self"]
            shown = re.search(rf"`engine\.{name}\((.*)\)`", cells)
            assert shown is not None, name
            assert re.findall(r"(\w+)(?:=[^,]*)?(?:,|$)", shown[1].replace("*, ", "")) == arguments, name
