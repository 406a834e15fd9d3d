"""README.md of a checkpoint: what was pruned, what that saves, how to load it."""

from __future__ import annotations

from leank_convert.architectures import ModelFacts
from leank_convert.head_layout import BytesPerToken
from leank_convert.mask import ChannelMask, MaskProvenance
from leank_convert.windows import Windows

_CARD = """\
---
{front_matter}
---

# {name}, K cache pruned by {ratio:.1%} (LeanK)

{name} with a static choice of which channels of each KV head's cached key are kept. The weights are
the original ones with the KV heads of each layer in another order, which changes nothing the model computes;
the cache keeps {kept:.1%} of the key channels of all tokens but the first {sink} and the last {recent}.

| | |
|---|---|
| KV heads that keep no channel (nothing of theirs is cached in the pruned region) | {empty} of {heads} |
| pruning ratio asked / reached | {asked} / {ratio:.4f} |
| widths (kept channels of {head_dim}): heads | {histogram} |
| mask | {method} |

## Bytes per cached token

| region | tokens | K | V | saved |
|---|---|---|---|---|
| dense model | all | {cache.key_dense:,} | {cache.value_dense:,} | |
| window | first {sink}, last {recent} to {recent_most} | {cache.key_dense:,} | {cache.value_dense:,} | 0% |
| pruned | all between | {cache.key_pruned:,} | {cache.value_pruned:,} | {cache.saved:.1%} |

At {element_bytes} bytes per number, over all layers and heads.

## Load

It needs `transformers` and `torch`; the files beside the weights do the rest.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "path/to/this/checkpoint"
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(path, config=model.config)
inputs = tokenizer("The capital of France is", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20)[0]))
```

`{causal_lm_class}.from_pretrained(path)` loads the same weights as the original dense model.

## Accuracy

Not measured when this checkpoint was written.
{recipe}"""

_RECIPE = """
## Recipe

```yaml
{text}
```
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
) -> str:
    """Build a checkpoint's README.md.

    Args:
        name: The model's hub id or folder name.
        mask: The mask that was exported.
        known: Its provenance.
        facts: The model's facts.
        windows: Window sizes.
        cache: Bytes per token.
        element_bytes: Bytes of one number in the cache.
    """
    front_matter = ["library_name: transformers", "pipeline_tag: text-generation"]
    if name.count("/") == 1:
        front_matter.insert(0, f"base_model: {name}")
    front_matter += ["tags:", "- leank", "- kv-cache", "- pruning"]
    heads = sorted(width for layer in mask.widths for width in layer)
    return _CARD.format(
        front_matter="\n".join(front_matter),
        name=name,
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
        method=f"`{known.method}`, made for {known.model}",
        cache=cache,
        element_bytes=element_bytes,
        causal_lm_class=facts.architecture.causal_lm_class,
        recipe=_RECIPE.format(text=known.recipe.rstrip("\n")) if known.recipe else "",
    )
