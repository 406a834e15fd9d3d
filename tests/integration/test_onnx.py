"""The shipped model as an ONNX folder answers, without torch, token by token as the PyTorch runtime does."""

import json
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from leank_convert.testbed.tasks import TASKS, build_sample
from tests.checks import run_python

NEW_TOKENS = 40
# Runs in a process of its own, in the exported folder, where nothing of ours can be imported.
HOST = """
import json, sys
sys.modules.update(dict.fromkeys(["torch", "transformers", "leank_convert", "onnx", "onnxscript"]))
sys.path.insert(0, ".")
from leank_onnx import LeanKOnnx
model = LeanKOnnx(".", threads=1)
prompts = [model.encode_chat([{"role": "user", "content": text}]) for text in json.load(sys.stdin)]
session = model.start()
answers = session.generate(prompts, max_new_tokens=NEW_TOKENS, prompt_chunk=100)
pruned = session.pruned_lengths.tolist()
json.dump({"prompts": prompts, "answers": answers, "pruned": pruned}, sys.stdout)
""".replace("NEW_TOKENS", str(NEW_TOKENS))


def test_the_shipped_model_answers_as_generate_does_in_a_process_without_torch(
    shipped_checkpoint, shipped_onnx
):
    rng = random.Random(0)
    samples = [build_sample(task, rng, length) for task, length in zip(TASKS, (600, 380, 470), strict=True)]
    asked = json.dumps([sample.prompt for sample in samples])
    done = run_python("-W", "error", "-c", HOST, input=asked, cwd=shipped_onnx)
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)

    tokenizer = AutoTokenizer.from_pretrained(shipped_checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        shipped_checkpoint, trust_remote_code=True, dtype=torch.float32
    ).eval()
    chats = [[{"role": "user", "content": sample.prompt}] for sample in samples]
    rendered = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    prompts = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    assert result["prompts"] == prompts
    inputs = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    answers = output[:, inputs["input_ids"].shape[1] :].tolist()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    expected = [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]
    assert result["answers"] == expected
    # Tokens were pruned, and flushed while decoding, before what is compared.
    assert min(result["pruned"]) > 100
    assert any(pruned > len(prompt) - 250 for pruned, prompt in zip(result["pruned"], prompts, strict=True))
