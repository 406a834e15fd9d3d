"""Checkpoints for vLLM, what their own runtime answers, and the engine in a process of its own."""

import dataclasses
import functools
import json
import os
import shutil
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from bin.benchmarks.server import start_server
from leank_convert import convert_adapter
from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.export import export_checkpoint
from leank_convert.families import ARCHITECTURES, LEANK_PREFIX
from leank_convert.files import read_json
from leank_convert.kv_scales import KVScales
from leank_convert.mask import ChannelMask
from leank_convert.testbed import MODEL_DIR
from tests import checks, tiny_families

# Tokens of the prompts, and of every answer.
LENGTHS, NEW = (30, 170, 500, 40, 901, 12), 60
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),  # engines take stand-ins from beside their tests
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # few cores, and tests beside each other
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
HERE = Path(__file__).parent
# Families whose releases hold a layer that drafts, and its last norm.
WITH_MTP = {"glm4_moe": "shared_head.norm", "hy_v3": "final_layernorm"}
# What engines are started with unless other options are asked for, and what several are asked with.
ENGINE = {"dtype": "float32", "block_size": 32, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 1024}
TWICE = (None, None)
NEAR = 0.2  # nats between two tokens that are as likely, but for rounding; of other answers some are 4 behind
NGRAMS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
FEW: dict[str, Any] = {"lengths": (80, 170, 12, 500), "new": 40}
# Sink, recent and flush so small that prompts outgrow them; none of them a multiple of a page.
SIZES = {"sink_size": 10, "recent_size": 50, "flush_size": 7}


# Files that start engines, the longest first: each takes minutes, the others seconds.
LONGEST_FIRST = (
    "test_engine.py",
    "test_benchmark.py",
    "test_mixed.py",
    "test_ranks.py",
    "test_faults.py",
    "test_transfer.py",
    "test_drafts.py",
    "test_server.py",
    "test_capacity.py",
    "test_weights.py",
)


def pytest_configure(config):
    """Let workers take files in the order of collection; xdist would begin with those of most tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Begin with the longest files, lest a worker takes up one of them when the others are done."""
    own = {HERE / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: own.get(item.path, len(own)))


@pytest.fixture(scope="session")
def shipped(once_per_run):
    """The shipped model, which speaks, with heads of many widths."""
    widths = [[0, 24, 64, 64], [48, 48, 64, 64], [16, 33, 48, 64], [0, 0, 8, 64]]
    mask = ChannelMask(tiny_families.random_mask(widths, 64))
    return once_per_run("served_testbed", lambda out: export_checkpoint(MODEL_DIR, mask, out, **SIZES))


def add_drafting_layer(file, last_norm):
    """Add the last of three layers once more, behind what joins a token with the states before it."""
    tensors = load_file(file)
    size, own = tensors["model.norm.weight"].shape[0], "model.layers.3"
    layer = {name: part for name, part in tensors.items() if name.startswith("model.layers.2.")}
    tensors |= {name.replace("model.layers.2", own): part.clone() for name, part in layer.items()}
    tensors |= {f"{own}.{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", last_norm)}
    joined = torch.randn(size, 2 * size, generator=torch.Generator().manual_seed(0))
    save_file(tensors | {f"{own}.eh_proj.weight": 0.05 * joined}, file, {"format": "pt"})


@pytest.fixture(scope="session")
def random_checkpoint(once_per_run, tmp_path_factory):
    """Makes a checkpoint of a family with random weights, whose answers depend on every channel."""

    @functools.cache
    def make(model_type, kv_dtype=None, is_centred=False):
        source = tmp_path_factory.mktemp("sources") / model_type
        family = ARCHITECTURES[model_type]
        sizes = {
            "hidden_size": 256,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "vocab_size": 256,
            "tie_word_embeddings": model_type in ("qwen2", "smollm3"),
            "pad_token_id": 0,
        }
        own = {**tiny_families.OPTIONS.get(model_type, {}), "max_position_embeddings": 1024}
        if "layer_types" in own:  # more layers of the other kind than pruned ones, so more than one group
            own["layer_types"] = [*[*family.other_layers, "full_attention"] * 3, *family.other_layers]
            own.update({key: 128 for key in own if key == "sliding_window"})
        # What vLLM's kernels for CPUs take.
        own.update({key: 64 for key in own if key in ("linear_key_head_dim", "linear_value_head_dim")})
        if model_type == "gpt_oss":  # whose rounding would change choices among experts
            own.update(num_experts_per_tok=own["num_local_experts"], intermediate_size=128)
        if model_type == "ernie4_5":
            own["use_bias"] = False  # vLLM's model has none
        # What vLLM reads of a config, and releases say.
        if model_type == "minimax_m2":
            own.update(rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True)
        if model_type == "hy_v3":
            own.update(first_k_dense_replace=1, expert_hidden_dim=24, route_norm=True, qk_norm=True)
        if model_type in WITH_MTP:
            own["num_nextn_predict_layers"] = 1
        if "qwen3_5" in model_type:  # as released: of a model that also sees images
            rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
            own["rope_parameters"] = {**rope, "mrope_interleaved": True, "mrope_section": [2, 1, 1]}
        if model_type == "ministral3":  # vLLM has a table of as many positions as the rope says
            own["rope_parameters"] = {**own["rope_parameters"], "factor": 64.0}
        model = tiny_families.tiny_model(model_type, seed=0, std=0.15, **{**sizes, **own})
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:  # those over all heads move with them
                torch.nn.init.normal_(parameter, mean=1.0, std=0.15)
        model.save_pretrained(source)
        if model_type in WITH_MTP:
            add_drafting_layer(source / "model.safetensors", WITH_MTP[model_type])
        widths = [[0, 13, 20, 32], [0, 0, 4, 16], [8, 8, 32, 32]]
        mask = ChannelMask(tiny_families.random_mask(widths, 32))
        if is_centred:  # by what changes every answer
            mean = 4 * torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2))
            mask = dataclasses.replace(mask, key_mean=mean.half())
        options: dict[str, Any] = {**SIZES, "kv_dtype": kv_dtype}
        if kv_dtype is not None:  # of no two heads of K alike, nor channels of V
            generator = torch.Generator().manual_seed(1)
            heads, channels = (2 ** (5 * torch.rand(3, 4, count, generator=generator)) for count in (1, 32))
            options["kv_scales"] = KVScales.of_largest(
                heads.expand_as(channels), channels, num_tokens=0, tasks=(), seed=0
            )
        name = f"served_{model_type}_{kv_dtype}{'_centred' * is_centred}"
        return once_per_run(name, lambda out: export_checkpoint(source, mask, out, **options))

    return make


@pytest.fixture(scope="session")
def checkpoint(random_checkpoint):
    """A Llama of random weights."""
    return random_checkpoint("llama")


@pytest.fixture(scope="session")
def centred(random_checkpoint):
    """The same, whose keys have a mean that comes off them."""
    return random_checkpoint("llama", is_centred=True)


@pytest.fixture(scope="session")
def in_fp8(random_checkpoint):
    """That again, whose cache is in FP8."""
    return random_checkpoint("llama", "fp8", is_centred=True)


@pytest.fixture(scope="session")
def adapted(checkpoint, tmp_path_factory):
    """A checkpoint, an adapter of its original, the same converted, and a checkpoint that has it merged."""
    root, rank, scale = tmp_path_factory.mktemp("adapters"), 4, 2
    model = transformers.LlamaForCausalLM.from_pretrained(checkpoint)
    widths = [[20, 0, 32, 13], [16, 0, 4, 0], [8, 32, 8, 32]]  # all heads move
    mask = ChannelMask(tiny_families.random_mask(widths, 32))

    def export(name):
        model.save_pretrained(root / "source" / name)
        export_checkpoint(root / "source" / name, mask, root / name, **SIZES)

    export("checkpoint")
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, weight in model.named_parameters():
        if "_proj" in name and "self_attn" in name:
            first, second = (
                0.15 * torch.randn(shape, generator=generator)
                for shape in ((rank, weight.shape[1]), (weight.shape[0], rank))
            )
            for part, tensor in (("A", first), ("B", second)):
                tensors[f"base_model.model.{name.removesuffix('weight')}lora_{part}.weight"] = tensor
            weight.data += scale * second @ first
    export("merged")
    original = root / "original"
    original.mkdir()
    save_file(tensors, original / "adapter_model.safetensors")
    targets = [f"{name}_proj" for name in "qkvo"]
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": scale * rank, "target_modules": targets}
    (original / "adapter_config.json").write_text(json.dumps(settings))
    convert_adapter(original, root / "checkpoint", root / "converted")
    return root


# Of heads that keep 0, 13, 20, 32; 0, 0, 4, 16; and 8, 8, 32, 32 channels of K.
VALUE_WIDTHS = [[0, 8, 16, 32], [0, 0, 24, 8], [16, 0, 8, 24]]


def edit_block(folder, out, **changes):
    """Copy a checkpoint with other keys in its `leank` block; a value of `...` removes the key."""
    out = shutil.copytree(folder, out)
    block = {**read_json(out / "config.json")["leank"], **changes}
    kept = {key: value for key, value in block.items() if value is not ...}
    checks.edit_json(out / "config.json", leank=kept)
    return out


def prune_values(folder, out):
    """Copy a checkpoint, and have V's first channels alone kept, as if they were the best directions."""
    return edit_block(folder, out, value_widths=VALUE_WIDTHS)


def prompts_of(folder, lengths):
    """Token ids without meaning, and no two prompts alike."""
    size = read_json(folder / "config.json")["vocab_size"]
    return [
        [1] + [10 + (7 * place * (number + 3) + place * place) % (size - 20) for place in range(length - 1)]
        for number, length in enumerate(lengths)
    ]


def load_runtime(folder, dtype=torch.float32) -> Any:
    """The checkpoint in its own runtime."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype)


def answer_of(model, prompt, new):
    """What a model answers to tokens, of so many tokens at most."""
    row = torch.tensor([prompt])
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(row, attention_mask=torch.ones_like(row), **options)[0, len(prompt) :].tolist()


@functools.cache
def answers_of(folder, *, dense=False, lengths=LENGTHS, new=NEW):
    """What the checkpoint's own runtime answers, one prompt at a time; or the dense model of its weights."""
    stock = transformers.LlamaForCausalLM
    model = stock.from_pretrained(folder, dtype=torch.float32) if dense else load_runtime(folder)
    model.generation_config.eos_token_id = None
    return [answer_of(model, prompt, new) for prompt in prompts_of(folder, lengths)]


class Said(dict):
    """What an engine said; of one that failed only its `error`, which any other key tells."""

    def __missing__(self, key):
        raise AssertionError(self.get("error", f"nothing was said of `{key}`"))


def ask(folder, *, lengths=LENGTHS, new=NEW, rounds=(None,), scores=False, **options):
    """A run on the folder's prompts, by options of the engine."""
    return {
        "options": {"model": str(folder), "skip_tokenizer_init": True, **ENGINE, **options},
        "prompts": prompts_of(folder, lengths),
        "new": new,
        "rounds": rounds,
        "scores": scores,
    }


def run_python(*arguments, timeout, **environment):
    """Run Python with vLLM's settings in a process of its own, which has to succeed."""
    settings = {**os.environ, **ENVIRONMENT, **environment}
    done = checks.run_python(*arguments, env=settings, timeout=timeout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-8000:]
    return done


def run_engines(runs, **environment):
    """Runs of engines, one after the other in a process: that takes longer to start than they take.

    Whose drafts are n-grams has a process of its own: on a CPU without AVX-512 engines that came after it in
    its process answered wrongly, with vLLM's own classes, too. Torch had two threads there in place of one.
    """
    alone = {name for name, run in runs.items() if run["options"].get("speculative_config") == NGRAMS}
    groups = [[name for name in runs if name not in alone], *([name] for name in runs if name in alone)]
    asked = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
    found = {}
    for names in filter(None, groups):
        given, timeout = json.dumps([runs[name] for name in names]), 200 + 200 * len(names)
        done = run_python(HERE / "engine.py", given, timeout=timeout, **asked)
        lines = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
        told = [*names, "then"][: len(lines)]  # of a run that another process takes over from
        found |= dict(zip(told, (Said(json.loads(line[5:])) for line in lines), strict=True))
    return found


def read(url):
    """Get a page as text."""
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


@contextmanager
def serving(folder, log, **options):
    """Serve a checkpoint; `options` are vLLM's, such as `max_model_len=512`. It has to end when told to."""
    given = {**ENGINE, **options}.items()
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in given]
    with start_server(folder, [*arguments, "--enforce-eager"], log, **ENVIRONMENT) as server:
        server.wait()
        yield server
        server.process.terminate()
        server.process.wait(60)


# vLLM's build for CPUs has states of linear attention in bfloat16 alone.
ROOM = {"kv_cache_memory_bytes": 64 << 20}
LINEAR: dict[str, Any] = {"lengths": (170, 500), "new": 20, "dtype": "bfloat16", "scores": True, **ROOM}


def logits_of(model, prompts, answers):
    """What a model finds of every token in front of each token of the answers [N, T, V]."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        cache, given, steps = model.build_cache(), torch.tensor([prompt]), []
        for token in answer:
            with torch.inference_mode():
                logits = model(given, use_cache=True, **{CACHE: cache}).logits
            steps.append(logits[0, -1].float())
            given = torch.tensor([[token]])
        found.append(torch.stack(steps))
    return torch.stack(found)


def scores_of(model, prompts, answers):
    """How likely a model finds answers, token by token [N, T]."""
    scores = logits_of(model, prompts, answers).log_softmax(-1)
    return scores.gather(-1, torch.tensor(answers)[..., None])[..., 0]


def gaps_of(folder, answers, lengths=LENGTHS):
    """How far the checkpoint's own runtime has each token of answers behind the likeliest, in nats [N, T].

    For caches in FP8: a number between two of FP8 is rounded by how it was added up, so of two tokens that
    are nearly as likely either may come, and what follows depends on it.
    """
    logits = logits_of(load_runtime(folder), prompts_of(folder, lengths), answers)
    return logits.amax(-1) - logits.gather(-1, torch.tensor(answers)[..., None])[..., 0]


def hold_to_runtime(folder, said):
    """Hold answers of an engine in bfloat16 to what that costs the checkpoint's own runtime."""
    asked = prompts_of(folder, LINEAR["lengths"]), said["answers"][-1]
    models = [load_runtime(folder, dtype) for dtype in (torch.float32, torch.bfloat16)]
    family = ARCHITECTURES[models[0].config.model_type.removeprefix(LEANK_PREFIX)]
    stock = getattr(transformers, family.causal_lm_class).from_pretrained(folder, dtype=torch.float32)
    stock.build_cache = lambda: transformers.DynamicCache(config=stock.config)
    exact, rounded, dense = (scores_of(model, *asked) for model in (*models, stock))
    found = torch.tensor(said["scores"][-1]), rounded, dense
    served, lost, pruned = (float((scores - exact).norm()) for scores in found)
    assert served < 2 * lost < pruned / 2
