"""Pages that repeat what code holds: the keys of files that others read, the table of methods."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from leank_convert.leank_block import CACHE_KEYS, KEY_MEAN_KEY, LEANK_KEYS, VALUE_WIDTHS_KEY
from leank_convert.mask_provenance import MaskProvenance
from leank_convert.methods import METHODS
from leank_convert.onnx import description

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "formats.md"
# As they are before a test tries a method of its own.
METHOD_ROWS = [f"| `{m.name}` | {m.summary} | {'yes' if m.trains else 'no'} |" for m in METHODS.values()]


def section(title):
    """The words in code spans under a heading."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"there is no section `{title}`"
    return set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", found[1], flags=re.DOTALL)))


def literal_keys(function):
    """The keys of all dictionaries that a function writes out."""
    tree = ast.parse(inspect.getsource(function))
    dictionaries = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    keys = [key for node in dictionaries for key in node.keys if isinstance(key, ast.Constant)]
    return {key.value for key in keys}


@pytest.mark.parametrize(
    ("title", "keys"),
    [
        ("The `leank` block", {*LEANK_KEYS, *CACHE_KEYS, KEY_MEAN_KEY, VALUE_WIDTHS_KEY}),
        ("Mask file", {field.name for field in dataclasses.fields(MaskProvenance)}),
        ("ONNX folder", literal_keys(description.describe)),
    ],
)
def test_the_page_names_every_key(title, keys):
    assert keys - section(title) == set()


def test_the_page_on_ratios_lists_the_table_of_methods():
    page = (DOCS / "ratio.md").read_text(encoding="utf-8")
    listed = "\n".join(row.replace("|q·k|", r"\|q·k\|") for row in METHOD_ROWS)
    assert listed in page, f"the rows under `Simpler methods` are those of METHODS:\n{listed}"
