import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def real_mask():
    """Finds one of the two masks that were published with the paper; they lie outside the repository."""
    folders = [
        Path(folder)
        for folder in (os.environ.get("LEANK_MASKS"), Path(__file__).parents[4] / "shared/masks")
        if folder
    ]

    def find(name):
        found = [folder / name for folder in folders if (folder / name).exists()]
        if not found:
            pytest.skip(f"no mask `{name}` here: set LEANK_MASKS to its folder")
        return found[0]

    return find
