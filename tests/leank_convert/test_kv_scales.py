"""Checkpoints whose cache is FP8 or int4: calibration, scales in shards, what checks, shows, refuses them."""

from __future__ import annotations

import functools
import importlib
import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from bin.baselines import int4
from leank_convert import kv_scales
from leank_convert._runtime.configuration_leank import CACHE
from leank_convert.cli import main
from leank_convert.errors import LeanKError
from leank_convert.evaluate.loading import load_evaluated
from leank_convert.export import export_checkpoint
from leank_convert.files import read_json
from leank_convert.head_layout import INT4_GROUP_SIZE, count_cache_bytes
from leank_convert.hub import resolve_model
from leank_convert.kv_scales import KVScales
from leank_convert.leank_block import encode_masks
from leank_convert.mask import MASK_FILE_NAME, load_mask
from leank_convert.masks import find_by_name
from leank_convert.methods.measured_cache import measure_cache
from leank_convert.train.split_attention import StoredContext
from leank_convert.verify import verify_checkpoint
from leank_convert.warmup import load_without_weights
from runtime import codec_leank, fp8_leank
from runtime.cache_leank import LeanKCache
from runtime.configuration_leank import LeanKLlamaConfig
from runtime.constants_leank import Constants, choose_constants
from runtime.tools import fill_layer


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def random_scales(layers=3, heads=4, head_dim=12):
    keys, values = 2.0 ** torch.randint(-14, 16, (2, layers, heads, head_dim))
    keys = keys[..., : head_dim // 2].repeat(1, 1, 2)
    return KVScales(keys, values, num_tokens=7, tasks=("retrieval",), seed=3)


@pytest.fixture(scope="module")
def exported_testbed(tmp_path_factory):
    """The testbed with its packaged mask and a cache in a format, by the command; not to be changed."""

    def export(kv_dtype):
        out = tmp_path_factory.mktemp(kv_dtype) / "testbed"
        result = run("export", "testbed", "--kv-dtype", kv_dtype, "-o", out)
        assert result.exit_code == 0, result.stderr
        return out

    return functools.cache(export)


@pytest.fixture(scope="module")
def testbed(exported_testbed):
    return exported_testbed("fp8")


@pytest.fixture(scope="module")
def testbed_int4(exported_testbed):
    return exported_testbed("int4")


def test_each_checkpoint_runs_the_parts_that_it_carries_whatever_was_loaded_before(
    testbed, shipped_checkpoint
):
    """transformers takes a class that it has for a config; files of both checkpoints have the same names."""

    def has_fp8_kernels(folder):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        package = type(model).__module__.rpartition(".")[0]
        return importlib.import_module(".parts_leank", package).carries("kernel_fp8")

    assert [has_fp8_kernels(folder) for folder in (shipped_checkpoint, testbed)] == [False, True]


@pytest.fixture
def exported(source_model, fitting_mask, tmp_path):
    """A model in several shards, whose mask moves heads, and its checkpoint with random scales."""
    source = source_model("llama")
    scales = random_scales()
    return (
        source,
        scales,
        export_checkpoint(source, fitting_mask(source), tmp_path / "out", kv_dtype="fp8", kv_scales=scales),
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


def test_scales_are_measured_on_the_recipes_data_and_leave_room(testbed):
    block = read_json(testbed / "config.json")["leank"]
    measured, mask = measure_cache("testbed"), load_mask(testbed / MASK_FILE_NAME)
    assert block["kv_dtype"] == "fp8" and block["key_mean"]
    assert block["kv_scales"]["num_tokens"] == measured.statistics.num_tokens
    scales = measured.scales(mask)
    assert torch.equal(mask.key_mean, measured.statistics.mean) and scales.describe() == block["kv_scales"]
    assert measured.centre(mask) is mask
    means = mask.key_mean.float()
    # Text of the testbed's own: the largest number of a channel is neither clamped nor lost.
    dense = AutoModelForCausalLM.from_pretrained(resolve_model("testbed"), dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(testbed)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "the red key opens box 7 . " * 40}])
    cache = DynamicCache()
    with torch.no_grad():
        dense(torch.tensor([list(text["input_ids"])]), **{CACHE: cache})
    for layer, mean, keys, values in zip(cache.layers, means, scales.keys, scales.values, strict=True):
        for states, scale in ((layer.keys - mean[:, None], keys), (layer.values, values)):
            stored = states[0].abs().amax(1) / scale
            assert stored.max() <= 448 and (stored >= 16).float().mean() > 0.9


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
            assert (
                file == beside
                and tensor.dtype == torch.float32
                and torch.equal(tensor, expected[layer][order])
            )
    assert leank["kv_scales"] == {"num_tokens": 7, "tasks": ["retrieval"], "seed": 3}
    report = verify_checkpoint(out, source=source)
    assert report.ok, [check for check in report.checks if not check.ok]
    assert ("cache scales", "6 tensors, of 7 tokens") in [
        (check.name, check.detail) for check in report.checks
    ]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_loaded_checkpoint_stores_by_its_scales_and_is_the_same_once_saved(exported, dtype, tmp_path):
    source, _, out = exported
    model = AutoModelForCausalLM.from_pretrained(out, dtype=dtype, trust_remote_code=True)
    expected = {name: tensor for name, (_, tensor) in tensors_of(out).items() if "_scale" in name}
    ids = torch.randint(3, 60, (2, 200), generator=torch.Generator().manual_seed(0))
    for folder in (None, tmp_path / "saved"):
        if folder is not None:
            model.to(getattr(torch, dtype)).save_pretrained(folder)
            report = verify_checkpoint(folder)
            assert report.ok, [check for check in report.checks if not check.ok]
            model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        with torch.no_grad():
            cache = model(ids)[CACHE]
        assert cache.kv_dtype == "fp8"
        for number, layer in enumerate(cache.layers):
            assert layer.store.kept_keys.dtype == torch.float8_e4m3fn
            for name, scale in zip(fp8_leank.SCALE_NAMES, layer.store.constants[1:], strict=True):
                assert scale.dtype == torch.float32
                assert torch.equal(scale[0], expected[f"model.layers.{number}.self_attn.{name}"])
    stock, original = (transformers.LlamaForCausalLM.from_pretrained(folder) for folder in (out, source))
    with torch.no_grad():
        assert torch.allclose(stock(ids).logits, original(ids).logits, atol=1e-4)


def test_a_checkpoint_without_scales_takes_those_of_every_prompt(source_model, fitting_mask, tmp_path):
    source = source_model("llama")
    out = export_checkpoint(source, fitting_mask(source), tmp_path / "out", kv_dtype="fp8")
    assert read_json(out / "config.json")["leank"]["kv_scales"] is None
    assert tensors_of(out).keys() == tensors_of(source).keys() and verify_checkpoint(out, source=source).ok
    model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    with torch.no_grad():
        cache = model(torch.randint(3, 60, (2, 30)))[CACHE]
    assert all(layer.store.constants.key_scale.shape == (2, 4, 12) for layer in cache.layers)


SCALE = "model.layers.1.self_attn.value_scale"
MEASURED = {"num_tokens": 7, "tasks": ["retrieval"], "seed": 3}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (None, "tensor `model.layers.1.self_attn.value_scale` is missing"),
        (lambda scale: scale.double(), "is F64 [4, 12], not F32 [4, 12]"),
        (lambda scale: scale[:2].clone(), "is F32 [2, 12], not F32 [4, 12]"),
        *(
            (
                lambda scale, value=value: scale.index_fill(0, torch.tensor([1]), value),
                f"holds {value}, which is no",
            )
            for value in (0.0, -2.0, 3.0, 2.0**-15, 2.0**16, math.inf, math.nan)
        ),
    ],
)
def test_hostile_scales_are_one_sentence(exported, edit, message):
    _, _, out = exported
    file = tensors_of(out)[SCALE][0]
    tensors = load_file(file)
    scale = tensors.pop(SCALE)
    if edit is not None:
        tensors[SCALE] = edit(scale)
    save_file(tensors, file, {"format": "pt"})
    index = read_json(out / "model.safetensors.index.json")
    index["weight_map"] = {name: f.name for name, (f, _) in tensors_of(out).items()}
    index["metadata"]["total_size"] = sum(tensor.nbytes for _, tensor in tensors_of(out).values())
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    failed = {check.name: check.detail for check in verify_checkpoint(out).checks if not check.ok}
    assert message in failed["cache scales"] and "\n" not in failed["cache scales"]
    with pytest.raises(LeanKError) as caught:  # and before anything is answered
        load_evaluated(out, torch.device("cpu"))
    assert message in str(caught.value)
    assert run("verify", out).exit_code == run("verify", _other_failure(out)).exit_code


def test_channels_that_rotary_embedding_pairs_have_to_share_a_scale(exported):
    _, _, out = exported
    name = SCALE.replace("value", "key")
    file = tensors_of(out)[name][0]
    tensors = load_file(file)
    tensors[name][1, 2] = 2.0 if tensors[name][1, 2] == 1 else 1.0
    save_file(tensors, file, {"format": "pt"})
    failed = {check.name: check.detail for check in verify_checkpoint(out).checks if not check.ok}
    assert f"`{name}` has channels i and i + 6 of different scales" in failed["cache scales"]


@pytest.mark.filterwarnings("default")
def test_a_checkpoint_that_lacks_a_scale_is_not_loaded(exported):
    _, _, out = exported
    for file in {file for file, _ in tensors_of(out).values()}:
        save_file({n: t for n, t in load_file(file).items() if n != SCALE}, file, {"format": "pt"})
    index = read_json(out / "model.safetensors.index.json")
    del index["weight_map"][SCALE]
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"^`{out}`: tensor `{SCALE}` is missing; copy or export"):
        AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)


def _other_failure(out: Path) -> Path:
    """A checkpoint that fails for a reason of long standing."""
    other = Path(shutil.copytree(out, out.parent / "other"))
    (other / "rows_leank.py").write_text("")
    return other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_dtype": "int3"}, "`leank.kv_dtype` is 'int3', not one of `auto`, `fp8`, `int4`"),
        ({"kv_dtype": "int4"}, "`leank.kv_scales` goes with `kv_dtype` `fp8`; an int4 cache has none"),
        ({"kv_scales": [1]}, "`leank.kv_scales` is [1]: Input should be"),
        *(
            ({"kv_scales": {**MEASURED, **change}}, f"`leank.kv_scales.{next(iter(change))}")
            for change in (
                *({"num_tokens": count} for count in (-5, 0, 10**200, True, 7.0, "7")),
                *({"tasks": tasks} for tasks in ("retrieval", [1], None)),
                *({"seed": seed} for seed in ("3", -1, None)),
                {"other": 1},
            )
        ),
        ({"kv_scales": {"num_tokens": 7, "seed": 3}}, "`leank.kv_scales.tasks` is missing"),
        ({"kv_scales": None}, "is there, and config.json has no `leank.kv_scales`"),
    ],
)
def test_a_block_that_says_otherwise_is_one_sentence(exported, change, message):
    _, _, out = exported
    config = read_json(out / "config.json")
    config["leank"].update(change)
    (out / "config.json").write_text(json.dumps(config))
    assert any(message in check.detail for check in verify_checkpoint(out).checks if not check.ok)


def test_inspect_and_the_card_tell_bytes_and_scales(testbed):
    facts = json.loads(run("inspect", testbed, "--json").stdout)
    num_tokens = facts["kv_scales"]["num_tokens"]
    assert facts["kv_dtype"] == "fp8" and num_tokens > 1000 and facts["key_mean"] is True
    assert facts["bytes_per_token"] == {
        "key_dense": 2048,
        "value_dense": 2048,
        "key_pruned": 304,
        "value_pruned": 768,
        "key_window": 1024,
        "value_window": 1024,
        "saved": 1 - (304 + 768) / 4096,
    }
    told = f"cache             fp8, the window too; scales of {num_tokens:,} tokens"
    assert told in run("inspect", testbed).stdout
    card = (testbed / "README.md").read_text()
    assert "| window | first 16, last 64 to 80 | 1,024 | 1,024 | 50% |" in card
    assert f"stored in fp8, with scales per channel measured on {num_tokens:,} tokens." in card
    assert "Rounding alone, with the same channels pruned: on " in card


@pytest.mark.parametrize(("kv_dtype", "share"), [("fp8", 0.29), ("int4", 0.18)])
def test_a_token_beyond_the_window_takes_at_most_so_much_of_a_dense_one(kv_dtype, share):
    """Of Llama 3.1 8B with its packaged mask, all that is allocated."""
    path = find_by_name("llama-3.1-8b-instruct-70")
    mask = load_file(path)["channel_mask"].bool()
    widths = mask.sum(-1)
    order = widths.argsort(dim=1, stable=True)
    mask = mask.gather(1, order[..., None].expand_as(mask))
    config = LeanKLlamaConfig(
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        hidden_size=4096,
        leank={
            "format_version": 1,
            "widths": mask.sum(-1).tolist(),
            "channel_masks": encode_masks(mask),
            "head_permutation": [list(range(8))] * 32,
            "sink_size": 128,
            "recent_size": 1024,
            "flush_size": 32,
            "prune": "eager",
        },
    )
    allocated, dense = [], []
    for length in (2048, 4096):
        cache = LeanKCache(config, kv_dtype=kv_dtype)
        cache.reserve(length)
        states = torch.zeros(1, 8, length, 128, dtype=torch.bfloat16)
        for layer in range(32):
            fill_layer(cache, layer, states, states)
        memory = cache.memory()
        allocated.append(memory.total.allocated)
        dense.append(memory.dense_keys + memory.dense_values)
    assert dense[1] - dense[0] == 2048 * 2 * 32 * 8 * 128 * 2
    assert (allocated[1] - allocated[0]) / (dense[1] - dense[0]) <= share


def test_what_has_no_such_cache_refuses_in_a_sentence(testbed, testbed_int4, tmp_path):
    for arguments, message in (
        (("export", "testbed", "--kv-dtype", "fp8", "--mask", "nowhere"), "mask `nowhere` is neither a file"),
        (("train", "testbed", "--mask-only", "--kv-dtype", "fp8"), "--mask-only writes no checkpoint"),
        (("export-onnx", testbed), "keeps its cache in fp8; a graph's has the dtype of its"),
        (("export-onnx", testbed_int4), "keeps its cache in int4; a graph"),
    ):
        result = run(*arguments, "-o", tmp_path / "out")
        assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert not (tmp_path / "out").exists()
    result = run("inspect", testbed_int4, "--memory", "1GiB")
    assert result.exit_code == 2
    assert "keeps its cache in int4, which vLLM does not serve" in result.stderr
    with pytest.raises(LeanKError, match=r"^`kv_scales` are for `kv_dtype` `fp8`, not `int4`$"):
        kv_scales.describe_cache("int4", random_scales())


def test_scales_of_another_model_and_data_that_is_not_finite_are_refused(
    source_model, fitting_mask, tmp_path, monkeypatch
):
    load = StoredContext.load
    monkeypatch.setattr(StoredContext, "load", lambda *given: (load(*given)[0], load(*given)[1] * math.inf))
    with pytest.raises(LeanKError, match=r"^keys or values of model `testbed` are not finite on a context"):
        measure_cache("testbed")
    source = source_model("llama")
    options = {"kv_dtype": "fp8", "kv_scales": random_scales(layers=2)}
    with pytest.raises(LeanKError, match=r"^scales are \[2, 4, 12\] and \[2, 4, 12\], the model has \[3"):
        export_checkpoint(source, fitting_mask(source), tmp_path / "out", **options)
    with pytest.raises(LeanKError, match=r"^`kv_dtype` is None, not one of fp8, int4$"):
        export_checkpoint(source, fitting_mask(source), tmp_path / "out", kv_scales=random_scales())


@pytest.mark.parametrize(
    ("kv_dtype", "num_measured", "told"), [("fp8", 1, "8 tensors, of "), ("int4", 0, "none, none needed")]
)
def test_training_measures_at_most_once_for_all_its_ratios(
    kv_dtype, num_measured, told, tmp_path, monkeypatch
):
    measured = []
    monkeypatch.setattr(
        "leank_convert.convert.measure_cache",
        lambda *given, **options: measured.append(given) or measure_cache(*given, **options),
    )
    arguments = "--method static-norm --pruning-ratio 0.5 --pruning-ratio 0.7 --set calibration_prompts=1"
    more = ("--set", "held_out_samples=0", "--kv-dtype", kv_dtype, "-o", tmp_path / "out")
    result = run("train", "testbed", *arguments.split(), *more)
    assert result.exit_code == 0, result.stderr
    assert len(measured) == num_measured  # masks that are made have their mean
    for ratio in ("0.5", "0.7"):
        report = verify_checkpoint(tmp_path / "out" / f"ratio-{ratio}")
        assert report.ok and any(told in check.detail for check in report.checks)


def test_warmup_asks_for_kernels_of_an_fp8_cache(testbed):
    assert load_without_weights(testbed).build_cache().kv_dtype == "fp8"


def test_an_int4_checkpoint_says_so_and_holds_no_scales(testbed_int4):
    block = read_json(testbed_int4 / "config.json")["leank"]
    assert (block["kv_dtype"], block["kv_scales"]) == ("int4", None)
    report = verify_checkpoint(testbed_int4)
    assert report.ok, [check for check in report.checks if not check.ok]
    assert ("cache scales", "none, none needed") in [(c.name, c.detail) for c in report.checks]


@pytest.mark.filterwarnings("default")
def test_a_loaded_int4_checkpoint_decodes_from_as_many_bytes_as_are_told(testbed_int4, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(testbed_int4, dtype="auto", trust_remote_code=True)
    ids = torch.randint(3, 60, (1, 600), generator=torch.Generator().manual_seed(0))
    cache = model.build_cache()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    answer = model.generate(ids, cache=cache, **options)
    assert cache.kv_dtype == "int4" and cache.layers[0].store.kept_keys.dtype == torch.uint8
    assert torch.equal(answer, model.generate(ids, kv_dtype="int4", **options))
    told = json.loads(run("inspect", testbed_int4, "--json").stdout)["bytes_per_token"]
    memory = cache.memory()
    num_tokens = cache.get_seq_length()
    per_token = [region.used / num_tokens for region in (memory.kept_keys, memory.kept_values)]
    assert per_token == [told["key_pruned"], told["value_pruned"]]
    # Of bfloat16's: half a byte, and two numbers of two bytes for every 32.
    assert told["value_window"] / told["value_dense"] == (0.5 + 4 / 32) / 2
    model.save_pretrained(tmp_path / "saved")
    assert verify_checkpoint(tmp_path / "saved").ok


def test_inspect_and_the_card_tell_bytes_of_int4(testbed_int4):
    text = run("inspect", testbed_int4).stdout
    assert "cache             int4, the window too; least number and step of every 32" in text
    card = (testbed_int4 / "README.md").read_text()
    assert "stored in int4, with a least number and a step for every 32 of a token." in card
    told = json.loads(run("inspect", testbed_int4, "--json").stdout)["bytes_per_token"]
    assert f"| {told['key_window']:,} | {told['value_window']:,} |" in card


def test_toolkit_and_runtime_group_an_int4_cache_alike():
    assert INT4_GROUP_SIZE == int4.CHUNK_SIZE == codec_leank.GROUP_SIZE
    widths = [[7, 80, 0], [16, 48, 33]]
    count = count_cache_bytes(widths, 80, 2, "int4")
    codecs = [
        codec_leank.Int4(torch.float16, [-(-w // 16) for w in row], 16, torch.device("cpu")) for row in widths
    ]
    assert count.key_pruned == sum(map(sum, widths)) // 2 + sum(codec.count_groups for codec in codecs) * 4
