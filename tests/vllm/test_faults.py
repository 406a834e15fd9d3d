"""What goes wrong ends in the engine's own error, what a runtime refuses in the runtime's, and nothing hangs.

Every wait has an end: `run_engine` of 400 seconds, clients of 60.
"""

import json
import re
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from tests.vllm.conftest import ENVIRONMENT, answers_of, run_engine
from tests.vllm.server import serving

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

import os

import psutil
from openai import OpenAI, OpenAIError

WEIGHT = "model.layers.1.self_attn.k_proj.weight"
# Keys of the `leank` block, and what they are changed to; `None` removes the key.
DAMAGES = {
    "format_version": 3,
    "widths": [[0, 13]],
    "channel_masks": ["zz"],
    "head_permutation": [[0, 0, 1, 2]] * 3,
    "sink_size": -1,
    "recent_size": "1024",
    "flush_size": 0,
    "prune": "sometimes",
    "key_mean": "yes",
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


def edit_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        config["leank"][key] = value
        if value is None:
            del config["leank"][key]
    path.write_text(json.dumps(config))


def test_a_malformed_config_is_refused_with_the_runtimes_sentence(checkpoint, tmp_path):
    cases = [*DAMAGES.items(), *((key, None) for key in ("widths", "flush_size"))]
    folders = [shutil.copytree(checkpoint, tmp_path / str(number)) for number in range(len(cases))]
    for folder, (key, value) in zip(folders, cases, strict=True):
        edit_config(folder, **{key: value})
    done = subprocess.run(
        [sys.executable, "-c", READ_CONFIGS, *map(str, folders)],
        env={**os.environ, **ENVIRONMENT, "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    said = json.loads(done.stdout.rpartition("SAID ")[2])
    for (key, _), (runtime, engine) in zip(cases, said, strict=True):
        assert runtime.startswith("config.json: ") and key in runtime
        assert runtime in engine


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("cut off", "SafetensorError"),
        ("missing", f"ValueError: the checkpoint's weights lack `{WEIGHT}`; export it again"),
        (
            "too short",
            f"ValueError: `{WEIGHT}` is of shape [96, 256], dimension 0 should be 128: 4 heads of 32",
        ),
    ],
    ids=["cut off", "missing", "too short"],
)
def test_damaged_weights_end_the_engine_that_loads_them(checkpoint, tmp_path, damage, said):
    folder = shutil.copytree(checkpoint, tmp_path / "damaged")
    shard = folder / "model.safetensors"
    if damage == "cut off":
        shard.write_bytes(shard.read_bytes()[:-1000])
    else:
        weights = load_file(shard)
        weight = weights.pop(WEIGHT)
        if damage == "too short":
            weights[WEIGHT] = weight[:-32].clone()
        save_file(weights, shard, {"format": "pt"})
    assert said in run_engine(folder, fails=True)


def test_a_pool_for_less_than_one_request_is_refused_and_what_is_proposed_is_served(checkpoint):
    """A prompt takes kept and window pages of all its tokens, and so it is counted."""
    memory = {"kv_cache_memory_bytes": 1 << 20, "enable_prefix_caching": False}
    said = run_engine(checkpoint, fails=True, **memory)
    assert "To serve at least one request with the model's max seq len (1024)" in said
    most = int(re.search(r"the estimated maximum model length is (\d+)", said)[1])
    load = {"lengths": (most - 20,) * 2, "new": 20}
    served = run_engine(checkpoint, **load, **memory, max_model_len=most)
    assert served["answers"] == [answers_of(checkpoint, **load)]
    # The second is read as soon as the first has given its window back, if there is room for its kept pages.
    assert served["preemptions"] == [0]


def test_a_killed_worker_ends_the_server_and_its_requests(shipped, tmp_path):
    with serving(shipped, tmp_path / "server.log", tensor_parallel_size=2) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60, max_retries=0) as client:
            stream = client.completions.create(
                model=str(shipped),
                prompt=[5] * 50,
                max_tokens=900,
                extra_body={"ignore_eos": True},
                stream=True,
            )
            next(iter(stream))
            children = psutil.Process(server.process.pid).children(recursive=True)
            next(child for child in children if "Worker" in "".join(child.cmdline())).kill()
            with pytest.raises(OpenAIError):
                list(stream)
        server.process.wait(60)
        _, left = psutil.wait_procs(children, timeout=60)
        assert not left
        assert "EngineDeadError" in server.log.read_text()
