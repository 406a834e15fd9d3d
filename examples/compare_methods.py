"""Compare methods that choose channels, on the same held-out prompts.

    python examples/compare_methods.py                                           # the shipped toy model
    python examples/compare_methods.py --methods leank static-norm random --ratio 0.5
    python examples/compare_methods.py Qwen/Qwen3-4B --recipe qwen3-4b           # on a GPU

`leank` and `duo-attention` train, the others measure a few prompts; `leank-convert recipes --keys` lists all.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from leank_convert import evaluate_checkpoint, export_checkpoint, load_recipe, train_mask


def main() -> None:
    """Make each method's mask, export it, evaluate it, print one line."""
    parser = argparse.ArgumentParser(description="Compare methods that choose channels.")
    parser.add_argument("model", nargs="?", default="testbed", help="hub id or folder")
    parser.add_argument("--methods", nargs="+", default=["static-norm", "double-sparsity", "random"])
    parser.add_argument("--ratio", type=float, default=0.7, help="share of K channels to remove")
    parser.add_argument("--recipe", default="quickstart", help="a recipe's name or file, for all of them")
    parser.add_argument("--num-samples", type=int, default=100, help="held-out prompts")
    parser.add_argument("--out", type=Path, default=Path("out/methods"))
    args = parser.parse_args()

    print(f"{'method':24}{'removed':>9}{'dense':>9}{'pruned':>9}   95% interval of the difference")
    for method in args.methods:
        recipe = load_recipe(args.recipe, [f"method={method}", f"pruning_ratio={args.ratio}"])
        run = f"{args.model.strip('/').replace('/', '--')}-{Path(args.recipe).stem}-{args.ratio:g}"
        folder = args.out / run / method
        if not (folder / "config.json").exists():
            resume = bool(recipe.trains) and folder.exists()  # where it was stopped
            mask = train_mask(args.model, folder, recipe=recipe, resume=resume)
            export_checkpoint(args.model, mask, folder)
        result = evaluate_checkpoint(folder, recipe=recipe, num_samples=args.num_samples)
        low, high = result.total.differences["pruned"].interval
        means = "".join(f"{result.total.means[name]:9.1%}" for name in ("dense", "pruned"))
        print(f"{method:24}{result.pruning_ratio:9.1%}{means}   [{low:+.1%}, {high:+.1%}]")


if __name__ == "__main__":
    main()
