"""Runs of vLLM's engine in a process of their own: `python engine.py JSON` prints a line of JSON for each.

The argument is a list of runs: `options` of `LLM`, `prompts` as token ids, `new` tokens of each, whether
`scores` are to say how likely these were, and `rounds`: how many of them are answered at once, time after
time; null is all. `adapters` among the options is the folder of each prompt's LoRA adapter, null without
one. With `fused` decode steps are, and plain torch stands for kernels. `transfers` say for each prompt which
pages move, and `then` is a run in another process, which takes them over. Counters go on from round to round.
Of a run that fails the error is said, and the next one begins.
"""

import faulthandler
import functools
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.router import cpu_router
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.executor import multiproc_executor
from vllm.v1.kv_cache_layout import KVCacheLayout

from leank_convert.vllm import fused_step, layers, ranks
from tests.runtime.stand_ins import PlainKernels

# It reads blocks wherever they begin, but names one layout. Attention on GPUs takes both.
CPUAttentionBackend.supported_kv_cache_layouts = lambda: (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
# Once is enough for the process, and a second time it stumbles over modules that came in between.
current_platform.register_triton_kernel_overrides = functools.cache(
    current_platform.register_triton_kernel_overrides
)
# Models of texts and images import what PyPI has for GPUs alone, and need none of it for texts.
sys.modules["torchvision.transforms.v2"] = MagicMock()
# CPUs choose among experts that sigmoids score in groups alone: one group is none.
_compute_routing = cpu_router.CPURouter._compute_routing


def _in_one_group(self, *given, **options):
    if self.scoring_func == "sigmoid" and not self.use_grouped_topk:
        self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1
    return _compute_routing(self, *given, **options)


cpu_router.CPURouter._compute_routing = _in_one_group
# vLLM looks at each class of models in a process of its own, for GPUs' sake, and starts a rank anew: it would
# load for ten seconds each time.
registry._run_in_subprocess = lambda look: look()
multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
# A port of this process, which neither the system gives a connection meanwhile nor `bin/benchmark answers` a
# server: engines wait forever for one in use.
os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(25_000 + os.getpid() % 7_500)
# What is loaded by now stays: engines look through it eight times each, for longer than they are built.
gc.collect()
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None


def count_running(scheduler):
    """Have the scheduler note how many requests run after each of its steps."""
    running, schedule = [0], scheduler.schedule

    def noted(*args, **options):
        output = schedule(*args, **options)
        running.append(len(scheduler.running))
        return output

    scheduler.schedule = noted
    return running


class Kernels(PlainKernels):
    """Stand for a GPU's, and note how many requests each layer of a fused step has."""

    key = SimpleNamespace(load_tokens=16)

    def __init__(self, noted, **shape):
        super().__init__(**shape)
        self.noted = noted

    def rope_append(self, projected, *given):
        self.noted.write(bytes([len(projected)]))
        return super().rope_append(projected, *given)


class RankKernels(Kernels):
    """Stand for those of one of several ranks."""

    def __init__(self, all_reduce):
        self.all_reduce = all_reduce

    def add_norm(self, hidden, delta, *given):
        return super().add_norm(hidden, delta if delta is None else self.all_reduce(delta), *given)


@contextmanager
def kernels_stand_in(noted):
    """Let kernels that are not there serve."""
    # Products of CPUs keep weights in a layout of their own, and drop those that a fused step reads.
    pack = functools.partial(utils.dispatch_cpu_unquantized_gemm, remove_weight=False)
    with (
        patch.object(fused_step, "is_hopper", lambda device: True),
        patch.object(layers, "find_kernels", lambda *_, **shape: Kernels(noted, **shape)),
        patch.object(ranks, "find_rank_kernels", lambda _, all_reduce: RankKernels(all_reduce)),
        patch.object(utils, "dispatch_cpu_unquantized_gemm", lambda layer, **_: pack(layer)),
    ):
        yield


def run(asked, noted):
    """Answer the prompts and say what it took."""
    folders = asked["options"].pop("adapters", [None] * len(asked["prompts"]))
    adapters = [folder and LoRARequest(folder, 1 + folders.index(folder), folder) for folder in folders]
    llm = LLM(enforce_eager=True, disable_log_stats=False, **asked["options"])
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    running = count_running(scheduler)
    transfers = asked.get("transfers", [None] * len(asked["prompts"]))
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=asked["new"],
            logprobs=0 if asked["scores"] else None,
            ignore_eos=True,
            detokenize=False,
            extra_args=transfer and {"kv_transfer_params": transfer},
        )
        for transfer in transfers
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
    said = {"answers": [], "cached": [], "running": [], "preemptions": [], "scores": []}
    for count in asked["rounds"]:
        outputs = llm.generate(
            prompts[:count], sampling[:count], use_tqdm=False, lora_request=adapters[:count]
        )
        said["answers"].append([list(output.outputs[0].token_ids) for output in outputs])
        if asked["scores"]:
            steps = [output.outputs[0].logprobs for output in outputs]
            said["scores"].append([[next(iter(step.values())).logprob for step in own] for own in steps])
        said["cached"].append([output.num_cached_tokens for output in outputs])
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        counters = {name: metric.value for name, metric in metrics.items() if hasattr(metric, "value")}
        said["preemptions"].append(counters["vllm:num_preemptions"] - sum(said["preemptions"]))
        said["running"].append(max(running))
        running[:] = [0]
    said["asked"] = asked["rounds"]
    said["pulled"] = counters.get("vllm:external_prefix_cache_hits", 0)
    said["moved"] = sum(
        metric.sum for name, metric in metrics.items() if name == "vllm:nixl_bytes_transferred"
    )
    said["fused"] = [*os.pread(noted.fileno(), 1 << 20, 0)]
    said["accepted"] = counters.get("vllm:spec_decode_num_accepted_tokens", 0)
    said["blocks"] = scheduler.kv_cache_config.num_blocks
    said["groups"] = [
        [type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size]
        for group in scheduler.kv_cache_config.kv_cache_groups
    ]
    said["page_bytes"] = scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    say(said)
    if "then" in asked:
        following = {**asked["then"], "transfers": [output.kv_transfer_params for output in outputs]}
        subprocess.run([sys.executable, __file__, json.dumps([following])], check=True)


def say(said):
    """Print a line, wherever another library has left the cursor."""
    print("\nSAID", json.dumps(said), flush=True)  # noqa: T201


def main() -> None:
    """Run one engine after the other."""
    for asked in json.loads(sys.argv[1]):
        faulthandler.dump_traceback_later(300, exit=True)  # before who waits for this process gives up
        try:
            with (
                tempfile.TemporaryFile(buffering=0) as noted,  # ranks write to it, too
                kernels_stand_in(noted) if asked.get("fused") else nullcontext(),
            ):
                run(asked, noted)
        except Exception:
            say({"error": traceback.format_exc()})
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
