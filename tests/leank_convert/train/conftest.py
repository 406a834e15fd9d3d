import csv

import pytest
import torch

from leank_convert.train import train_masks


@pytest.fixture(autouse=True)
def _one_thread():
    """Bits may depend on the number of threads; subprocesses are told the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def train_one():
    """Trains, and gives the only mask of the run."""

    def train(recipe, out, **options):
        return train_masks(recipe, out, **{"progress": False, **options})[out]

    return train


@pytest.fixture
def read_log():
    """Reads log.csv as text."""

    def read(out):
        with (out / "leank" / "log.csv").open() as file:
            return list(csv.DictReader(file))

    return read
