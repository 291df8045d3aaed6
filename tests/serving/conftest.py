"""Every test of serving: one thread, and transformers without its progress bars and warnings."""

import pytest
import torch
import transformers as hf


@pytest.fixture(autouse=True)
def quiet() -> None:
    torch.set_num_threads(1)
    hf.utils.logging.disable_progress_bar()
    hf.utils.logging.set_verbosity_error()
