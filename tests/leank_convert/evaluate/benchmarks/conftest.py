"""Small records of the form of the published files, written by the tests."""

import json

import pytest


@pytest.fixture
def write_records(tmp_path):
    """Writes records to a file of the data folder and returns the folder: `write_records(name, records)`."""

    def write(name, records):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        return tmp_path / "data"

    return write


@pytest.fixture
def write_parquet(tmp_path):
    """The same for a .parquet file."""
    from datasets import Dataset

    def write(name, records):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(records).to_parquet(path)
        return tmp_path / "data"

    return write
