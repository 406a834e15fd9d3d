"""Save the text model of a checkpoint that also reads images, as a model of its own that can be converted.

    python examples/text_model.py google/gemma-3-12b-it -o gemma-3-12b-text
    leank-convert train ./gemma-3-12b-text -o out/

Gemma 3 from 4B on, Qwen3.5 and Ministral 3 are published so. Weights and answers to texts stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer


def main() -> None:
    """Load the whole, and save its language model as the text family's own class."""
    parser = argparse.ArgumentParser(description="Save the text model of a multimodal checkpoint.")
    parser.add_argument("model", help="hub id or folder")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()

    whole = AutoModelForImageTextToText.from_pretrained(args.model, dtype="auto")
    with torch.device("meta"):  # its weights are the whole's
        text = AutoModelForCausalLM.from_config(whole.config.text_config, dtype=whole.dtype)
    text.model, text.lm_head = whole.model.language_model, whole.lm_head
    text.config.tie_word_embeddings = text.lm_head.weight is text.model.embed_tokens.weight
    text.generation_config = whole.generation_config
    text.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)


if __name__ == "__main__":
    main()
