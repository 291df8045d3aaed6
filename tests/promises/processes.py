"""Shardwise run as a user runs it: in a process of its own, with a clean environment."""

import subprocess
import sys

from tests.promises.sources import PACKAGE


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter, its output piped. What is named is all that is in its environment, beside where we are."""
    environment["PYTHONPATH"] = str(PACKAGE.parent)
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)


def run_shardwise(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "shardwise", *arguments, **environment)
