"""README.md of a checkpoint: what was pruned, what that saves, how to load it, how it answers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, StrictUndefined

from leank_convert._runtime.layout_leank import INT4_GROUP_SIZE
from leank_convert.architectures import ModelFacts
from leank_convert.errors import LeanKError
from leank_convert.export.source_card import Source
from leank_convert.head_layout import count_cache_bytes, describe_layers, plan_head_layout
from leank_convert.hub import hide_local_paths
from leank_convert.leank_block import VALUE_BASIS_KEY
from leank_convert.mask import ChannelMask
from leank_convert.mask_provenance import MaskProvenance, package_versions
from leank_convert.recipe_file import CHANGE, parse_recipe
from leank_convert.release import PROJECT_URL
from leank_convert.windows import Windows

_CARD = """\
---
{{ front_matter }}
---

# {{ name }}, K cache{{ of_layers }} pruned by {{ mask.pruning_ratio|percent }} (LeanK)

{{ name }} with a static choice of which channels of each KV head's cached key are kept, by
[LeanK](https://arxiv.org/abs/2508.02215). The weights are the original ones
{%- if moved %}; {{ moved|join(" and ") }}
{%- if folds_values %}, folded into `v_proj` and `o_proj`, which changes what the model computes by the
rounding of these weights alone
{%- else %}, which changes nothing the model computes
{%- endif %}{% endif %}. The cache{{ of_layers }} keeps {{ (1 - mask.pruning_ratio)|percent }} of the key
channels
{%- if prunes_values %} and {{ (1 - mask.value_pruning_ratio)|percent }} of V{% endif %} of all tokens but \
the first {{ sink }} and the last {{ recent }}.

Written by {% if project_url %}[leank-convert]({{ project_url }}) {% else %}leank-convert {% endif %}
{{- version }}. {% if licence_name %}Licence of the original: {{ licence_name|md }}.
{%- else %}The source names no licence: that of the original holds.{% endif %}


| | |
|---|---|
| KV heads that keep no channel (nothing of theirs is cached in the pruned region) | {{ heads.count(0) }} of \
{{ heads|length }} |
| pruning ratio asked / reached | {{ "not known" if known.pruning_ratio_asked is none else \
known.pruning_ratio_asked }} / {{ "%.4f"|format(mask.pruning_ratio) }} |
| widths (kept channels of {{ facts.head_dim }}): heads | {{ histogram }} |
| mask | `{{ known.method|md }}`, made for {{ known.model|md }}
{%- if known.made_by %} by {{ known.made_by|md }}{% endif %}
{%- if known.source %} ({{ known.source|md }}){% endif %} |
{% if mask.key_mean is not none %}
| cached keys | less a constant, their mean
{%- if known.key_mean_tokens is not none %} over {{ known.key_mean_tokens|count }} tokens{% endif %}: a \
removed channel counts as its mean |
{% endif %}
{% if prunes_values %}
| V of pruned tokens | {{ mask.value_pruning_ratio|percent }} removed
{%- if known.value_pruning_ratio_asked is not none %} (asked: \
{{ "%g"|format(known.value_pruning_ratio_asked) }})
{%- endif %}: heads keep what weighs most in attention's output
{%- if not folds_values %}, in a basis that V is rotated into as it is cached, as weights cannot hold it
{%- endif %} |
{% endif %}

## Bytes per cached token

| region | tokens | K | V | saved |
|---|---|---|---|---|
| dense model | all | {{ cache.key_dense|count }} | {{ cache.value_dense|count }} | |
| window | first {{ sink }}, last {{ recent }} to {{ recent + windows.flush_size }} | \
{{ cache.key_window|count }} | {{ cache.value_window|count }} | {{ window_saved }} |
| pruned | all between | {{ cache.key_pruned|count }} | {{ cache.value_pruned|count }} | \
{{ cache.saved|percent }} |

At {{ element_bytes }} bytes per number, over all {{ "pruned " if facts.is_mixed }}layers and heads.
{%- if kv_dtype %} Window and pruned region are stored in {{ kv_dtype }}, with
{%- if kv_dtype == "int4" %} a least number and a step for every {{ int4_group_size }} of a token
{%- else %} scales, of K per head and of V per channel,
{%- if scales %} measured on {{ scales.num_tokens|count }} tokens{% else %} that every prompt gives{% endif %}
{%- endif %}.{% endif %}
{% if facts.is_mixed %}


This checkpoint {{ layers }}. The other layers keep the cache that they have in the dense model
{%- if facts.window %}, at most {{ facts.window|count }} tokens of a row{% endif %}.{% endif %}


## Load

It needs transformers 5.10.1 or later and torch 2.7 or later; the files beside the weights do the rest.
{%- if kv_dtype == "int4" %} No kernels serve an int4 cache: plain torch decodes from it.
{%- else %} With `pip install tilelang` NVIDIA GPUs from Ampere on decode by kernels.{% endif %}
 On a CPU say `dtype="float32"`: few have fast bfloat16.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "path/to/this/checkpoint"
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", device_map="auto", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(path, config=model.config)
count = {{ num_notes }}  # of sentences, more than the window holds
notes = " ".join(f"Room {i} has the code {i * 7919 % 10000}." for i in range(count))
{% if source.chats %}
chat = [{"role": "user", "content": f"{notes} What is the code of room 7?"}]
inputs = tokenizer.apply_chat_template(
    chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
)
{% else %}
inputs = tokenizer(f"{notes} Room 7 has the code", return_tensors="pt")
{% endif %}
answer = model.generate(**inputs.to(model.device), max_new_tokens=20)
print(tokenizer.decode(answer[0, inputs["input_ids"].shape[1] :]))
```

{# By the name in config.json transformers does not find how experts lie in files, and makes new ones up. -#}
{% if family.experts -%}
After `config = {{ family.config_class }}.from_pretrained(path)` and `config.model_type = \
"{{ family.model_type }}"`, `{{ family.causal_lm_class }}.from_pretrained(path, config=config)`
{%- else -%}
`{{ family.causal_lm_class }}.from_pretrained(path)`
{%- endif %} loads the same weights as the original dense model.

vLLM serves the checkpoint where leank-convert is installed with its extra `vllm`:
`vllm serve path/to/this/checkpoint{{ vllm_option }}`.

## Limits

- Of prompts of up to {{ (sink + recent)|count }} tokens no channel is dropped.
- Prompts are read densely, so the first token takes as long as with the dense model.
- Static and offloaded caches are refused, and so is transformers' continuous batching.
{% if source.whole %}
- It reads no images: it is the text model of a larger one, whose `model_type` is {{ source.whole|md }}.
{% endif %}
{% if moved %}

## Adapters

{{ moved|join(" and ") }} than in {{ name }}, so an adapter (LoRA) of it does not fit. Convert it for
this checkpoint: `leank-convert adapter LORA --checkpoint path/to/this/checkpoint -o NEW`.
`model.load_adapter` refuses one that was not converted; PEFT's own
`PeftModel.from_pretrained(model, adapter)` does not, nor does the stock class, and the answers would be wrong
without a warning.
{% endif %}

## Accuracy

{% if kv_dtype and held_out %}
{% if tried %}
With the cache in the model's own dtype; what rounding it to {{ kv_dtype }} costs is told below:
{% else %}
With the cache in the model's own dtype, for in {{ kv_dtype }} nothing was measured when this checkpoint
was written:
{% endif %}

{% endif %}
{% set is_other = source.name != known.model %}
{% if is_other and source.noted_name == known.model -%}
Not measured when this checkpoint was written. The mask was made for {{ known.model|md }}, as which this
model's config.json names it; evaluated: {{ known.evaluated|md }}.
{%- elif is_other -%}
The mask was made for {{ known.model|md }}, and is not evaluated on this model.
{%- elif not held_out -%}
Not measured when this checkpoint was written.
{%- if known.evaluation %} The mask was evaluated {{ known.evaluation|md }}.{% endif %}
{% else -%}
When the mask was made, {{ held_out.num_answers }} questions on {{ held_out.num_contexts }} held-out contexts
of {{ held_out.min_length }} to {{ held_out.max_length }} tokens were answered greedily (\
{{ held_out.tasks|join(", ")|md }}; seed {{ held_out.seed }}):

| | dense model | pruned |
|---|---|---|
| {{ held_out.tokens.count }} answer tokens, each given those before it | \
{{ held_out.tokens.dense|percent }} | {{ held_out.tokens.pruned|percent }} |
| whole answers, right in every token | {{ held_out.dense|percent }} | {{ held_out.pruned|percent }} |

So few samples find what is broken, not what is lost: measure on your own task.
{%- for warning in held_out.warnings %}


> **Warning:** {{ warning|md }}
{%- endfor %}
{% endif %}
{% if tried %}


Rounding alone, with the same channels pruned: {{ tried }}.
{%- endif %}

{% if recipe %}

## Recipe

{{ fence }}yaml
{{ recipe }}
{{ fence }}
{% endif %}

## Citation

```bibtex
@misc{zhang2025leank,
  title = {LeanK: Learnable K Cache Channel Pruning for Efficient Decoding},
  author = {Yike Zhang and Zhiyuan He and Huiqiang Jiang and Chengruidong Zhang and Yuqing Yang and
    Jianyong Wang and Lili Qiu},
  year = {2025},
  eprint = {2508.02215},
  archivePrefix = {arXiv}
}
```
"""
_TOKENS_OF_NOTE = 8  # at least; most tokenizers make 11 to 14 of one


def build_model_card(
    source: Source,
    mask: ChannelMask,
    facts: ModelFacts,
    windows: Windows,
    *,
    element_bytes: int,
    leank: Mapping[str, Any] = MappingProxyType({}),
    tried: str | None = None,
) -> str:
    """Build a checkpoint's README.md, by a mask with provenance.

    `tried`, a sentence without its full stop, is what came of the trial of a cache of a dtype of its own.
    """
    # Imported here: an import of the toolkit need not wait for it.
    from huggingface_hub import ModelCardData

    known = mask.provenance
    assert known is not None
    licence: Mapping[str, Any] = source.licence
    # No `base_model_relation`: `finetune` would say that weights were trained, `quantized` that they have
    # fewer bits, and neither is so.
    front_matter = ModelCardData(
        base_model=source.base_model,
        **licence,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["leank", "kv-cache", "pruning", "arxiv:2508.02215"],
    )
    kv_dtype = leank.get("kv_dtype")
    cache = count_cache_bytes(mask.widths, facts.head_dim, element_bytes, kv_dtype, mask.stored_values)
    made_for = known.model, known.sink_size, known.recent_size
    is_of_this = made_for == (source.name, windows.sink_size, windows.recent_size)
    heads = sorted(width for layer in mask.widths for width in layer)
    moved = []
    if any(sorted(order) != list(order) for order in plan_head_layout(mask.widths).head_permutation):
        moved.append("KV heads are in another order")
    folds_values = mask.value_basis is not None and VALUE_BASIS_KEY not in leank
    if folds_values:
        moved.append("V is in another basis")
    window_share = (cache.key_window + cache.value_window) / (cache.key_dense + cache.value_dense)
    recipe = _describe_recipe(known)
    plain = "float16" if facts.dtype == "float16" else "bfloat16"
    is_served = kv_dtype is None or (leank.get("kv_scales") is not None and not facts.is_mixed)
    environment = Environment(trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    environment.filters |= {"md": escaped, "percent": "{:.1%}".format, "count": "{:,}".format}
    return environment.from_string(_CARD).render(
        front_matter=front_matter.to_yaml(),
        source=source,
        name=escaped((source.base_model or source.name).rpartition("/")[2]),
        mask=mask,
        known=known,
        facts=facts,
        family=facts.architecture,
        windows=windows,
        sink=windows.sink_size,
        recent=windows.recent_size,
        cache=cache,
        element_bytes=element_bytes,
        window_saved=f"{1 - window_share:.0%}",
        kv_dtype=kv_dtype,
        # vLLM's pages hold FP8 by measured scales, which layers that are not pruned lack.
        vllm_option="" if is_served else f" --kv-cache-dtype {plain}",
        scales=leank.get("kv_scales"),
        int4_group_size=INT4_GROUP_SIZE,
        project_url=PROJECT_URL,
        version=package_versions()["leank-convert"],
        licence_name=licence.get("license_name") or licence.get("license"),
        num_notes=-(-(windows.sink_size + windows.recent_size) // _TOKENS_OF_NOTE) + 100,
        heads=heads,
        histogram=", ".join(f"{width}: {heads.count(width)}" for width in dict.fromkeys(heads)),
        prunes_values=mask.value_widths is not None,
        folds_values=folds_values,
        of_layers=f" of {len(facts.layers)} of {facts.num_hidden_layers} layers" if facts.is_mixed else "",
        layers=describe_layers(facts, cache, windows, element_bytes) if facts.is_mixed else "",
        moved=moved,
        held_out=known.held_out if is_of_this else None,
        tried=tried,
        recipe=recipe,
        fence="`" * max(3, max(map(len, re.findall("`+", recipe)), default=0) + 1),
    )


def _describe_recipe(known: MaskProvenance) -> str:
    """The recipe that ran, every key spelt out, with this mask's ratio; as it is where it cannot be read."""
    recipe = known.recipe or ""
    changes = [line.removeprefix(CHANGE) for line in recipe.splitlines() if line.startswith(CHANGE)]
    if known.pruning_ratio_asked is not None:
        changes.append(f"pruning_ratio={known.pruning_ratio_asked}")
    with contextlib.suppress(LeanKError):
        recipe = parse_recipe("recipe", recipe, changes).to_yaml() if recipe else ""
    return hide_local_paths(recipe.rstrip("\n"))


def escaped(text: str) -> str:
    """Return a text in one line, in which Markdown finds no table, tag, link, image or code."""
    line = " ".join(text.split())
    escaped_line = re.sub(r"([\\|`\[\]])", r"\\\1", "".join(c for c in line if c.isprintable()))
    return escaped_line.replace("<", "&lt;")  # not every Markdown knows a backslash before it
