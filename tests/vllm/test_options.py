"""What a LeanK checkpoint cannot be served with is refused in one sentence that names it."""

from types import SimpleNamespace

import pytest
import torch

from leank_convert._runtime.windows_leank import Windows
from leank_convert.vllm import configs, refusals
from leank_convert.vllm.refusals import check_options, choose_cache_dtype

FLASH = SimpleNamespace(name="FLASH_ATTN")
LEANK, CACHE, DTYPE = "model_config__hf_config__leank", "cache_config__cache_dtype", "model_config__dtype"
MODEL_TYPE, LAYER_TYPES = (f"model_config__hf_config__{key}" for key in ("model_type", "layer_types"))
NO_HYBRID = "scheduler_config__disable_hybrid_kv_cache_manager"
STAGES = "parallel_config__pipeline_parallel_size"
OWN_SIZE, PARSER = "cache_config__user_specified_block_size", "structured_outputs_config__reasoning_parser"
KINDS, FORMAT = "attention_config__backend_per_kind", "load_config__load_format"
STORAGE = "model_config__model_weights"
DRAFTS, TRANSFER, WEIGHTS = "speculative_config", "kv_transfer_config", "weight_transfer_config"
SOME = {"layers": [1]}  # one layer is not pruned
NGRAM = SimpleNamespace(method="ngram", num_speculative_tokens=31)


def options(**changes):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            block_size=16,
            **dict.fromkeys(("kv_sharing_fast_prefill", "user_specified_block_size"), False),
        ),
        parallel_config=SimpleNamespace(
            use_ubatching=False,
            **dict.fromkeys(("world_size", "tensor_parallel_size", "pipeline_parallel_size"), 1),
            **dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), 1),
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(backend=None, backend_per_kind={}),
        structured_outputs_config=SimpleNamespace(reasoning_parser=""),
        model_config=SimpleNamespace(
            dtype=torch.bfloat16,
            attention_chunk_size=None,
            model_weights="",
            hf_config=SimpleNamespace(leank={}),
        ),
        device_config=SimpleNamespace(device_type="cuda"),
        load_config=SimpleNamespace(load_format="auto"),
        **dict.fromkeys((DRAFTS, TRANSFER, WEIGHTS, "lora_config", "quant_config")),
    )
    for path, value in changes.items():
        *parents, name = path.split("__")
        target = config
        for parent in parents:
            target = getattr(target, parent)
        setattr(target, name, value)
    return config


def drafts(config_class=SimpleNamespace):
    """Of a model with a config of such a class, whose keys nothing reads."""
    model = SimpleNamespace(hf_config=config_class.__new__(config_class))
    draft = {"draft_model_config": model, "num_speculative_tokens": 3}
    return SimpleNamespace(method="draft_model", model="small", **draft)


def transfer(kv_connector="NixlConnector", kv_role="kv_consumer", **extra):
    """From another engine."""
    return SimpleNamespace(kv_connector=kv_connector, kv_role=kv_role, get_from_extra_config=extra.get)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({CACHE: "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
        ({CACHE: "fp8"}, "`leank-convert export --kv-dtype fp8`"),
        ({LEANK: {"kv_dtype": "fp8", "kv_scales": None}}, "needs measured scales"),
        ({LEANK: {"kv_dtype": "int4"}}, "cache is int4, which `generate` alone"),
        ({MODEL_TYPE: "leank_glm4", DTYPE: torch.float16}, "models of this family overflow in it"),
        ({LEANK: {"kv_dtype": "int4"}, DTYPE: torch.float16}, "add --kv-cache-dtype float16, "),
        ({LEANK: {"kv_dtype": "fp8"}, DTYPE: torch.float16}, "add --kv-cache-dtype float16"),
        ({FORMAT: "sharded_state", LEANK: {"key_mean": True}}, "sharded_state: such files lack the mean of"),
        ({STORAGE: "s3://a/b", LEANK: {"key_mean": True}}, "model s3://a/b: vLLM fetches no mean of keys"),
        ({"cache_config__kv_cache_dtype_skip_layers": ["0"]}, "--kv-cache-dtype-skip-layers"),
        ({WEIGHTS: SimpleNamespace(backend="nccl")}, "--weight-transfer-config"),
        ({"cache_config__kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({NO_HYBRID: True}, "--disable-hybrid-kv-cache-manager"),
        ({"parallel_config__decode_context_parallel_size": 2}, "--decode-context-parallel-size 2"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2"),
        ({"cache_config__block_size": 24, OWN_SIZE: True}, "--block-size 24"),
        ({CACHE: "int4_per_token_head"}, "--kv-cache-dtype int4_per_token_head"),
        ({"parallel_config__use_ubatching": True}, "--enable-dbo"),
        # vLLM turns the hybrid manager off by itself for some connectors.
        ({TRANSFER: transfer(kv_connector="OffloadingConnector"), NO_HYBRID: True}, "--kv-offloading-size"),
        ({TRANSFER: transfer(kv_role="kv_both")}, "`kv_role` is kv_both"),
        ({TRANSFER: transfer(bidirectional_kv_xfer=True)}, "`bidirectional_kv_xfer`"),
        ({TRANSFER: transfer(), "parallel_config__world_size": 2}, "with 2 ranks"),
        ({TRANSFER: transfer(), DRAFTS: drafts()}, "with drafts of a model"),
        ({"attention_config__backend": FLASH}, "--attention-backend FLASH_ATTN"),
        ({KINDS: {"full_attention": FLASH}}, "full_attention=FLASH_ATTN: another cache; leave it out"),
        ({PARSER: "openai_gptoss"}, "--reasoning-parser openai_gptoss"),
        ({DRAFTS: SimpleNamespace(method="medusa", num_speculative_tokens=3)}, "`medusa`"),
        ({DRAFTS: SimpleNamespace(method="ngram", num_speculative_tokens=32)}, "32 draft tokens"),
        ({DRAFTS: drafts(configs.CONFIG_CLASSES[0])}, "speculative model `small`: what drafts keeps"),
        ({DRAFTS: NGRAM, LAYER_TYPES: ["linear_attention"]}, "drafts beside linear attention"),
        ({DRAFTS: drafts(), LEANK: SOME}, "`draft_model` beside layers that are not"),
        ({TRANSFER: transfer(), LEANK: SOME}, "--kv-transfer-config beside layers not pruned"),
        ({"model_config__attention_chunk_size": 8192}, "`attention_chunk_size`"),
        (
            {LEANK: {"layers": [1], "kv_dtype": "fp8", "kv_scales": {}}},
            "beside layers that are not pruned, for which there are no scales: add --kv-cache-dtype bfloat16",
        ),
        ({LEANK: SOME, STAGES: 2}, "--pipeline-parallel-size 2: a stage may have no layer that is pruned"),
        ({DRAFTS: drafts(), STAGES: 2}, "--pipeline-parallel-size 2: only the last stage has the model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_supported_is_named(changes, named):
    with pytest.raises(ValueError, match=r"^a LeanK checkpoint cannot be served so: ") as error:
        check_options(options(**changes))
    assert named in str(error.value) and "\n" not in str(error.value)


def test_what_is_supported_passes():
    check_options(options())
    check_options(options(speculative_config=NGRAM, parallel_config__pipeline_parallel_size=2))
    check_options(options(speculative_config=drafts()))
    check_options(options(kv_transfer_config=transfer()))
    check_options(options(load_config__load_format="sharded_state"))
    check_options(options(**{STORAGE: "s3://a/b"}))
    check_options(options(attention_config__backend_per_kind={"sliding_window": FLASH}))
    unscaled = {LEANK: {"kv_dtype": "fp8", "kv_scales": None}}
    check_options(options(**unscaled, cache_config__cache_dtype="bfloat16"))
    check_options(options(parallel_config__tensor_parallel_size=4, cache_config__cache_dtype="bfloat16"))


@pytest.mark.parametrize(
    ("asked", "kept"), [("auto", "fp8"), ("fp8_e4m3", "fp8_e4m3"), ("bfloat16", "bfloat16")]
)
def test_a_checkpoint_with_scales_is_served_by_them_unless_another_dtype_is_asked_for(asked, kept):
    scaled = {"kv_dtype": "fp8", "kv_scales": {"num_tokens": 4096}}
    config = options(model_config__hf_config__leank=scaled, cache_config__cache_dtype=asked)
    check_options(config)
    assert choose_cache_dtype(config) == kept


def test_kernels_that_cannot_be_compiled_are_refused_on_a_gpu(monkeypatch):
    monkeypatch.setattr(refusals, "version_of", lambda package: "0.1.12")
    with pytest.raises(ValueError, match=r"tilelang 0\.1\.12 cannot compile the kernels: pip install"):
        check_options(options())
    check_options(options(device_config__device_type="cpu"))
    for found in ("0.1.15", "0.2.0", "0.1.16+cuda", None):
        monkeypatch.setattr(refusals, "version_of", lambda package, found=found: found)
        check_options(options())


@pytest.mark.parametrize("found", ["0.31.2", "0.34.0", "1.0", None])
def test_another_release_of_vllm_is_refused(found, monkeypatch):
    monkeypatch.setattr(configs, "installed_version", lambda: found)
    with pytest.raises(ValueError, match=f"vLLM {found} is installed.*0.32.x and 0.33.x.*pip install"):
        configs.check_version()
    for tested in ("0.32.0", "0.33.0", "0.33.1+cu129"):
        monkeypatch.setattr(configs, "installed_version", lambda tested=tested: tested)
        configs.check_version()


@pytest.fixture
def class_of(monkeypatch):
    """The class of a family's configs, as a tried release of vLLM finds it."""
    monkeypatch.setattr(configs, "installed_version", lambda: "0.33.0")
    return {found.__name__: found for found in configs.CONFIG_CLASSES}.get


SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
BLOCK = {"format_version": 1, **Windows(0, 0, 1).sizes, "prune": "eager"}
ROWS = {"widths": [[16, 16]], "channel_masks": ["f" * 8], "head_permutation": [[0, 1]]}
ONE, TWO = {**BLOCK, **ROWS, "layers": [0]}, {**BLOCK, **{key: rows * 2 for key, rows in ROWS.items()}}


@pytest.mark.parametrize(
    ("name", "keys", "told"),
    [
        ("Ernie4_5", {"use_bias": True, "leank": TWO}, r"config\.json: `use_bias` is true, and vLLM's model"),
        (
            "Qwen2",
            {"use_sliding_window": True, "max_window_layers": 1, "leank": ONE},
            r"`leank\.layers` names the layers that are pruned, and vLLM's",
        ),
    ],
    ids=["biases", "layers that are not pruned"],
)
def test_what_vllms_model_of_a_family_lacks_is_refused_not_run_densely(name, keys, told, class_of):
    config = class_of(f"LeanK{name}Config")
    assert config().leank is None  # as transformers builds it to save a difference
    with pytest.raises(ValueError, match=told):
        config(**SIZES, **keys)


def test_experts_in_mxfp4_are_named_as_vllm_names_those_of_the_family(class_of):
    config = class_of("LeanKGptOssConfig")(quantization_config={"quant_method": "mxfp4"})
    assert config.quantization_config == {"quant_method": "gpt_oss_mxfp4"}
    config.quantization_config = {"quant_method": "mxfp4"}  # as vLLM does, from the file
    assert config.quantization_config == {"quant_method": "gpt_oss_mxfp4"}
