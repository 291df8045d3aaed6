"""Serving on a GPU: kernels against their definitions, and the same tokens with and without all that is fast."""

import pytest
import torch

from tests.gpu.serving_checks import CHECKS, check


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("name", CHECKS)
def test_on_a_gpu(name: str) -> None:
    check(name)
