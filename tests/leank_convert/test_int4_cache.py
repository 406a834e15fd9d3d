"""Checkpoints whose cache is int4: keys are centred, and what checks, shows, decodes and refuses them."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from bin.baselines import int4
from leank_convert.cli import main
from leank_convert.files import read_json
from leank_convert.head_layout import INT4_GROUP_SIZE, count_cache_bytes
from leank_convert.kv_scales import KVScales, LeanKError, describe_cache
from leank_convert.verify import verify_checkpoint
from runtime import int4_leank


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def testbed(tmp_path_factory):
    """The testbed with its packaged mask, by the command; not to be changed."""
    out = tmp_path_factory.mktemp("int4") / "testbed"
    result = run("export", "testbed", "--kv-dtype", "int4", "-o", out)
    assert result.exit_code == 0, result.stderr
    return out


def test_a_checkpoint_says_so_and_holds_no_scales(testbed):
    block = read_json(testbed / "config.json")["leank"]
    assert (block["kv_dtype"], block["kv_scales"]) == ("int4", None)
    report = verify_checkpoint(testbed)
    assert report.ok, [check for check in report.checks if not check.ok]
    assert ("cache scales", "none, none needed") in [(c.name, c.detail) for c in report.checks]


@pytest.mark.filterwarnings("default")
def test_a_loaded_checkpoint_decodes_from_as_many_bytes_as_are_told(testbed, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(testbed, dtype="auto", trust_remote_code=True)
    ids = torch.randint(3, 60, (1, 600), generator=torch.Generator().manual_seed(0))
    cache = model.build_cache()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    answer = model.generate(ids, cache=cache, **options)
    assert cache.kv_dtype == "int4" and cache.layers[0].store.kept_keys.dtype == torch.uint8
    assert torch.equal(answer, model.generate(ids, kv_dtype="int4", **options))
    told = json.loads(run("inspect", testbed, "--json").stdout)["bytes_per_token"]
    memory = cache.memory()
    num_tokens = cache.get_seq_length()
    per_token = [region.used / num_tokens for region in (memory.kept_keys, memory.kept_values)]
    assert per_token == [told["key_pruned"], told["value_pruned"]]
    # Of bfloat16's: half a byte, and two numbers of two bytes for every 32.
    assert told["value_window"] / told["value_dense"] == (0.5 + 4 / 32) / 2
    model.save_pretrained(tmp_path / "saved")
    assert verify_checkpoint(tmp_path / "saved").ok


def test_toolkit_and_runtime_group_alike():
    assert INT4_GROUP_SIZE == int4.CHUNK_SIZE == int4_leank.GROUP_SIZE
    widths = [[7, 80, 0], [16, 48, 33]]
    count = count_cache_bytes(widths, 80, 2, "int4")
    groups = [int4_leank.group_chunks([-(-w // 16) for w in row], 16, torch.device("cpu")) for row in widths]
    assert count.key_pruned == sum(map(sum, widths)) // 2 + sum(group.count for group in groups) * 4


def test_inspect_and_the_card_tell_bytes(testbed):
    text = run("inspect", testbed).stdout
    assert "cache             int4, the window too; least number and step of every 32" in text
    card = (testbed / "README.md").read_text()
    assert "stored in int4, with a least number and a step for every 32 of a token." in card
    told = json.loads(run("inspect", testbed, "--json").stdout)["bytes_per_token"]
    assert f"| {told['key_window']:,} | {told['value_window']:,} |" in card


def test_training_makes_one_too(tmp_path):
    arguments = (
        "--method static-norm --pruning-ratio 0.5 --set calibration_prompts=1 --set held_out_samples=0"
    )
    result = run("train", "testbed", *arguments.split(), "--kv-dtype", "int4", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert read_json(tmp_path / "out" / "config.json")["leank"]["kv_dtype"] == "int4"


def test_what_has_no_int4_cache_refuses_in_a_sentence(testbed, tmp_path):
    for arguments, message in (
        (("export-onnx", testbed, "-o", tmp_path / "out"), "keeps its cache in int4; a graph"),
        (
            ("export", "testbed", "--device", "cpu", "-o", tmp_path / "out"),
            "--device goes with --kv-dtype and --key-mean",
        ),
        (("inspect", testbed, "--memory", "1GiB"), "keeps its cache in int4, which vLLM does not serve"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and message in result.stderr, result.stderr
    assert not (tmp_path / "out").exists()
    ones = torch.ones(1, 1, 2)
    with pytest.raises(LeanKError, match=r"^`kv_scales` are for `kv_dtype` `fp8`, not `int4`$"):
        describe_cache("int4", KVScales(ones, ones, num_tokens=1, tasks=(), seed=0))
