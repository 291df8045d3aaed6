"""What a run without `--whole` leaves out."""

import pytest

#: The names of the tests that this run leaves out.
LEFT_OUT = pytest.StashKey[frozenset[str]]()
