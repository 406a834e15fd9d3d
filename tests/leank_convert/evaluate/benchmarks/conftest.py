"""Small records of the form of the published files, written by the tests."""

import json
import re

import pytest

from tests.checks import refusal


@pytest.fixture
def write_records(tmp_path):
    """Writes records to a file of the data folder, .jsonl or .parquet, and returns the folder."""

    def write(name, records):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            from datasets import Dataset

            Dataset.from_list(records).to_parquet(path)
        else:
            path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
        return tmp_path / "data"

    return write


@pytest.fixture
def refused(byte_level_tokenizer):
    """Draws what has to be refused with a remedy: `refused(draw, folder, message)`."""

    def check(draw, folder, message, **options):
        with refusal(re.escape(message)) as caught:
            draw(byte_level_tokenizer, folder, **{"num_samples": 5, **options})
        assert caught.value.hint

    return check
