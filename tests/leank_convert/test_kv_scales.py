"""Checkpoints whose cache is FP8 or int4: calibration, scales in shards, what checks, shows, refuses them."""

import functools
import importlib
import json
import math
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from leank_convert import kv_scales
from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.checkpoint_io import INDEX_NAME
from leank_convert.evaluate.loading import load_evaluated
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.kv_scales import KVScales
from leank_convert.verify import verify_checkpoint
from leank_convert.warmup import load_without_weights
from runtime import fp8_leank
from runtime.constants_leank import Constants, choose_constants
from tests.checks import done, edit_json, edit_tensors, failed, fitting_mask, refusal, rejected, run
from tests.runtime.tiny_inputs import feed


def random_scales(layers=3, heads=4, head_dim=12):
    keys, values = 2.0 ** torch.randint(-14, 16, (2, layers, heads, head_dim))
    keys = keys[..., :1].repeat(1, 1, head_dim)
    return KVScales(keys, values, num_tokens=7, tasks=("retrieval",), seed=3)


@pytest.fixture(scope="module")
def exported_testbed(tmp_path_factory):
    """The testbed with its packaged mask and a cache in a format, by the command; not to be changed."""

    def export(kv_dtype):
        out = tmp_path_factory.mktemp(kv_dtype) / "testbed"
        done("export", "testbed", "--kv-dtype", kv_dtype, "--set", "data.max_length=300", "-o", out)
        return out

    return functools.cache(export)


def test_each_checkpoint_runs_the_parts_that_it_carries_whatever_was_loaded_before(
    exported_testbed, shipped_checkpoint
):
    """transformers takes a class that it has for a config; files of both checkpoints have the same names."""

    def has_fp8_kernels(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        package = type(model).__module__.rpartition(".")[0]
        return importlib.import_module(".parts_leank", package).carries("kernel_fp8")

    assert not has_fp8_kernels(shipped_checkpoint) and has_fp8_kernels(exported_testbed("fp8"))


@pytest.fixture
def exported(source, out):
    """A model in several shards, whose mask moves heads, and its checkpoint with random scales."""
    scales = random_scales()
    return (
        source,
        scales,
        export_checkpoint(source, fitting_mask(source), out, kv_dtype="fp8", kv_scales=scales),
    )


def tensors_of(folder):
    files = sorted(folder.glob("model*.safetensors"))
    return {name: (file, tensor) for file in files for name, tensor in load_file(file).items()}


def test_the_toolkits_rule_is_the_runtimes():
    generator = torch.Generator().manual_seed(0)
    largest = torch.rand(2, 3, 4000, generator=generator) * 2.0 ** torch.randint(-40, 40, (4000,))
    largest[0, 0, :9] = torch.tensor([0, 224, 448, 112, 1e-38, 3e38, 1, 223.99, 224.01])
    ours = KVScales.of_largest(largest, largest.flip(-1), num_tokens=1, tasks=(), seed=0)
    states = largest[:, :, None], largest.flip(-1)[:, :, None]
    signs = torch.tensor([-1.0, 1.0])[:, None]  # of which the mean is zero
    theirs = choose_constants(*(numbers * signs for numbers in states), None, "fp8", Constants())
    assert theirs.key_mean is not None and not theirs.key_mean.any()
    assert torch.equal(ours.keys, theirs.key_scale) and torch.equal(ours.values, theirs.value_scale)
    assert math.isclose(float(kv_scales.scale_of(torch.tensor(225.0))), 2)


def test_every_layers_scales_lie_beside_its_attention_in_the_order_of_its_heads(exported):
    source, scales, out = exported
    tensors, leank = tensors_of(out), read_json(out / "config.json")["leank"]
    assert len({file for file, _ in tensors.values()}) > 1
    for layer, order in enumerate(leank["head_permutation"]):
        assert order != sorted(order)
        prefix = f"model.layers.{layer}.self_attn."
        beside = tensors[f"{prefix}o_proj.weight"][0]
        for name, expected in (("key_scale", scales.keys), ("value_scale", scales.values)):
            file, tensor = tensors[f"{prefix}{name}"]
            assert file == beside and tensor.dtype == torch.float32
            assert torch.equal(tensor, expected[layer][order])
    assert leank["kv_scales"] == {"num_tokens": 7, "tasks": ["retrieval"], "seed": 3}
    report = verify_checkpoint(out, source=source)
    assert report.ok and "6 tensors, of 7 tokens" in [check.detail for check in report.checks]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_checkpoint_stores_by_its_scales_and_is_the_same_once_saved(exported, dtype, tmp_path):
    source, _, out = exported
    model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, trust_remote_code=True)
    expected = {name: tensor for name, (_, tensor) in tensors_of(out).items() if "_scale" in name}
    ids = torch.randint(3, 60, (2, 200), generator=torch.Generator().manual_seed(0))
    for folder in (None, tmp_path / "saved"):
        if folder is not None:
            model.to(getattr(torch, dtype)).save_pretrained(folder)
            assert failed(folder) == {}
            model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        cache = feed(model, ids)[CACHE]
        assert cache.kv_dtype == "fp8"
        for number, layer in enumerate(cache.layers):
            assert layer.store.tensors.kept_keys.dtype == torch.float8_e4m3fn
            for name, scale in zip(fp8_leank.SCALE_NAMES, layer.store.tensors.constants[1:], strict=True):
                assert scale.dtype == torch.float32
                assert torch.equal(scale[0], expected[f"model.layers.{number}.self_attn.{name}"])
    stock, original = (transformers.LlamaForCausalLM.from_pretrained(folder) for folder in (out, source))
    with torch.no_grad():
        assert torch.allclose(stock(ids).logits, original(ids).logits, atol=1e-4)


def test_a_checkpoint_without_scales_takes_those_of_every_prompt(source, out):
    export_checkpoint(source, fitting_mask(source), out, kv_dtype="fp8")
    assert read_json(out / "config.json")["leank"]["kv_scales"] is None
    assert tensors_of(out).keys() == tensors_of(source).keys() and verify_checkpoint(out, source=source).ok
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    cache = feed(model, torch.randint(3, 60, (2, 30)))[CACHE]
    assert all(layer.store.tensors.key_scale.shape == (2, 4, 12) for layer in cache.layers)


SCALE = "model.layers.1.self_attn.value_scale"
MEASURED = {"num_tokens": 7, "tasks": ["retrieval"], "seed": 3}


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (SCALE, None, f"tensor `{SCALE}` is missing"),
        (SCALE, lambda scale: scale.double(), "is F64 [4, 12], not F32 [4, 12]"),
        (SCALE, lambda scale: scale[:2].clone(), "is F32 [2, 12], not F32 [4, 12]"),
        (SCALE, lambda scale: torch.full_like(scale, 3.0), "holds 3.0, which is no"),
        (SCALE, lambda scale: torch.full_like(scale, math.nan), "holds nan, which is no"),
        (
            SCALE.replace("value", "key"),
            lambda scale: torch.cat([2.0 ** (scale[:, :1] == 1), scale[:, 1:]], dim=1),
            "has a head whose channels have different scales",
        ),
    ],
)
def test_hostile_scales_are_one_sentence(exported, name, edit, message):
    _, _, out = exported
    edit_tensors(tensors_of(out)[name][0], **{name: edit})
    tensors = tensors_of(out)
    total = sum(tensor.nbytes for _, tensor in tensors.values())
    weight_map = {name: file.name for name, (file, _) in tensors.items()}
    edit_json(out / INDEX_NAME, weight_map=weight_map, metadata={"total_size": total})
    told = failed(out)["cache scales"]
    assert message in told and "\n" not in told and run("verify", out).exit_code == 1
    with refusal(re.escape(message)):  # and before anything is answered
        load_evaluated(out, torch.device("cpu"))
    if edit is None:
        with pytest.raises(ValueError, match=rf"^`{out}`: tensor `{SCALE}` is missing; copy or export"):
            AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_dtype": "int3"}, "`leank.kv_dtype` is 'int3', not one of `auto`, `fp8`, `int4`"),
        ({"kv_dtype": "int4"}, "`leank.kv_scales` goes with `kv_dtype` `fp8`; an int4 cache has none"),
        ({"kv_scales": [1]}, "`leank.kv_scales` is [1]: Input should be"),
        ({"kv_scales": {**MEASURED, "num_tokens": 0}}, "`leank.kv_scales.num_tokens"),
        ({"kv_scales": {**MEASURED, "other": 1}}, "`leank.kv_scales.other"),
        ({"kv_scales": {"num_tokens": 7, "seed": 3}}, "`leank.kv_scales.tasks` is missing"),
        ({"kv_scales": None}, "is there, and config.json has no `leank.kv_scales`"),
    ],
)
def test_a_block_that_says_otherwise_is_one_sentence(exported, change, message):
    _, _, out = exported
    edit_json(out / "config.json", leank={**read_json(out / "config.json")["leank"], **change})
    assert message in "".join(failed(out).values())


SHOWN = {
    "fp8": (
        "scales of {} tokens",
        "with scales, of K per head and of V per channel, measured on {} tokens.",
        ("With `pip install tilelang` NVIDIA", "`vllm serve path/to/this/checkpoint`."),
    ),
    "int4": (
        "least number and step of every 32",
        "with a least number and a step for every 32 of a token.",
        ("No kernels serve an int4 cache", "`vllm serve path/to/this/checkpoint --kv-cache-dtype bfloat16`."),
    ),
}


@pytest.mark.parametrize(("kv_dtype", "pruned"), [("fp8", (304, 768)), ("int4", (200, 480))])
def test_inspect_and_the_card_tell_bytes_and_scales(exported_testbed, kv_dtype, pruned):
    shown, stored, served = SHOWN[kv_dtype]
    out = exported_testbed(kv_dtype)
    facts = json.loads(run("inspect", out, "--json").stdout)
    told, tokens = facts["bytes_per_token"], f"{(facts['kv_scales'] or MEASURED)['num_tokens']:,}"
    assert facts["kv_dtype"] == kv_dtype and facts["key_mean"] is True
    assert (told["key_dense"], told["value_dense"]) == (2048, 2048)
    assert (told["key_pruned"], told["value_pruned"]) == pruned
    assert (
        f"cache             {kv_dtype}, the window too; {shown.format(tokens)}" in run("inspect", out).stdout
    )
    card, window = (out / "README.md").read_text(), f"{told['key_window']:,} | {told['value_window']:,}"
    assert f"| window | first 16, last 64 to 80 | {window} |" in card
    assert f"stored in {kv_dtype}, {stored.format(tokens)}" in card
    assert "Rounding alone, with the same channels pruned: on " in card
    assert all(line in card for line in served)


def test_what_has_no_such_cache_refuses_in_a_sentence(exported_testbed, tmp_path):
    fp8, int4 = map(exported_testbed, ("fp8", "int4"))
    for arguments, message in (
        (("export", "testbed", "--kv-dtype", "fp8", "--mask", "nowhere"), "mask `nowhere` is neither a file"),
        (("train", "testbed", "--mask-only", "--kv-dtype", "fp8"), "--mask-only writes no checkpoint"),
        (("export-onnx", fp8), "keeps its cache in fp8; a graph's has the dtype of its"),
        (("export-onnx", int4), "keeps its cache in int4; a graph"),
    ):
        assert message in rejected(*arguments, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    told = rejected("inspect", int4, "--memory", "1GiB")
    assert "keeps its cache in int4, which vLLM does not serve" in told


def test_scales_of_another_model_or_for_another_cache_are_refused(source, out):
    with refusal(r"^`kv_scales` are for `kv_dtype` `fp8`, not `int4`$"):
        kv_scales.describe_cache("int4", random_scales())
    for options, message in (
        ({"kv_dtype": "fp8", "kv_scales": random_scales(layers=2)}, r"^scales are \[2, 4, 12\] and \[2, "),
        ({"kv_scales": random_scales()}, "^`kv_dtype` is None, not one of fp8, int4$"),
    ):
        with refusal(message):
            export_checkpoint(source, fitting_mask(source), out, **options)


def test_warmup_asks_for_kernels_of_an_fp8_cache(exported_testbed):
    assert load_without_weights(exported_testbed("fp8")).build_cache().kv_dtype == "fp8"


@pytest.mark.filterwarnings("default")
def test_a_loaded_int4_checkpoint_decodes_from_as_many_bytes_as_are_told(exported_testbed, tmp_path):
    int4 = exported_testbed("int4")
    model = AutoModelForCausalLM.from_pretrained(int4, dtype="auto", trust_remote_code=True)
    ids = torch.randint(3, 60, (1, 600), generator=torch.Generator().manual_seed(0))
    cache = model.build_cache()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    answer = model.generate(ids, cache=cache, **options)
    assert cache.kv_dtype == "int4" and cache.layers[0].store.tensors.kept_keys.dtype == torch.uint8
    assert torch.equal(answer, model.generate(ids, kv_dtype="int4", **options))
    told = json.loads(run("inspect", int4, "--json").stdout)["bytes_per_token"]
    memory = cache.memory()
    num_tokens = cache.get_seq_length()
    per_token = [region.used / num_tokens for region in (memory.kept_keys, memory.kept_values)]
    assert per_token == [told["key_pruned"], told["value_pruned"]]
    # Of bfloat16's: half a byte, and two numbers of two bytes for every 32.
    assert told["value_window"] / told["value_dense"] == (0.5 + 4 / 32) / 2
    model.save_pretrained(tmp_path / "saved")
    assert verify_checkpoint(tmp_path / "saved").ok
