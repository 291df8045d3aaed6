"""GPUs by what they call themselves."""

import pytest

from shardwise.cluster.catalogue import find_device


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40g"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"),
        ("Something else", None),
    ],
)
def test_a_gpu_is_found_in_the_catalogue(called: str, name: str | None) -> None:
    assert find_device(called) == name
