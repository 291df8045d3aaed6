"""What docs/dataflow.md begins with runs as it stands, with a GPU and without."""

import re
from pathlib import Path

import pytest
import torch

from shardwise.dataflow.machine import Machine
from shardwise.errors import ShardwiseError
from tests.apart import run_script
from tests.dataflow import kernels

_PAGE = Path(__file__).parents[2] / "docs" / "dataflow.md"


def test_the_first_example_of_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    (example, *_) = re.findall(r"```python\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL)
    # A kernel's source is read from its file.
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    ran = run_script(script, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "tensor(4096.)\n"


def test_a_kernel_that_was_made_to_be_compiled_is_refused_on_a_cpu_with_what_to_set() -> None:
    with Machine(["cpu:0", "cpu:1"]) as machine:
        x, count, lock = (machine.data(torch.zeros(1)) for _ in range(3))
        for place in ("cpu:1", "auto"):
            with pytest.raises(ShardwiseError) as caught:
                machine.submit(kernels.by_atomics, x, count, lock, grid=(1,), place=place)
            assert "by_atomics is a Triton kernel that was made to be compiled for a GPU, and cpu:" in str(caught.value)
            assert 'os.environ["TRITON_INTERPRET"] = "1"' in str(caught.value.remedy)
