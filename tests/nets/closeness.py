"""How far apart tensors are, in units of what they are compared with."""

from collections.abc import Mapping

from torch import Tensor


def largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max())


def distance(found: Tensor, expected: Tensor, floor: float = 1e-12) -> float:
    """The largest difference over the largest number, or over `floor` if that is larger."""
    assert found.shape == expected.shape
    return largest(found - expected) / max(largest(expected), floor)


def assert_close(found: Tensor, expected: Tensor, limit: float = 1e-5) -> None:
    assert distance(found, expected) < limit


def assert_all_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], limit: float = 1e-5) -> None:
    """Each by itself; but one that is a thousandth of the others is noise, as is the gradient of a key's bias."""
    assert found.keys() == expected.keys()
    floor = 1e-3 * max(largest(each) for each in expected.values())
    apart = {name: distance(found[name], expected[name], floor) for name in expected}
    assert {name: far for name, far in apart.items() if far >= limit} == {}
