"""What goes wrong ends in the engine's own error, what a runtime refuses in the runtime's, and nothing hangs.

Every wait has an end: clients' of 60 seconds.
"""

import json
import re
import shutil

import pytest

from leank_convert.files import read_json
from tests.checks import edit_tensors
from tests.vllm.conftest import SIZES, answers_of, ask, edit_block, run_engines, run_python, serving

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

import psutil
from openai import OpenAI, OpenAIError

WEIGHT = "model.layers.1.self_attn.k_proj.weight"
MOST = 288  # tokens of a request in so small a pool, as vLLM says
# Keys of the `leank` block, and what they are changed to, of each kind that the runtime's reader refuses.
DAMAGES = {
    "format_version": 3,
    "widths": [[0, 13]],
    "channel_masks": ["zz"],
    "recent_size": "1024",
    "prune": "sometimes",
    "flush_size": ...,  # gone
}
# Both read each folder in the process of an engine's front end, the runtime before the plugin is there.
READ_CONFIGS = """
import json, sys
from transformers import AutoConfig
from vllm.engine.arg_utils import EngineArgs

def error_of(read):
    try:
        read()
    except Exception as error:
        return str(error)

folders = sys.argv[1:]
said = [[error_of(lambda: AutoConfig.from_pretrained(folder, trust_remote_code=True))] for folder in folders]
for errors, folder in zip(said, folders):
    errors.append(error_of(lambda: EngineArgs(model=folder, skip_tokenizer_init=True).create_engine_config()))
print("SAID", json.dumps(said))
"""

RELOAD = """
import json, sys
from vllm import LLM, SamplingParams

model, *paths = sys.argv[1:]
sizes = {"block_size": 32, "kv_cache_memory_bytes": 16 << 20, "max_model_len": 1024}
llm = LLM(model, enforce_eager=True, dtype="float32", skip_tokenizer_init=True, **sizes)
prompts = [{"prompt_token_ids": [5 + place % 90 for place in range(300)]}]
sampling = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, detokenize=False)
said = []
of = {"": {}, "iterator": {"weights_iterator": iter(())}}
for path in ["", "iterator", *paths]:
    try:
        llm.collective_rpc("reload_weights", kwargs=of.get(path, {"weights_path": path}))
        error = ""
    except Exception as caught:
        error = str(caught)
    said.append([error, list(llm.generate(prompts, sampling, use_tqdm=False)[0].outputs[0].token_ids)])
print("SAID", json.dumps(said))
"""


def test_weights_of_another_mask_are_not_loaded_in_the_place_of_others_and_the_engine_goes_on(
    checkpoint, tmp_path
):
    files = read_json(checkpoint / "config.json")["leank"]["files"]
    same = edit_block(checkpoint, tmp_path / "same", files={**files, "rows_leank.py": "0" * 64})
    other = edit_block(checkpoint, tmp_path / "other", flush_size=SIZES["flush_size"] + 1)
    asked = ("-c", RELOAD, checkpoint, same, other, checkpoint)
    done = run_python(*asked, timeout=300, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    said = json.loads(done.stdout.rpartition("SAID ")[2].splitlines()[0])
    told = (
        f"`{other}` has another mask, or other constants, than the checkpoint that is served: start another"
    )
    assert [error[: len(told)] for error, _ in said if "iterator" not in error] == ["", "", told, ""]
    assert "weights of an iterator may have the original's order of heads" in said[1][0]
    assert all(answer == said[0][1] for _, answer in said)


def test_a_malformed_config_is_refused_with_the_runtimes_sentence(checkpoint, tmp_path):
    folders = [edit_block(checkpoint, tmp_path / key, **{key: value}) for key, value in DAMAGES.items()]
    done = run_python("-c", READ_CONFIGS, *folders, timeout=300, HF_HOME=str(tmp_path / "hub"))
    said = json.loads(done.stdout.rpartition("SAID ")[2])
    for key, (runtime, engine) in zip(DAMAGES, said, strict=True):
        assert runtime.startswith("config.json: ") and key in runtime
        assert runtime in engine


def test_damaged_weights_and_a_pool_for_less_than_a_request_are_refused_and_the_next_engine_serves(
    checkpoint, tmp_path
):
    """A prompt takes kept and window pages of all its tokens, and so it is counted."""
    missing, short = (shutil.copytree(checkpoint, tmp_path / name) for name in ("missing", "short"))
    edit_tensors(missing / "model.safetensors", **{WEIGHT: None})
    edit_tensors(short / "model.safetensors", **{WEIGHT: lambda weight: weight[:-32]})
    memory = {"kv_cache_memory_bytes": 1 << 20, "enable_prefix_caching": False}
    load = {"lengths": (MOST - 20,) * 2, "new": 20}
    runs = {
        "missing": ask(missing),
        "short": ask(short),
        "pool": ask(checkpoint, **memory),
        "served": ask(checkpoint, **load, **memory, max_model_len=MOST),
    }
    said = run_engines(runs)
    assert f"the checkpoint's weights lack `{WEIGHT}`; export it again" in said["missing"]["error"]
    told = f"`{WEIGHT}` is of shape [96, 256], dimension 0 should be 128: 4 heads of 32"
    assert told in said["short"]["error"]
    told = said["pool"]["error"]
    assert "To serve at least one request with the model's max seq len (1024)" in told
    assert int(re.search(r"the estimated maximum model length is (\d+)", told)[1]) == MOST
    assert said["served"]["answers"] == [answers_of(checkpoint, **load)]
    # The second is read as soon as the first has given its window back, if there is room for its kept pages.
    assert said["served"]["preemptions"] == [0]


def test_a_killed_worker_ends_the_server_and_its_requests(shipped, tmp_path):
    with serving(shipped, tmp_path / "server.log", tensor_parallel_size=2) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
            options = {"max_tokens": 900, "extra_body": {"ignore_eos": True}, "stream": True}
            stream = client.completions.create(model=str(shipped), prompt=[5] * 50, **options)
            next(iter(stream))
            children = psutil.Process(server.process.pid).children(recursive=True)
            next(child for child in children if "Worker" in "".join(child.cmdline())).kill()
            with pytest.raises(OpenAIError):
                list(stream)
        server.process.wait(60)
        _, left = psutil.wait_procs(children, timeout=60)
        assert not left
        assert "EngineDeadError" in server.log.read_text()
