"""Kernels on a GPU; or without one in Triton's interpreter, whoever has imported Triton before."""

# mypy: ignore-errors

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.kernels.interpreter import interpreted
from tests.settings import settings_kept

triton = pytest.importorskip("triton", reason="no Triton for this machine: its interpreter runs the kernels")


@pytest.fixture(scope="session", autouse=True)
def in_interpreter() -> Iterator[None]:
    """See `interpreter.py`."""
    if torch.cuda.is_available():
        yield
        return
    with interpreted():
        yield


@pytest.fixture(autouse=True)
def without_bfloat16() -> Iterator[None]:
    """On CPUs without bfloat16, torch leaves oneDNN at the first product of it, for good and with a warning."""
    with settings_kept(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        yield


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
