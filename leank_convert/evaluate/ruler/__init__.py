"""RULER's synthetic tasks (arXiv 2404.06654) for any tokenizer, nothing downloaded.

Parameters are those of RULER's `synthetic.yaml`, and so are the tokens to generate and the scoring; a prompt
and room for its answer have at most the length asked for. As in RULER, the beginning of the answer follows
the chat template, and `vt` and `cwe` (which counts to less below 4096 tokens) show a solved example first.

What differs, so that figures are comparable between models here and not with RULER's own:

- Every instruction, question, needle, line of noise and word list is in words of our own.
- `essay` is the user's running text, or the built-in sentences; RULER downloads essays.
- Keys and values that are asked for are drawn so that no filler repeats them, and a needle's depth is one of
  40 in every haystack. `cwe` and `vt` examples share no word or number with the question and stand in the
  same user turn; beyond 400 words `cwe` goes on with pairs of words. `vt`'s example has 10 lines of noise.
- Every prompt is filled for itself, by about a line; RULER finds the filler's size once per length.
- `qa` (RULER's `qa_1` and `qa_2`) reads a file of the user's. Questions are drawn by the seed, the same at
  every length. As in RULER, documents of other questions fill the prompt, and may mention the answer; where
  the file has too few they come again.
"""

from leank_convert.evaluate.ruler.prompts import RULER_TASKS, draw_prompts

__all__ = ["RULER_TASKS", "draw_prompts"]
