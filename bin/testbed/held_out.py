"""Held-out answers of the shipped model, measured: `python -m bin.testbed.held_out`."""

from __future__ import annotations

import argparse
import itertools
import random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from leank_convert.testbed import MODEL_DIR
from leank_convert.testbed.tasks import ASSISTANT, BEGIN, END, IDS, PAD, TASKS, USER, build_sample

HELD_OUT_LENGTHS = (256, 512, 1024, 2048)
_SEED = 2  # of the prompts


@torch.no_grad()
def exact_match(
    model: PreTrainedModel, task: str, num_tokens: int, *, two_word_names: bool, count: int, seed: int
) -> float:
    """Measure the share of held-out prompts whose greedy answer is right, token for token.

    Greedy decoding gives the right answer exactly when every answer token is the most likely one after the
    prompt and the right tokens before it, so one forward pass over prompt and answer decides.
    """
    rng = random.Random(f"held-out/{seed}/{task}/{num_tokens}/{two_word_names}")
    right = 0
    for start in range(0, count, 32):
        rows = min(32, count - start)
        ids = torch.full((rows, num_tokens), IDS[PAD])
        is_answer = torch.zeros(rows, num_tokens, dtype=torch.bool)
        for row in range(rows):
            sample = build_sample(task, rng, num_tokens, two_word_names=two_word_names)
            prompt = [BEGIN, USER, *sample.prompt.split(), END, ASSISTANT]
            words = [*prompt, *sample.answer.split(), END]
            ids[row, : len(words)] = torch.tensor([IDS[word] for word in words])
            is_answer[row, len(prompt) : len(words)] = True
        ids, is_answer = ids.to(model.device), is_answer.to(model.device)
        # Compiled layers would be compiled anew for every length.
        with torch.compiler.set_stance("force_eager"):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        wrong = (model.lm_head(hidden).argmax(-1) != ids[:, 1:]) & is_answer[:, 1:]
        right += int((~wrong.any(1)).sum())
    return right / count


def measure_all(model: PreTrainedModel, count: int) -> list[dict[str, Any]]:
    """Measure `exact_match` for every task, length of `HELD_OUT_LENGTHS` and kind of name."""
    return [
        {
            "task": task,
            "tokens": tokens,
            "two_word_names": two_words,
            "n": count,
            "exact_match": exact_match(
                model, task, tokens, two_word_names=two_words, count=count, seed=_SEED
            ),
        }
        for task in TASKS
        for tokens in HELD_OUT_LENGTHS
        for two_words in (False, True)
    ]


def render_table(figures: list[dict[str, Any]]) -> str:
    """Lay out the figures of `measure_all` as a Markdown table, a column a length."""
    found = {(cell["task"], cell["two_word_names"], cell["tokens"]): cell["exact_match"] for cell in figures}
    rows = [["task", "names", *(f"{tokens} tokens" for tokens in HELD_OUT_LENGTHS)]]
    rows.append(["---"] * len(rows[0]))
    for task, two_words in itertools.product(TASKS, (False, True)):
        cells = (f"{found[task, two_words, tokens]:.4f}" for tokens in HELD_OUT_LENGTHS)
        rows.append([task, "two words" if two_words else "one word", *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Measure the shipped model, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1024, help="prompts a cell; default: 1024")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, device_map=device, trust_remote_code=False)
    print(render_table(measure_all(model, parser.parse_args().count)))


if __name__ == "__main__":
    main()
