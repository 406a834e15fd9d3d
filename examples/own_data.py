"""Learn a mask on your own text: the facts that are asked for are hidden in it.

    python examples/own_data.py notes.txt                                        # the shipped toy model
    python examples/own_data.py notes.txt meta-llama/Llama-3.1-8B-Instruct --out out/llama    # on a GPU

The text is .txt, .json or .jsonl (records with a key `text`), or the hub id of a dataset. The toy model has a
language of its own, in which any other word is unknown: with it you see the steps, and nothing of accuracy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from leank_convert import Recipe, export_checkpoint, load_recipe, train_mask


def choose_recipe(text: str, base: str, toy: bool) -> Recipe:
    """The base recipe with running text from a file; overrides are those of `--set`."""
    overrides = [f"data.haystack.source={text}", "data.tasks=[multi_value]"]
    if toy:
        overrides.append("data.wording=general")
    return load_recipe(base, overrides)


def main() -> None:
    """Read the arguments, train, export."""
    parser = argparse.ArgumentParser(description="Learn a mask on your own text.")
    parser.add_argument("text", help="a file, or a dataset's id")
    parser.add_argument("model", nargs="?", default="testbed", help="hub id or folder")
    parser.add_argument("--out", type=Path, default=Path("out/own-data"))
    parser.add_argument("--recipe", default="quickstart", help="a recipe's name or file, to start from")
    args = parser.parse_args()

    recipe = choose_recipe(args.text, args.recipe, toy=args.model == "testbed")
    resume = bool(recipe.trains) and args.out.exists()  # where it was stopped
    mask = train_mask(args.model, args.out, recipe=recipe, resume=resume)
    print(f"pruned {mask.pruning_ratio:.1%}; kept channels by layer and KV head: {mask.widths}")
    print(export_checkpoint(args.model, mask, args.out))


if __name__ == "__main__":
    main()
