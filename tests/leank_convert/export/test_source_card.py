"""What a card says of its source: the licence of its card or its files, its name on the hub."""

import json
import os

import pytest

from leank_convert.export.source_card import find_base_model, read_licence

LINK = "https://example.org/LICENSE"
LLAMA = f"""---
language: en
license: other
license_name: llama3.1
license_link: {LINK}
extra_gated_prompt: "long: text"
---
# A model
"""


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        ("---\nlicense: apache-2.0\n---\n", {"license": "apache-2.0"}),
        ("\ufeff---\r\nlicense: mit\r\n---\r\nText", {"license": "mit"}),
        (LLAMA, {"license": "other", "license_name": "llama3.1", "license_link": LINK}),
        ("---\nlicense: mit\nlicense_link: /home/me/LICENSE\n---\n", {"license": "mit"}),
        ("---\nlicense: [mit]\n---\n", {}),
        ('---\nlicense: "mit\\ntags: x"\n---\n', {}),
        ("# A model\n\n---\nlicense: mit\n---\n", {}),
        ("---\nlicense: mit\n", {}),
        (None, {}),
    ],
)
def test_the_licence_is_that_of_the_models_card(tmp_path, card, expected):
    if card is not None:
        (tmp_path / "README.md").write_bytes(card.encode())
    assert read_licence(tmp_path) == expected


def test_a_licence_file_that_travels_stands_for_a_licence_without_a_name(tmp_path):
    (tmp_path / "LICENSE.txt").write_text("terms")
    assert read_licence(tmp_path) == {"license": "other", "license_link": "LICENSE.txt"}
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_link: LICENSE.txt\n---\n")
    assert read_licence(tmp_path)["license_link"] == "LICENSE.txt"


@pytest.mark.parametrize(
    "front", ["a: &a [x]\nb: [*a, *a]", "{" * 5000, "license: mit\nlicense: other", "a: !!python/name:os.x b"]
)
def test_a_card_that_is_no_plain_yaml_is_warned_of(tmp_path, caplog, front):
    (tmp_path / "README.md").write_text(f"---\n{front}\n---\n")
    assert read_licence(tmp_path) == {}
    assert "cannot be read, nor its licence" in caplog.text and len(caplog.text) < 500


def test_a_card_that_is_no_file_or_far_too_long_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "README.md")
    assert read_licence(tmp_path) == {}
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").write_text("---\n" + "# a\n" * 10**5 + "license: mit\n---\n")
    assert read_licence(tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "mask_model", "noted", "expected"),
    [
        ("owner/model", "owner/other", "owner/third", "owner/model"),
        ("folder", "owner/other", "owner/third", "owner/other"),
        ("folder", "other", "/home/me/model", None),
        ("folder", "other", 7, None),
        ("folder", "other", "a/" + "b" * 200, None),
    ],
)
def test_the_base_model_is_the_first_hub_id_that_is_known(tmp_path, name, mask_model, noted, expected):
    (tmp_path / "config.json").write_text(json.dumps({"_name_or_path": noted}))
    assert find_base_model(tmp_path, name, mask_model) == expected
