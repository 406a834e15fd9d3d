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
- `qa` (RULER's `qa_1` and `qa_2`) reads a file of the user's: SQuAD's .json, HotpotQA's .json, or .jsonl with
  `question`, `answers` and `documents` in each line. Questions are drawn by the seed, the same at every
  length. As in RULER, other documents fill the prompt, an article's own first, and may mention the answer;
  where the file has too few they come again.
"""

from leank_convert.evaluate.ruler.cache import cached_prompts, default_cache_folder
from leank_convert.evaluate.ruler.source import draw_prompts
from leank_convert.evaluate.ruler.tasks import RULER_TASKS

__all__ = ["RULER_TASKS", "cached_prompts", "default_cache_folder", "draw_prompts"]
