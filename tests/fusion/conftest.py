"""The kernels of these tests run as those of `tests/kernels` do."""

from tests.kernels.conftest import here, in_interpreter

__all__ = ["here", "in_interpreter"]
