"""Kernels on a GPU; or without one in Triton's interpreter, whoever has imported Triton before."""

# mypy: ignore-errors

import os
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="no Triton for this machine: its interpreter runs the kernels")
tl = pytest.importorskip("triton.language")


@pytest.fixture(scope="session", autouse=True)
def in_interpreter() -> Iterator[None]:
    """Triton decides when a function is made whether it is interpreted. Its own were made when it was imported, perhaps
    by another test: here they are made again, and put back."""
    if torch.cuda.is_available():
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    rooms = (tl, tl.standard, tl.math)
    made = {}
    before = [(room, name, value) for room in rooms for name, value in vars(room).items() if type(value) is JITFunction]
    for room, name, value in before:
        setattr(room, name, made.setdefault(id(value), InterpretedFunction(value.fn)))
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        from shardwise.kernels import (  # noqa: F401 - made while the setting is there
            cross_entropy_triton,
            experts_triton,
            fp8_triton,
            gated_triton,
            linear_cross_entropy_triton,
            norm_triton,
            rotary_triton,
            scale_triton,
        )
    yield
    for room, name, value in before:
        setattr(room, name, value)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors are made where kernels take them: on a GPU, or on the CPU where numpy interprets, and minds no NaN.

    Numbers are the same in every run.
    """
    torch.manual_seed(0)
    if torch.cuda.is_available():
        with torch.device("cuda"):
            yield
        return
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with np.errstate(all="ignore"):
        yield
