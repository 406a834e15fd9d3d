"""README.md of a checkpoint: what was pruned, what that saves, how to load it, how it answers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from leank_convert.architectures import ModelFacts
from leank_convert.errors import LeanKError
from leank_convert.families import Architecture
from leank_convert.head_layout import INT4_GROUP_SIZE, BytesPerToken, describe_layers, plan_head_layout
from leank_convert.held_out import HeldOut
from leank_convert.hub import hide_local_paths
from leank_convert.mask import ChannelMask
from leank_convert.mask_provenance import MaskProvenance, package_versions
from leank_convert.recipe_file import CHANGE, parse_recipe
from leank_convert.release import PROJECT_URL
from leank_convert.windows import Windows

_CARD = """\
---
{front_matter}
---

# {name}, K cache{of_layers} pruned by {ratio:.1%} (LeanK)

{name} with a static choice of which channels of each KV head's cached key are kept, by
[LeanK](https://arxiv.org/abs/{arxiv}). The weights are the original ones with the KV heads of each layer in
another order{folded}. The cache{of_layers} keeps {kept:.1%} of the key
channels{values} of all tokens but the first {sink} and the last {recent}.

Written by {project}{version}. {licence}

| | |
|---|---|
| KV heads that keep no channel (nothing of theirs is cached in the pruned region) | {empty} of {heads} |
| pruning ratio asked / reached | {asked} / {ratio:.4f} |
| widths (kept channels of {head_dim}): heads | {histogram} |
| mask | {method} |
{centred}{values_row}
## Bytes per cached token

| region | tokens | K | V | saved |
|---|---|---|---|---|
| dense model | all | {cache.key_dense:,} | {cache.value_dense:,} | |
| window | first {sink}, last {recent} to {recent_most} | {window} |
| pruned | all between | {cache.key_pruned:,} | {cache.value_pruned:,} | {cache.saved:.1%} |

At {element_bytes} bytes per number, over all {pruned_layers}layers and heads.{stored}{layers}

## Load

It needs transformers 5.10.1 or later and torch 2.7 or later; the files beside the weights do the rest. With
`pip install tilelang` NVIDIA GPUs from Ampere on decode by kernels. On a CPU say `dtype="float32"`: few have
fast bfloat16.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "path/to/this/checkpoint"
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", device_map="auto", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(path, config=model.config)
count = {notes}  # of sentences, more than the window holds
notes = " ".join(f"Room {{i}} has the code {{i * 7919 % 10000}}." for i in range(count))
{ask}
answer = model.generate(**inputs.to(model.device), max_new_tokens=20)
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :]))
```

{stock} loads the same weights as the original dense model.

vLLM serves the checkpoint where leank-convert is installed with its extra `vllm`:
`vllm serve path/to/this/checkpoint`.

## Limits

- Prompts of up to {window_tokens:,} tokens save nothing: the first {sink} and the last {recent} keep all
  channels.
- Prompts are read densely, so the first token takes as long as with the dense model.
- Static and offloaded caches are refused, and so is transformers' continuous batching.
{images}{adapters}
## Accuracy

{accuracy}{tried}
{recipe}
## Citation

```bibtex
@misc{{zhang2025leank,
  title = {{LeanK: Learnable K Cache Channel Pruning for Efficient Decoding}},
  author = {{Yike Zhang and Zhiyuan He and Huiqiang Jiang and Chengruidong Zhang and Yuqing Yang and
    Jianyong Wang and Lili Qiu}},
  year = {{2025}},
  eprint = {{{arxiv}}},
  archivePrefix = {{arXiv}}
}}
```
"""

_ARXIV = "2508.02215"
_ASK = """\
inputs = tokenizer(f"{notes} Room 7 has the code", return_tensors="pt")"""
_ASK_IN_CHAT = """\
chat = [{"role": "user", "content": f"{notes} What is the code of room 7?"}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)"""
_TOKENS_OF_NOTE = 8  # at least; most tokenizers make 11 to 14 of one
_NO_LICENCE = "The source names no licence: that of the original holds."

_ADAPTERS = """
## Adapters

{moved} than in {name}, so an adapter (LoRA) of it does not fit. Convert it for
this checkpoint: `leank-convert adapter LORA --checkpoint path/to/this/checkpoint -o NEW`.
`model.load_adapter` refuses one that was not converted; PEFT's own
`PeftModel.from_pretrained(model, adapter)` does not, nor does the stock class, and the answers would be wrong
without a warning.
"""

_FOLDED = """\
 and V in another basis, folded into `v_proj` and `o_proj`, which changes what the
model computes by the rounding of these weights alone"""
_VALUES_ROW = """\
| V of pruned tokens | {ratio:.1%} removed{asked}: heads keep what weighs most in attention's output |
"""
_MEASURED = """\
When the mask was made, {held_out.num_answers} questions on {held_out.num_contexts} held-out contexts of
{held_out.min_length} to {held_out.max_length} tokens were answered greedily ({tasks}; seed {held_out.seed}):

| | dense model | pruned |
|---|---|---|
{tokens}| whole answers, right in every token | {held_out.dense:.1%} | {held_out.pruned:.1%} |

So few samples find what is broken, not what is lost: measure on your own task."""
_IN_OWN_DTYPE = """\
With the cache in the model's own dtype, for in {kv_dtype} nothing was measured when this checkpoint
was written:

"""
_TRIED_APART = """\
With the cache in the model's own dtype; what rounding it to {kv_dtype} costs is told below:

"""
_TOKENS = """\
| {tokens.count} answer tokens, each given those before it | {tokens.dense:.1%} | {tokens.pruned:.1%} |
"""
_NOT_MEASURED = "Not measured when this checkpoint was written."
_OF_ANOTHER = "The mask was made for {model}, and is not evaluated on this model."
_OF_NAMED = """\
Not measured when this checkpoint was written. The mask was made for {model}, as which this model's
config.json names it; evaluated: {evaluated}."""

_IMAGES = "- It reads no images: it is the text model of a larger one, whose `model_type` is {whole}.\n"

_RECIPE = """
## Recipe

{fence}yaml
{text}
{fence}
"""


def build_model_card(
    name: str,
    mask: ChannelMask,
    known: MaskProvenance,
    facts: ModelFacts,
    windows: Windows,
    cache: BytesPerToken,
    *,
    element_bytes: int,
    leank: Mapping[str, Any] = MappingProxyType({}),
    noted_name: str | None = None,
    base_model: str | None = None,
    licence: Mapping[str, str] | None = None,
    tried: str | None = None,
    chats: bool = False,
    whole: str | None = None,
) -> str:
    """Build a checkpoint's README.md.

    Args:
        name: The model's hub id or folder name.
        mask: The mask that was exported.
        known: Its provenance.
        facts: The model's facts.
        windows: Window sizes.
        cache: Bytes per token.
        element_bytes: Bytes of one number in the dense cache.
        leank: The checkpoint's `leank` block, which says what the cache is stored in.
        noted_name: What the model's config.json calls it, if it may be that.
        base_model: The model's hub id, if it is known.
        licence: `license`, `license_name` and `license_link` of the model, those that are known.
        tried: What came of the trial of a cache of a dtype of its own, a sentence without its full stop.
        chats: Whether the model has a chat template.
        whole: The `model_type` of the larger model whose text model it is, if it is one.
    """
    held_out = known.held_out
    # Of another model or other windows it says nothing about this checkpoint.
    if (known.model, known.sink_size, known.recent_size) != (name, windows.sink_size, windows.recent_size):
        held_out = None
    kv_dtype = leank.get("kv_dtype")
    in_own_dtype = _IN_OWN_DTYPE if tried is None else _TRIED_APART
    title, mask_model = escaped((base_model or name).rpartition("/")[2]), escaped(known.model)
    heads = sorted(width for layer in mask.widths for width in layer)
    most_whole = windows.sink_size + windows.recent_size
    orders = plan_head_layout(mask.widths).head_permutation
    moved = []
    if any(sorted(order) != list(order) for order in orders):
        moved.append("KV heads are in another order")
    if mask.value_basis is not None:
        moved.append("V is in another basis")
    return _CARD.format(
        front_matter=_build_front_matter(title, base_model, licence or {}, None if kv_dtype else held_out),
        name=title,
        arxiv=_ARXIV,
        project=f"[leank-convert]({PROJECT_URL}) " if PROJECT_URL else "leank-convert ",
        version=package_versions()["leank-convert"],
        licence=_describe_licence(licence or {}),
        notes=-(-most_whole // _TOKENS_OF_NOTE) + 100,
        ask=_ASK_IN_CHAT if chats else _ASK,
        window_tokens=most_whole,
        ratio=mask.pruning_ratio,
        kept=1 - mask.pruning_ratio,
        sink=windows.sink_size,
        recent=windows.recent_size,
        recent_most=windows.recent_size + windows.flush_size,
        empty=heads.count(0),
        heads=len(heads),
        asked="not known" if known.pruning_ratio_asked is None else known.pruning_ratio_asked,
        head_dim=facts.head_dim,
        histogram=", ".join(f"{width}: {heads.count(width)}" for width in dict.fromkeys(heads)),
        method=f"`{escaped(known.method)}`, made for {mask_model}{_describe_origin(known)}",
        centred=_describe_key_mean(mask, known),
        **_describe_values(mask, known),
        cache=cache,
        **_describe_stored(leank, cache),
        **_describe_layers(facts, cache, windows, element_bytes),
        element_bytes=element_bytes,
        stock=_describe_stock(facts.architecture),
        images=_IMAGES.format(whole=escaped(whole)) if whole else "",
        adapters=_ADAPTERS.format(name=title, moved=" and ".join(moved)) if moved else "",
        accuracy=(in_own_dtype.format(kv_dtype=kv_dtype) if kv_dtype and held_out else "")
        + _describe_accuracy(held_out, known, name, noted_name),
        tried="" if tried is None else f"\n\nRounding alone, with the same channels pruned: {tried}.",
        recipe=_describe_recipe(known) if known.recipe else "",
    )


def _describe_key_mean(mask: ChannelMask, known: MaskProvenance) -> str:
    """A row of the table, of a mask that centres keys."""
    if mask.key_mean is None:
        return ""
    tokens = known.key_mean_tokens
    measured = "" if tokens is None else f" over {tokens:,} tokens"
    return f"| cached keys | less a constant, their mean{measured}: a removed channel counts as its mean |\n"


def _describe_values(mask: ChannelMask, known: MaskProvenance) -> dict[str, str]:
    """What the card says of V, where the mask prunes it."""
    if mask.value_widths is None:
        return {"folded": ", which changes nothing the model computes", "values": "", "values_row": ""}
    ratio, asked = mask.value_pruning_ratio, known.value_pruning_ratio_asked
    told = "" if asked is None else f" (asked: {asked:g})"
    return {
        "folded": _FOLDED,
        "values": f" and {1 - ratio:.1%} of V",
        "values_row": _VALUES_ROW.format(ratio=ratio, asked=told),
    }


def _describe_stock(family: Architecture) -> str:
    """How the stock class loads the checkpoint."""
    if not family.experts:
        return f"`{family.causal_lm_class}.from_pretrained(path)`"
    # By the name in config.json transformers does not find how experts lie in files, and makes new ones up.
    return (
        f'After `config = {family.config_class}.from_pretrained(path)` and `config.model_type = "'
        f'{family.model_type}"`, `{family.causal_lm_class}.from_pretrained(path, config=config)`'
    )


def _describe_stored(leank: Mapping[str, Any], cache: BytesPerToken) -> dict[str, Any]:
    """What the table says of the window, and of what the pruned cache is stored in."""
    kv_dtype, scales = leank.get("kv_dtype"), leank.get("kv_scales")
    share = (cache.key_window + cache.value_window) / (cache.key_dense + cache.value_dense)
    stored = ""
    if kv_dtype:
        origin = f"measured on {scales['num_tokens']:,} tokens" if scales else "that every prompt gives"
        how = f"scales per channel {origin}"
        if kv_dtype == "int4":
            how = f"a least number and a step for every {INT4_GROUP_SIZE} of a token"
        stored = f" Window and pruned region are stored in {kv_dtype}, with {how}."
    return {
        "window": f"{cache.key_window:,} | {cache.value_window:,} | {1 - share:.0%}",
        "stored": stored,
    }


def _describe_layers(
    facts: ModelFacts, cache: BytesPerToken, windows: Windows, element_bytes: int
) -> dict[str, str]:
    """What the card says of layers that are not pruned, if there are some."""
    if not facts.is_mixed:
        return {"of_layers": "", "pruned_layers": "", "layers": ""}
    sentence = describe_layers(facts, cache, windows, element_bytes)
    return {
        "of_layers": f" of {len(facts.layers)} of {facts.num_hidden_layers} layers",
        "pruned_layers": "pruned ",
        "layers": f"\n\nThis checkpoint {sentence}. The other layers keep the cache that they have in the "
        f"dense model{f', at most {facts.window:,} tokens of a row' if facts.window else ''}.",
    }


def _build_front_matter(
    name: str, base_model: str | None, licence: Mapping[str, str], held_out: HeldOut | None
) -> str:
    """Metadata as the hub takes it.

    No `base_model_relation` is named: `finetune` would say that weights were trained, `quantized` that they
    have fewer bits, and neither is so.
    """
    # Imported here: an import of the toolkit need not wait for it.
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    if held_out is not None:
        tokens = held_out.tokens  # None of a mask that was made before they were counted
        measured, count, metric_type, metric_name = (
            (held_out, held_out.num_answers, "exact_match", "exact match")
            if tokens is None
            else (tokens, tokens.count, "accuracy", "token accuracy")
        )
        results = [
            EvalResult(
                task_type="text-generation",
                dataset_type="leank-held-out",
                dataset_name=f"Held-out samples of the mask's recipe: {', '.join(held_out.tasks)}; "
                f"{held_out.min_length} to {held_out.max_length} tokens; seed {held_out.seed}; "
                f"n = {count}",
                metric_type=metric_type,
                metric_name=f"{metric_name}, {variant}",
                metric_value=round(share, 4),
            )
            for variant, share in (("pruned cache", measured.pruned), ("dense cache", measured.dense))
        ]
    card = ModelCardData(
        base_model=base_model,
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["leank", "kv-cache", "pruning", f"arxiv:{_ARXIV}"],
        model_name=name if results else None,
        eval_results=results or None,
    )
    return card.to_yaml()


def _describe_origin(known: MaskProvenance) -> str:
    made_by = f" by {escaped(known.made_by)}" if known.made_by else ""
    return made_by + (f" ({escaped(known.source)})" if known.source else "")


def _describe_accuracy(
    held_out: HeldOut | None, known: MaskProvenance, name: str, noted_name: str | None
) -> str:
    if name != known.model:
        of_others = _OF_NAMED if noted_name == known.model else _OF_ANOTHER
        return of_others.format(model=escaped(known.model), evaluated=escaped(known.evaluated))
    if held_out is None:
        evaluation = f" The mask was evaluated {escaped(known.evaluation)}." if known.evaluation else ""
        return _NOT_MEASURED + evaluation
    tokens = "" if held_out.tokens is None else _TOKENS.format(tokens=held_out.tokens)
    measured = _MEASURED.format(held_out=held_out, tokens=tokens, tasks=escaped(", ".join(held_out.tasks)))
    return measured + "".join(f"\n\n> **Warning:** {escaped(text)}" for text in held_out.warnings)


def _describe_licence(licence: Mapping[str, str]) -> str:
    named = licence.get("license_name") or licence.get("license")
    return f"Licence of the original: {escaped(named)}." if named else _NO_LICENCE


def _describe_recipe(known: MaskProvenance) -> str:
    """The recipe that ran, every key spelt out, with this mask's ratio; as it is where it cannot be read."""
    recipe = known.recipe or ""
    changes = [line.removeprefix(CHANGE) for line in recipe.splitlines() if line.startswith(CHANGE)]
    if known.pruning_ratio_asked is not None:
        changes.append(f"pruning_ratio={known.pruning_ratio_asked}")
    with contextlib.suppress(LeanKError):
        recipe = parse_recipe("recipe", recipe, changes).to_yaml()
    text = hide_local_paths(recipe.rstrip("\n"))
    longest = max(map(len, re.findall("`+", text)), default=0)
    return _RECIPE.format(text=text, fence="`" * max(3, longest + 1))


def escaped(text: str) -> str:
    """Return a text in one line, in which Markdown finds no table, tag, link, image or code."""
    line = " ".join(text.split())
    escaped_line = re.sub(r"([\\|`\[\]])", r"\\\1", "".join(c for c in line if c.isprintable()))
    return escaped_line.replace("<", "&lt;")  # not every Markdown knows a backslash before it
