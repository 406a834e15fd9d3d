"""Models of random weights to measure, ours and the stock one, and a mask on a real model's shape."""

from __future__ import annotations

import copy
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from bin.benchmarks.decode_attention import EXACT, judge, relative_error
from bin.benchmarks.geometries import Geometry, find_geometry
from bin.benchmarks.measuring import release_memory
from bin.benchmarks.tables import Report
from leank_convert._runtime.configuration_leank import CACHE
from leank_convert._runtime.fp8_leank import FP8, key_scale_of, scale_of
from leank_convert.checkpoint_io import CONFIG_NAME
from leank_convert.errors import LeanKError
from leank_convert.export.config_json import build_config, build_leank_facts, encode_json
from leank_convert.head_layout import BYTES_PER_ELEMENT, HeadLayout, choose_value_multiple, plan_head_layout
from leank_convert.kv_scales import describe_cache
from leank_convert.mask import ChannelMask, load_mask, resolve_mask
from leank_convert.mask_provenance import MaskProvenance
from leank_convert.mask_tensor import in_checkpoint_order
from leank_convert.testbed import MODEL_DIR
from leank_convert.warmup import find_kernels
from leank_convert.windows import Windows

OURS, DENSE = "leank", "dense"  # among the names of sides
COMPILED, PLAIN_TORCH = "compiled kernel", "plain torch"
TOO_LARGE = "this benchmark", "take a smaller batch, or fewer tokens"

# Heads' widths as a learned mask of 70% has them, in quarters of a head: 0.3125 of all channels.
_SYNTHETIC_QUARTERS = (0, 1, 1, 2, 1, 2, 1, 2)
_TOKENIZER_NAME = "tokenizer.json"
_CHECKED_ROWS = 2
_CHECKED_STEPS = 12  # enough for a step that runs eagerly, one that is captured, and some that are replayed
_CHECKED_PRUNED_TOKENS = 256
_CPU = torch.device("cpu")
_FIRST_TOKEN = 3  # the ids before it are special in most vocabularies


@dataclass(frozen=True)
class Setup:
    """What is measured, and where: a mask in the original head order, its origin, and a shape that it fits.

    `dtype` is that of weights, keys and values, `kv_dtype` that of our caches where it is another one.
    """

    geometry: Geometry
    mask: ChannelMask
    origin: str
    windows: Windows
    device: torch.device
    dtype: torch.dtype
    kv_dtype: str | None = None

    @property
    def stored_bytes(self) -> int:
        """Bytes of one number in our caches."""
        return BYTES_PER_ELEMENT[self.kv_dtype or self.dtype_name]

    @property
    def is_toy(self) -> bool:
        """Whether this is a test of the command, on the CPU."""
        return self.device.type == "cpu"

    @property
    def dtype_name(self) -> str:
        """As options and the document name it."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def layout(self) -> HeadLayout:
        """The order of the heads in a checkpoint."""
        return plan_head_layout(self.mask.widths)

    @property
    def channel_masks(self) -> list[Tensor]:
        """Kept channels of every layer `[H_kv, D]`, heads in the checkpoint's order."""
        return [*in_checkpoint_order(self.mask.channel_mask, self.layout.head_permutation)]

    @property
    def value_widths(self) -> Sequence[list[int] | None]:
        """Kept channels of V of every layer's heads in the checkpoint's order; None where V is whole."""
        widths, layout = self.mask.value_widths, self.layout
        if widths is None:
            return [None] * len(layout.widths)
        return [layer.tolist() for layer in in_checkpoint_order(widths, layout.head_permutation)]

    def take_layers(self, layers: Sequence[int]) -> Setup:
        """The same with some of the layers; of the mask their channels of K alone."""
        config = {**self.geometry.config, "num_hidden_layers": len(layers)}
        mask = ChannelMask(self.mask.channel_mask[list(layers)])
        return replace(self, mask=mask, geometry=replace(self.geometry, config=config))

    def keeping_all(self) -> Setup:
        """The same with a mask that keeps all channels."""
        mask = ChannelMask(torch.ones_like(self.mask.channel_mask))
        return replace(self, mask=mask, origin="all channels")

    def describe(self, *, masked: bool = True) -> dict[str, Any]:
        """JSON-ready facts."""
        keys = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
        shape = {key: getattr(self.geometry.facts, key) for key in keys}
        ratios = {name: getattr(self.mask, name) for name in ("pruning_ratio", "value_pruning_ratio")}
        mask = {"mask": self.origin, **ratios} if masked else {}
        stored = {"kv_dtype": self.kv_dtype} if self.kv_dtype else {}
        return {"geometry": self.geometry.name, **shape, **mask, **self.windows.sizes, **stored}


def choose_setup(
    mask: str | None,
    geometry: str | None,
    device: torch.device = _CPU,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    values: float | None = None,
) -> Setup:
    """Put together what to measure.

    The mask is a file, a folder that holds one, or a hub id; None for a synthetic one. The geometry is a key
    of `GEOMETRIES`; None for the one that the mask fits. `values` is the part of V that heads which see
    pruned tokens keep of these; None for what the mask says. LeanKError if they do not go together.
    """
    if mask is None:
        shape = find_geometry(geometry, None)
        made, origin = synthetic_mask(shape), "synthetic (widths as learned)"
    else:
        made = load_mask(resolve_mask(mask))
        shape, origin = find_geometry(geometry, tuple(made.channel_mask.shape)), Path(mask).name
    if values is not None:
        made = _prune_values(made, values, origin)
    known: Any = made.provenance or shape.windows  # those that the mask was learned with
    sizes = Windows(known.sink_size, known.recent_size, known.flush_size)
    return Setup(shape, made, origin, sizes, device, getattr(torch, dtype), kv_dtype)


def _prune_values(mask: ChannelMask, part: float, origin: str) -> ChannelMask:
    """Let heads keep this part of V as nearly as their multiples allow, in the basis that random V has."""
    if mask.value_widths is not None:
        raise LeanKError(f"mask `{origin}` prunes V already: leave out `--values`")
    head_dim, sees = mask.channel_mask.shape[-1], mask.channel_mask.any(-1)
    multiple = choose_value_multiple(head_dim)
    ends = multiple * (part * head_dim / multiple * sees.cumsum(1) + 1e-6).int()
    basis = torch.eye(head_dim).expand(*mask.channel_mask.shape, head_dim)
    return replace(mask, value_basis=basis, value_widths=ends.diff(prepend=ends.new_zeros(len(ends), 1)))


def synthetic_mask(geometry: Geometry) -> ChannelMask:
    """Make a mask whose widths are spread as in a learned one and whose channels are random."""
    facts = geometry.facts
    layers, heads, channels = facts.mask_shape
    # Shifted by layer, so that layers differ as they do in a learned mask.
    places = (torch.arange(heads) + 3 * torch.arange(layers)[:, None]) % len(_SYNTHETIC_QUARTERS)
    widths = torch.tensor(_SYNTHETIC_QUARTERS)[places] * channels // 4
    order = torch.rand(facts.mask_shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    return ChannelMask(order < widths[..., None])


def build_model(setup: Setup, device: torch.device | None = None) -> Any:
    """A LeanK model of random weights, of the runtime's classes and a config as a checkpoint has it.

    Its weights are made on `device`, None for the setup's, none on `meta`.
    """
    from leank_convert._runtime import configuration_leank, modeling_leank

    architecture = setup.geometry.facts.architecture
    config = getattr(configuration_leank, f"LeanK{architecture.config_class}")(**_leank_config(setup))
    with torch.device(device or setup.device):
        model = getattr(modeling_leank, f"LeanK{architecture.causal_lm_class}")._from_config(
            config, dtype=setup.dtype
        )
    if setup.mask.key_mean is not None:
        pairs = zip(setup.mask.key_mean.float(), setup.layout.head_permutation, strict=True)
        model.key_means = [mean[list(order)][None] for mean, order in pairs]
    return model.eval()


def write_folder(setup: Setup, folder: Path) -> None:
    """Write what an engine that makes up its weights reads: a LeanK config, a tokenizer that knows each id.

    For one that it does not know vLLM decodes the whole prompt again, and is slower than the model.
    """
    config = _leank_config(setup)
    if setup.kv_dtype:  # an engine that makes up weights takes ones for scales
        config["leank"]["kv_scales"] = {"num_tokens": 0, "tasks": [], "seed": 0}
    tokenizer = json.loads((MODEL_DIR / _TOKENIZER_NAME).read_text())
    words = tokenizer["model"]["vocab"]
    config["vocab_size"] = max(config["vocab_size"], len(words))
    words |= {f"word{token_id}": token_id for token_id in range(len(words), config["vocab_size"])}
    (folder / CONFIG_NAME).write_bytes(encode_json(config))
    (folder / _TOKENIZER_NAME).write_bytes(encode_json(tokenizer))
    copyfile(MODEL_DIR / "tokenizer_config.json", folder / "tokenizer_config.json")


def _leank_config(setup: Setup) -> dict[str, Any]:
    facts = setup.geometry.facts
    known = setup.mask.provenance or MaskProvenance.for_model(
        setup.geometry.model_id, facts, method="benchmark", **setup.windows.sizes
    )
    cache = describe_cache(setup.kv_dtype, None)
    leank = build_leank_facts(setup.mask, known, setup.layout, setup.windows, {}, cache)
    return build_config({**setup.geometry.config, "dtype": setup.dtype_name}, facts.architecture, leank, {})


def name_attention(model: Any, setup: Setup) -> str:
    """What decode attention runs in: figures of plain torch must not pass for the kernel's."""
    return PLAIN_TORCH if find_kernels(model, setup.device, setup.dtype) is None else COMPILED


def build_stock(
    geometry: Geometry,
    device: str | torch.device,
    dtype: torch.dtype,
    attention: str = "sdpa",
    **changes: Any,
) -> Any:
    """The stock class with random weights, made on a device, none on `meta`.

    `attention` is transformers' name for how it attends; `changes` are keys of its config.
    """
    config = AutoConfig.for_model(**{**geometry.config, **changes})
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype, attn_implementation=attention
        )
    return model.eval().requires_grad_(False)


def build_dense(model: Any, geometry: Geometry, attention: str = "sdpa") -> Any:
    """The stock class over the very tensors of a LeanK or stock model; random weights need no reordering."""
    return _share_weights(model, build_stock(geometry, "meta", model.dtype, attention))


def build_own(model: Any, setup: Setup) -> Any:
    """Our model of another mask or cache dtype, over the very tensors of a LeanK model."""
    return _share_weights(model, build_model(setup, torch.device("meta")))


def _share_weights(model: Any, other: Any) -> Any:
    """Give a model on the meta device the parameters of another one of its shape."""
    # The very parameters: where one model moves its weights together, those of the others move along.
    other.load_state_dict(model.state_dict(keep_vars=True), assign=True)
    # Its buffers are no weights, so the meta device left them empty.
    other.model.rotary_emb = model.model.rotary_emb
    empty = [name for name, tensor in (*other.named_parameters(), *other.named_buffers()) if tensor.is_meta]
    assert not empty, empty
    return other.eval().requires_grad_(False)


def random_prompt(model: Any, batch_size: int, num_tokens: int, seed: int = 0) -> Tensor:
    """Random token ids of a model's vocabulary `[B, S]`, on its device."""
    generator = torch.Generator().manual_seed(seed)
    shape = batch_size, num_tokens
    ids = torch.randint(_FIRST_TOKEN, model.config.vocab_size, shape, generator=generator)
    return ids.to(model.device)


@dataclass(frozen=True)
class LogitsTruth:
    """Tokens `[B, S]`, exact logits of the last ones, and the dense model's own error in its dtype."""

    tokens: Tensor
    logits: Tensor
    torch_error: float

    def check(self, model: Any) -> dict[str, Any]:
        """Hold a model's decoding to this, with whatever cache it has."""
        return judge(relative_error(forced_logits(model, self.tokens), self.logits), self.torch_error)


@dataclass(frozen=True)
class Models:
    """Our model and the stock one on the same random weights, what ours decodes in, how right it is.

    `sides` are what is ours, `truths` what all sides are held to, by their names.
    """

    sides: Mapping[str, Setup]
    ours: Any
    dense: Any
    attention: str
    check: dict[str, Any]
    truths: Mapping[str, LogitsTruth]

    @property
    def facts(self) -> dict[str, Any]:
        """What a document says of them."""
        check, dtype = self.check, self.sides[OURS].dtype_name
        return {"ok": check["ok"], "dtype": dtype, "kernel": self.attention, "check": check}


@contextmanager
def checked_models(sides: Mapping[str, Setup], prompt_length: int, report: Report) -> Iterator[Models]:
    """Build both models, hold decoding to the same weights in higher precision, and say how close it is.

    The exact logits are those of the plain torch path, for all `sides` of ours; torch's own error is the
    dense model's, with an FP8 cache where ours is one. An error far below `pruning_effect`, how far exact
    pruned logits are from exact dense ones, shows that the right tokens and channels were seen. What runs
    inside runs without gradients.

    The checked prompt has at most `prompt_length` tokens.
    """
    setup = sides[OURS]
    with torch.no_grad():
        torch.manual_seed(0)
        ours = build_model(setup)
        dense = build_dense(ours, setup.geometry)
        attention = name_attention(ours, setup)
        least = sum(setup.windows.sizes.values()) + _CHECKED_PRUNED_TOKENS
        tokens = random_prompt(ours, _CHECKED_ROWS, min(prompt_length, least) + _CHECKED_STEPS, seed=1)
        exact = copy.deepcopy(ours).to(EXACT[setup.dtype])
        exact_dense = build_dense(exact, setup.geometry)
        true = {kv: _dense_logits(exact_dense, tokens, kv) for kv in {None, setup.kv_dtype}}
        errors = {kv: relative_error(_dense_logits(dense, tokens, kv), true[kv]) for kv in true}
        truths = {
            name: LogitsTruth(
                tokens,
                # With all channels it is the stock model, which shares no code with ours.
                true[side.kv_dtype]
                if side.mask.channel_mask.all()
                else _exact_logits(build_own(exact, side), tokens),
                errors[side.kv_dtype],
            )
            for name, side in sides.items()
        }
        truths[DENSE] = LogitsTruth(tokens, true[None], errors[None])
        effect = relative_error(truths[OURS].logits, true[setup.kv_dtype])
        check = {**truths[OURS].check(ours), "pruning_effect": effect}
        del exact, exact_dense
        release_memory(setup.device)
        report.line(f"our decode attention: {attention}")
        error, own = (check[key] or math.nan for key in ("error", "torch_error"))
        report.line(
            f"error of logits {error:.1e}, of dense decoding {own:.1e}, effect of pruning {effect:.1e}: "
            f"{'as close as dense' if check['ok'] else 'WRONG, nothing is measured'}"
        )
        yield Models(sides, ours, dense, attention, check, truths)


def _dense_logits(model: Any, tokens: Tensor, kv_dtype: str | None) -> Tensor:
    """`forced_logits` of a stock model, which rounds its cache if there is a dtype of ours."""
    cache = None
    if kv_dtype:
        cache = Cache(layers=[_RoundedLayer() for _ in model.model.layers])  # type: ignore[no-untyped-call]
    return forced_logits(model, tokens, cache)


class _RoundedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a layer `[B, H_kv, S, D]`, each a multiple of its channel's scale, in e4m3.

    Numbers that differ in their last bit are rounded apart, so whoever decodes from an FP8 cache is further
    from the same in higher precision than without one: how far, a dense model with this shows. Scales, and
    the mean that comes off keys before, are those of a row's prompt, which attends unrounded.
    """

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append tokens `[B, H_kv, S, D]`; return all there are."""
        is_prompt = not self.is_initialized
        if is_prompt:
            self.mean = key_states.mean(2, dtype=torch.float32)[:, :, None]
            largest_key = (key_states - self.mean).abs().amax(2)
            self.scales = key_scale_of(largest_key), scale_of(value_states.abs().amax(2))
        key_scale, value_scale = (scale[:, :, None] for scale in self.scales)
        centred = (key_states - self.mean).to(key_states.dtype)
        stored = _round_to_fp8(centred, key_scale), _round_to_fp8(value_states, value_scale)
        held: tuple[Tensor, Tensor] = super().update(*stored, *args, **kwargs)
        return (key_states, value_states) if is_prompt else held


def _round_to_fp8(states: Tensor, scale: Tensor) -> Tensor:
    """What an FP8 cache gives back; not the runtime's code, whose faults would raise what is tolerated."""
    largest = torch.finfo(FP8).max
    return ((states.float() / scale).clamp(-largest, largest).to(FP8).float() * scale).to(states.dtype)


def _exact_logits(exact: Any, tokens: Tensor) -> Tensor:
    """`forced_logits` of our model in higher precision; that kernels do not serve it is no news here."""
    logging.disable(logging.WARNING)
    try:
        return forced_logits(exact, tokens)
    finally:
        logging.disable(logging.NOTSET)


def forced_logits(model: Any, tokens: Tensor, cache: Any = None) -> Tensor:
    """Logits of the prompt's last token and of every step, `[B, 1 + steps, vocabulary]`, tokens given.

    The cache is an empty one; None for the model's own.
    """
    prompt = tokens.shape[1] - _CHECKED_STEPS
    output = model(tokens[:, :prompt], use_cache=True, logits_to_keep=1, **{CACHE: cache})
    logits = [output.logits]
    for column in range(prompt, tokens.shape[1]):
        output = model(tokens[:, column : column + 1], use_cache=True, **{CACHE: output[CACHE]})
        logits.append(output.logits)
    return torch.cat(logits, dim=1)
