"""Natural text: what a real model predicts of it from a pruned cache, and what it says of it at length.

One kind comes with Python; `bin/fetch-texts FOLDER` fetches the others. Nothing of them is kept here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bin.reproduction.bench import Bench
from bin.reproduction.fetch_texts import SOURCES, read_documentation
from bin.reproduction.plan import Entry, TextPlan
from bin.reproduction.units import keep_result, read_result
from leank_convert.data.sample import encode_prompts
from leank_convert.errors import LeanKError
from leank_convert.evaluate.answering import decode_greedily, end_tokens
from leank_convert.evaluate.prefill import pad_left, run_prefill
from leank_convert.evaluate.text import compare_rows

DOCUMENTATION = "documentation"  # Python's, beside the kinds that are fetched


def find_kinds(folder: Path | None) -> list[str]:
    """The kinds of text that are there; LeanKError if a folder is named and holds none."""
    found = [] if folder is None else [kind for kind in SOURCES if (folder / f"{kind}.txt").is_file()]
    if folder is not None and not found:
        wanted = " nor ".join(f"`{kind}.txt`" for kind in SOURCES)
        raise LeanKError(
            f"`{folder}` holds neither {wanted}", hint="`bin/fetch-texts FOLDER` writes both, by pip"
        )
    return [DOCUMENTATION, *found]


@dataclass(frozen=True)
class Texts:
    """A kind of text, and what was measured on it."""

    bench: Bench  # the model and the masks
    kind: str  # `documentation` or a fetched one
    folder: Path | None  # where text of the fetched kinds lies
    out: Path  # where results are kept
    plan: TextPlan  # how much is measured

    def path(self, what: int | str) -> Path:
        """Where `feed` keeps what it found behind so many tokens, or `answer`: `answers`; by entry's name."""
        return self.out / f"{self.kind}-{what}.json"

    def feed(self, length: int, entries: Sequence[Entry]) -> None:
        """Compare next-token predictions from entries' caches, behind so many tokens, with the dense ones."""
        plan, bench = self.plan, self.bench
        taken = self.take(plan.num_texts, length + plan.num_fed + 1)
        variants = [bench.variant(entry) for entry in entries]
        compared = compare_rows(bench.evaluated, taken, variants, prefix_tokens=length)
        results = {}
        for place, variant in enumerate(variants):
            found = [each.mean(each.variants[place]) for each in compared]  # of each text
            results[variant.name] = {
                "kl": statistics.fmean(means.kl for means in found),
                "agreement": statistics.fmean(means.greedy_agreement for means in found),
                "nll": statistics.fmean(means.nll for means in found),
                "dense_nll": statistics.fmean(means.dense_nll for means in found),
                "nll_changes": [means.nll - means.dense_nll for means in found],
            }
        keep_result(self.path(length), results)

    def answer(self, entries: Sequence[Entry]) -> None:
        """Let entries answer long prompts at length; go on where that was killed.

        What is kept of each are its answers' tokens, and their log-likelihood a token under the dense model.
        """
        evaluated = self.bench.evaluated
        prompts = self._ask()
        variants = [self.bench.variant(entry) for entry in entries]
        window = max(variant.query_window for variant in variants)
        ids = pad_left([torch.tensor(prompt) for prompt in prompts], evaluated.model.device)
        prefill = run_prefill(evaluated.model, *ids, query_window=window)
        ends = end_tokens(evaluated.dense)
        for variant in variants:
            kept = read_result(self.path("answers"))
            if variant.name in kept:
                continue
            model, cache = variant.start(prefill)
            rows = decode_greedily(
                model, cache, prefill.next_token, prefill.attention_mask, self.plan.answer_tokens
            )
            # With the token that ends the turn, which is a prediction like the others.
            answers = [
                row[: next((place + 1 for place, token in enumerate(row) if token in ends), len(row))]
                for row in rows
            ]
            likelihoods = [
                _log_likelihood(evaluated.dense, prompt, answer)
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            kept[variant.name] = {"answers": answers, "log_likelihood": likelihoods}
            keep_result(self.path("answers"), kept)

    def take(self, count: int, num_tokens: int) -> Tensor:
        """Pieces of the text, as far apart as it allows [count, num_tokens]."""
        if self.folder is None or self.kind == DOCUMENTATION:
            text = read_documentation()
        else:
            text = (self.folder / f"{self.kind}.txt").read_text(encoding="utf-8")
        text = text[int(self.plan.learned_on * len(text)) :]
        tokenizer = self.bench.evaluated.tokenizer
        ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        if len(ids) < count * num_tokens:
            raise LeanKError(
                f"text `{self.kind}` has {len(ids)} tokens, {count} pieces of {num_tokens} need more",
                hint="fetch it again by `bin/fetch-texts`",
            )
        step = (len(ids) - num_tokens) // max(1, count - 1)
        return torch.stack([ids[place * step : place * step + num_tokens] for place in range(count)])

    def _ask(self) -> list[list[int]]:
        tokenizer = self.bench.evaluated.tokenizer
        pieces = tokenizer.batch_decode(self.take(self.plan.num_answers, self.plan.lengths[0]))
        return encode_prompts(
            tokenizer,
            [
                f"Below is a passage of a longer text.\n\n{piece}\n\nThat was the passage. Tell in your own "
                "words, in detail and in its order, what it says."
                for piece in pieces
            ],
        )


def compare_answers(answers: Mapping[str, Any], dense: Mapping[str, Any]) -> dict[str, float]:
    """Means of an entry's answers, as `Texts.answer` keeps them, and what they share with the dense ones."""
    pairs = list(zip(answers["answers"], dense["answers"], strict=True))
    same = [[a == b for a, b in zip(answer, other, strict=False)] for answer, other in pairs]
    return {
        "identical": sum(a == b for a, b in pairs) / len(pairs),
        "first_difference": float(statistics.median([*each, False].index(False) for each in same)),
        "equal_tokens": sum(map(sum, same)) / sum(max(len(a), len(b)) for a, b in pairs),
        "tokens": statistics.fmean(len(answer) for answer, _ in pairs),
        "log_likelihood": statistics.fmean(answers["log_likelihood"]),
    }


@torch.no_grad()
def _log_likelihood(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The mean log-likelihood of an answer's tokens under a model that is dense throughout."""
    input_ids = torch.tensor([[*prompt, *answer]], device=model.device)
    output = model(input_ids=input_ids, logits_to_keep=len(answer) + 1, use_cache=False)
    log_probs = output.logits[0, :-1].float().log_softmax(-1)
    chosen = log_probs.gather(-1, input_ids[0, len(prompt) :, None])
    return float(chosen.mean())
