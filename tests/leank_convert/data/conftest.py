"""Sections of recipes."""

import pytest

from leank_convert.recipe import DataSection


@pytest.fixture(scope="session")
def section():
    """Makes a recipe's data section of short samples."""

    def make(**values):
        return DataSection(**{"min_length": 2000, "max_length": 4000, **values})

    return make
