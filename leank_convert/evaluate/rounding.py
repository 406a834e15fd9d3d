"""Trial of a rounded cache: a few prompts answered from it and from an unrounded one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from leank_convert._runtime.tools import fork
from leank_convert.data import SampleSource
from leank_convert.errors import LeanKError, out_of_memory
from leank_convert.evaluate.loading import load_model
from leank_convert.recipe import Recipe
from leank_convert.tokenizer import load_tokenizer

NUM_PROMPTS = 4
MAX_DIVERGENCE = 0.1
"""Nats a token. By `bin/reproduce --model qwen2.5-coder`, caches that answer as the dense one does have at
most 0.03 on natural text, and caches that have lost their answers at least 0.3."""


@dataclass(frozen=True)
class RoundedAnswers:
    """How answers from a rounded cache compare with those from one as it comes, token by token."""

    kv_dtype: str  # what keys and values are rounded to
    divergence: float  # mean KL divergence of the next token's distribution, in nats
    agreement: float  # share of tokens whose most likely next one is the same
    num_prompts: int
    num_tokens: int  # of their right answers, each given those before it

    def render(self) -> str:
        """The result in one sentence."""
        return (
            f"on {self.num_tokens} tokens of the answers to {self.num_prompts} prompts of the recipe's data, "
            f"a cache in {self.kv_dtype} differs from one in the model's dtype by {self.divergence:.4f} nats "
            f"a token (KL divergence), and agrees on {self.agreement:.1%} of the most likely tokens"
        )

    def check(self, model: str) -> None:
        """Refuse, by a LeanKError, a cache whose answers differ by more than `MAX_DIVERGENCE`."""
        if not self.divergence <= MAX_DIVERGENCE:  # NaN, too
            raise LeanKError(
                f"model `{model}` loses its answers: {self.render()}; at most {MAX_DIVERGENCE} is taken",
                hint="leave `--kv-dtype` out, or write it all the same by `leank-convert export --force`",
            )


@torch.no_grad()
def answer_rounded(checkpoint: Path, recipe: Recipe, kv_dtype: str, device: torch.device) -> RoundedAnswers:
    """Answer a few of a recipe's prompts from a checkpoint's rounded cache and from one as it comes.

    The same channels are pruned in both, so that what is seen is rounding alone.

    Raises:
        LeanKError: If it cannot be loaded, or memory does not suffice.
    """
    spreads = recipe.model.device_map == "auto" and device.type == "cuda"
    model = load_model(checkpoint, device, trust_remote_code=True, spreads=spreads)
    samples = SampleSource(load_tokenizer(checkpoint), recipe.data, recipe.seed)
    divergences, agreements = [], []
    for place in range(NUM_PROMPTS):
        sample = samples.draw(place)
        prompt, answer = sample.prompt_ids(), sample.answer_ids()
        with out_of_memory(
            f"a prompt of {len(prompt)} tokens in `{checkpoint}`",
            "take another `--device`, or leave `--kv-dtype` out",
        ):
            inputs = prompt.to(model.device), answer.to(model.device)
            exact, rounded = _log_probabilities(model, *inputs, kv_dtype)
        divergences.append((exact.exp() * (exact - rounded)).sum(-1))
        agreements.append(exact.argmax(-1) == rounded.argmax(-1))
    divergence, agreement = torch.cat(divergences), torch.cat(agreements)
    return RoundedAnswers(
        kv_dtype, float(divergence.mean()), float(agreement.float().mean()), NUM_PROMPTS, len(divergence)
    )


def _log_probabilities(model: Any, prompt: Tensor, answer: Tensor, kv_dtype: str) -> list[Tensor]:
    """Of what follows each of an answer's tokens, from a cache as it comes and a rounded one [N, V]."""
    prefilled = model.build_cache("deferred", kv_dtype="auto")
    model(input_ids=prompt[None], cache=prefilled, logits_to_keep=1)
    found = []
    for dtype in ("auto", kv_dtype):
        cache = fork(prefilled)
        cache.kv_dtype = dtype
        # One by one, as decoding does.
        steps = [model(input_ids=token.view(1, 1), cache=cache).logits[0].double() for token in answer]
        found.append(torch.cat(steps).log_softmax(-1))
    return found
