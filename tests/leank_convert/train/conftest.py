import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Bits may depend on the number of threads; subprocesses are told the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
