"""Text that fills a length: facts strewn over filler, and how much filler fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


def strew(filler: Sequence[str], facts: Iterable[tuple[float, str]]) -> list[str]:
    """Put each fact at its place, given as a fraction of the way through the filler."""
    lines = list(filler)
    for offset, (place, fact) in enumerate(sorted(facts)):
        lines.insert(int(place * (len(filler) + 1)) + offset, fact)
    return lines


def fit(render: Callable[[int], list[int]], shortest: list[int], budget: int) -> tuple[int, list[int]]:
    """Find the number of context lines whose prompt fills the budget to within about one line.

    Tokens grow almost linearly with lines, so interpolation needs a few renderings where counting up would
    need one per line.

    Args:
        render: The prompt with as many lines.
        shortest: The prompt without lines, no longer than `budget`.
        budget: Tokens of the longest prompt that fits.

    Returns:
        The number of lines and the prompt.
    """
    fits, best = 0, shortest
    exceeds, exceeding = None, shortest
    guess = 16
    # Far more than it takes, and an end even for a tokenizer whose token count does not grow with the text.
    for _ in range(32):
        prompt = render(guess)
        low, low_length = fits, len(best)
        if len(prompt) <= budget:
            fits, best = guess, prompt
        else:
            exceeds, exceeding = guess, prompt
        if exceeds is None:
            per_line = max(1.0, (len(best) - low_length) / (fits - low))
        else:
            per_line = (len(exceeding) - len(best)) / (exceeds - fits)
        if budget - len(best) < per_line or exceeds == fits + 1:
            break
        guess = fits + max(1, int((budget - len(best)) / per_line))
        if exceeds is not None:
            guess = min(guess, exceeds - 1)
    return fits, best
