"""What the paper found, to stand beside our figures: Zhang et al., LeanK (2025).

Its models have 7 and 8 billion parameters and its benchmark is RULER; its figures and ours compare in their
order, not in their size.
"""

from __future__ import annotations

from typing import NamedTuple

from bin.reproduction.document import Grid

SOURCE = "8B and 7B models on RULER"


class PaperTable(NamedTuple):
    """A table of the paper."""

    origin: str  # where it stands, on which model and prompts
    claim: str  # what it is taken to show
    rows: tuple[tuple[str, str, float], ...]  # labels, what was saved, and accuracy in percent
    saved: str = "K removed"  # of what the middle column is


_LLAMA_64K = "Llama-3.1-8B-Instruct, RULER at 64K"

PAPER: dict[str, PaperTable] = {
    "comparison": PaperTable(
        f"figure 4 and tables of section 2.2, 4.2 and appendix B; {_LLAMA_64K}",
        "learned channels beat static norms, static norms beat channels chosen per prompt, and 70% costs "
        "less than a point",
        (
            ("dense", "-", 84.4),
            ("LeanK", "70%", 84.1),
            ("static norm", "60%", 81.6),
            ("static norm", "70%", 54.0),
            ("ThinK", "60%", 80.6),
            ("ThinK", "70%", 35.3),
            ("Double Sparsity's channels", "60%", 29.9),
            ("Double Sparsity's channels", "70%", 14.0),
        ),
    ),
    "stage2": PaperTable(
        "appendix, necessity of stage 2; Qwen2.5-7B-Instruct, RULER at 64K; without it stage 1's factors are "
        "cut at 70%",
        "without stage 2, accuracy is lost",
        (("dense", "-", 80.7), ("both stages", "70%", 78.0), ("stage 1 alone", "70%", 70.7)),
    ),
    "budget": PaperTable(
        f"section 4.5; {_LLAMA_64K}",
        "most is won by a budget per head, the rest by learning which channels",
        (
            ("dense", "-", 84.38),
            ("uniform budget, dynamic channels (ThinK)", "70%", 35.29),
            ("learned budget, dynamic channels", "70%", 76.59),
            ("learned budget, learned channels (LeanK)", "70%", 84.10),
        ),
    ),
    "lambda": PaperTable(
        "appendix, choice of lambda; Llama-3.1-8B-Instruct, RULER at 32K",
        "any lambda from 0.04 to 0.1 does",
        (
            ("dense", "-", 86.0),
            ("0.04", "70%", 84.4),
            ("0.06", "70%", 85.8),
            ("0.08", "70%", 85.5),
            ("0.10", "70%", 85.1),
        ),
    ),
    "tasks": PaperTable(
        "appendix, choice of training task; Qwen2.5-7B-Instruct, RULER at 16K",
        "the training task matters little",
        (("dense", "-", 90.8), ("LeanK's tasks", "70%", 90.6), ("DuoAttention's task", "70%", 90.2)),
    ),
    "length": PaperTable(
        "section 4.2; Llama-3.1-8B-Instruct trained on 16K to 96K, RULER at 4K and 128K",
        "one mask holds at lengths that it was not trained on",
        (
            ("dense at 4K", "-", 95.1),
            ("LeanK at 4K", "70%", 95.3),
            ("dense at 128K", "-", 73.5),
            ("LeanK at 128K", "70%", 73.2),
        ),
    ),
    "heads": PaperTable(
        f"section 4.4 and appendix D; {_LLAMA_64K}",
        "half of the heads can be found without training, by their high frequencies, as well as by "
        "DuoAttention; LeanK prunes the other half further at little cost",
        (
            ("dense", "-", 84.38),
            ("highest w_hf", "25%", 84.2),
            ("highest w_hf", "50%", 83.6),
            ("DuoAttention", "50%", 83.94),
            ("DuoAttention + LeanK", "80%", 83.53),
        ),
    ),
    "bytes": PaperTable(
        "tables of section 4.4, at 64K, KIVI at 32K; appendix, comparison with SnapKV, at 32K; "
        "Llama-3.1-8B-Instruct on RULER. What is saved is as the paper counts it, without windows",
        "other methods save more on LeanK's channels, at little cost, and SnapKV loses more at equal bytes",
        (
            ("dense, 64K", "-", 84.38),
            ("DuoAttention, 64K", "50% of K and V", 83.94),
            ("DuoAttention + LeanK, 64K", "65% of K and V", 83.53),
            ("Quest, 64K", "-", 72.41),
            ("Quest + LeanK, 64K", "70% of reads", 75.14),
            ("dense, 32K", "-", 86.03),
            ("KIVI, 32K", "5.3x", 84.67),
            ("KIVI + LeanK, 32K", "9.7x", 84.16),
            ("SnapKV, 32K", "44% of K and V", 85.2),
            ("LeanK, 32K", "44% of K and V", 85.8),
        ),
        "saved",
    ),
    "saved": PaperTable(
        "section 4.3; heads of width 0, whose V is dropped too",
        "at 70% of K, 16 to 18% of V go as well",
        (),
    ),
}


def paper_grids(name: str) -> list[Grid]:
    """The paper's table that stands beside ours of this name, if there is one."""
    if name not in PAPER:
        return []
    table = PAPER[name]
    caption = f"The paper's ({SOURCE}; {table.origin}): {table.claim}"
    rows = [(label, saved, f"{accuracy:g}") for label, saved, accuracy in table.rows]
    return [Grid(caption, ("the paper's", table.saved, "accuracy (%)"), rows)]
