"""The tokenizer as it is built beside a newly trained model."""

import json

from transformers import AutoTokenizer

from bin.testbed.tokenizer import build_tokenizer
from leank_convert.testbed import MODEL_DIR


def test_shipped_tokenizer_is_a_fresh_build(tmp_path):
    build_tokenizer().save_pretrained(tmp_path)
    shipped, fresh = (AutoTokenizer.from_pretrained(folder) for folder in (MODEL_DIR, tmp_path))
    assert shipped.get_vocab() == fresh.get_vocab()
    for fact in ("chat_template", "special_tokens_map", "padding_side", "model_max_length"):
        assert getattr(shipped, fact) == getattr(fresh, fact)
    committed, built = (
        json.loads((folder / "tokenizer.json").read_text()) for folder in (MODEL_DIR, tmp_path)
    )
    for part in ("model", "pre_tokenizer", "added_tokens"):
        assert committed[part] == built[part]
    assert (MODEL_DIR / "chat_template.jinja").read_text() == (tmp_path / "chat_template.jinja").read_text()
