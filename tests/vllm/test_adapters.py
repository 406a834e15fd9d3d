"""vLLM answers with a converted LoRA adapter as with the original merged, and refuses the original's."""

import pytest

from tests.vllm.conftest import answers_of, ask, run_engines

pytest.importorskip("vllm", reason="bin/test-vllm runs it")

LOAD = {"lengths": (80, 170, 12, 901), "new": 30}


@pytest.fixture(scope="module")
def said(adapted):
    options = {**LOAD, "enable_lora": True, "max_loras": 2}  # vLLM gives those without one the last slot's
    converted, original = str(adapted / "converted"), str(adapted / "original")
    runs = {
        "converted": ask(adapted / "checkpoint", **options, adapters=[converted, None, converted, converted]),
        "original": ask(adapted / "checkpoint", **options, adapters=[original] * 4),
    }
    return run_engines(runs)


def test_requests_with_and_without_an_adapter_in_one_batch(said, adapted):
    plain, merged = (answers_of(adapted / name, **LOAD) for name in ("checkpoint", "merged"))
    assert all(one != other for one, other in zip(plain, merged, strict=True))
    assert said["converted"]["answers"] == [[merged[0], plain[1], *merged[2:]]]


def test_an_adapter_of_the_original_is_refused(said, adapted):
    told = f"adapter `{adapted / 'original'}`: KV heads are in another order, or V in another basis, than in"
    assert told in said["original"]["error"]
    remedy = "convert it by `leank-convert adapter ADAPTER --checkpoint CHECKPOINT -o NEW`, and serve NEW"
    assert remedy in said["original"]["error"]
