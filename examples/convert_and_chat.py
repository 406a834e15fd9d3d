"""Convert a model and chat with it: learn a mask, write the checkpoint, load it with transformers alone.

    python examples/convert_and_chat.py                                          # the shipped toy model
    python examples/convert_and_chat.py meta-llama/Llama-3.2-1B-Instruct --out out/llama    # on a GPU

The second time the checkpoint is there already and only the chat starts. An empty line ends it.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from leank_convert import export_checkpoint, load_recipe, train_mask
from leank_convert.testbed.tasks import build_sample


def main() -> None:
    """Read the arguments, convert, chat."""
    parser = argparse.ArgumentParser(description="Convert a model and chat with it.")
    parser.add_argument("model", nargs="?", default="testbed", help="hub id or folder")
    parser.add_argument("--out", type=Path, default=Path("out/chat"), help="the checkpoint's folder")
    parser.add_argument("--recipe", help="a recipe's name or file; default: the packaged one of the model")
    parser.add_argument("--prompt", action="append", help="ask this instead of reading the terminal")
    args = parser.parse_args()

    if not (args.out / "config.json").exists():
        recipe = load_recipe(args.recipe) if args.recipe else None
        trains = recipe is None or bool(recipe.trains)
        resume = trains and args.out.exists()  # where it was stopped
        mask = train_mask(args.model, args.out, recipe=recipe, resume=resume)
        export_checkpoint(args.model, mask, args.out)

    model = AutoModelForCausalLM.from_pretrained(
        args.out, dtype="auto", device_map="auto", trust_remote_code=True
    )
    tokenizer = AutoTokenizer.from_pretrained(args.out, config=model.config)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    cache = model.build_cache()  # kept over all turns
    messages: list[dict[str, str]] = []
    prompts = args.prompt or iter(lambda: input("> "), "")
    if args.model == "testbed" and not args.prompt:  # it knows no English: a list of facts, and a question
        prompts = [build_sample("retrieval", random.Random(0), 1024).prompt]
        print(f"… {prompts[0][-60:]}")
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        ).to(model.device)
        output = model.generate(**inputs, cache=cache, max_new_tokens=256, streamer=streamer)
        answer = output[0, inputs["input_ids"].shape[1] :]
        messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
    print(cache.memory())


if __name__ == "__main__":
    main()
