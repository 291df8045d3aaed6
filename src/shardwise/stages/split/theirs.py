"""Tell user code from that of libraries, and find the user's files that a function reads."""

import sys
import threading
from argparse import Namespace
from collections import UserDict, UserList, deque
from collections.abc import Iterator, Sequence
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

#: Objects of these packages are not searched: their state belongs to no single module.
_NOT_THEIRS = frozenset({"torch", "shardwise", "numpy", "transformers", "triton", *sys.stdlib_module_names})
#: Where packages are installed.
_INSTALLED = ("site-packages", "dist-packages")
#: Classes of the standard library that hold user data.
SPACES = (
    SimpleNamespace, Namespace, threading.local, UserDict, UserList, WeakKeyDictionary, WeakValueDictionary,
)  # fmt: skip


def files_named(file: dict[str, Any], names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a function's file, and other files of the user that it reads: `import config`, `config.scale`."""
    waiting, seen = deque([("", file)]), {id(file)}
    while waiting:
        place, each = waiting.popleft()
        yield place, each
        for key in names:
            held = each.get(key)
            if type(held) is ModuleType and _is_own(_package_of(held.__name__)) and id(vars(held)) not in seen:
                seen.add(id(vars(held)))
                waiting.append((f"{place}.{key}".strip("."), vars(held)))


def is_theirs(each: Any) -> bool:
    """Whether a class or a function is the user's, or of a package other than the known ones."""
    return _package_of(_module_of(each)) not in _NOT_THEIRS


def is_own(each: Any) -> bool:
    """Whether a class or a function is of a script or its files, and not of an installed package. Such packages have
    large registries, and scripts do not set what is in them between two blocks."""
    return _is_own(_package_of(_module_of(each)))


def _module_of(each: Any) -> str:
    return str(getattr(each, "__module__", None) or "torch")


def _package_of(name: str) -> str:
    return name.partition(".")[0]


@cache
def _is_own(package: str) -> bool:
    file = str(getattr(sys.modules.get(package), "__file__", None) or "")
    return package not in _NOT_THEIRS and not any(each in file for each in _INSTALLED)
