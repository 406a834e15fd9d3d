"""README.md of an exported folder: what is in it and how to run it."""

from __future__ import annotations

from leank_convert.export.model_card import escaped
from leank_convert.head_layout import BYTES_PER_ELEMENT, count_cache_bytes
from leank_convert.onnx.libraries import FIRST_ONNXRUNTIME, OPSET
from leank_convert.onnx.pruned_model import PrunedModel
from leank_convert.onnx.quantize import OPERATOR, SCHEMES

_README = """\
# {name}: K cache pruned by {ratio:.1%}{values} (LeanK), as an ONNX graph

`model.onnx` (opset {opset}, {dtype}; weights in `model.onnx.data`) decodes with a cache that keeps
{kept:.1%} of the key channels{kept_values} of all tokens but the first {sink} and the last
{recent}. It needs no PyTorch.
{quantized}
## Run

```
pip install numpy 'onnxruntime>={onnxruntime}' tokenizers
python leank_onnx.py . "The capital of France is"
```

```python
from leank_onnx import LeanKOnnx

model = LeanKOnnx(".")
(answer,) = model.generate(["The capital of France is"], max_new_tokens=20)
print(model.decode(answer))
```

A chat template, where the model has one, needs `jinja2` too. `generate` takes batches, temperature, top-p
and a streamer; `model.start()` gives a session that takes further turns.

## Other languages

`leank_onnx.json` describes every input and output: the graph is a function of the new tokens and of buffers
that the host owns, and it returns the new tokens' keys and values alone, which the host writes into its
buffers. In `leank_onnx_cache.py` the class `Cache` does that.

- All rows are stored without padding; `past_lengths` and `pruned_lengths` count each row's own tokens.
- Window: token t lies in slot t if t < {sink}, else in slot {sink} + (t - {sink}) mod {ring}: {slots} slots.
  Those that no token has reached may be left out, but not so that {sink} are there: the graph divides by
  the difference. While a prompt is read there are as many as it is long, or more, and slot t holds token t.
- After the prompt the row is split: the first {sink} and the last {recent} of its tokens stay in the window,
  those between go to the pruned buffers in order, the first `width` lanes of a key and {stored_values}.
- A token is appended to a window that holds {ring} tokens behind the sink: its oldest {flush} first move to
  the pruned buffers, and `pruned_lengths` grows by {flush}. For a single new token that is done before the
  graph runs; of several new tokens, all are attended to before the first is appended.
- Buffers start as zeros: what a slot without a token holds is multiplied by 0.

## Bytes per cached token, over all layers and heads

| region | tokens | K | V | saved |
|---|---|---|---|---|
| dense model | all | {cache.key_dense:,} | {cache.value_dense:,} | |
| window | first {sink}, last {recent} to {ring} | {cache.key_dense:,} | {cache.value_dense:,} | 0% |
| pruned | all between | {cache.key_pruned:,} | {cache.value_pruned:,} | {cache.saved:.1%} |
"""

_QUANTIZED = """
Weights are {weights} ({operator}, blocks of {block_size}), the embedding and the cache {dtype}. On random
tokens and a random cache logits are {difference:.1%} of their norm away from the unquantized model's.
"""


def build_readme(pruned: PrunedModel, *, weights: str | None = None, difference: float | None = None) -> str:
    """Build the README.md of a folder; `difference` of quantized weights is what `check_graph` returned."""
    quantized = ""
    if weights is not None and difference is not None:
        quantized = _QUANTIZED.format(
            weights=weights,
            operator=OPERATOR,
            block_size=SCHEMES[weights].block_size,
            dtype=pruned.dtype,
            difference=difference,
        )
    head_dim, size = pruned.channel_masks.shape[-1], BYTES_PER_ELEMENT[pruned.dtype]
    cache = count_cache_bytes(pruned.widths, head_dim, size, value_widths=pruned.value_widths)
    removed, values = cache.removed
    is_whole = pruned.value_widths is None
    windows = pruned.windows
    return _README.format(
        name=escaped(pruned.name),
        opset=OPSET,
        onnxruntime=FIRST_ONNXRUNTIME,
        dtype=pruned.dtype,
        quantized=quantized,
        ratio=removed,
        values="" if is_whole else f", V by {values:.1%}",
        kept=1 - removed,
        kept_values="" if is_whole else f", and {1 - values:.1%} of the value channels,",
        stored_values="the whole value"
        if is_whole
        else "the first `value_width` channels\n  of a value, which has no buffer where that is 0",
        sink=windows.sink_size,
        recent=windows.recent_size,
        flush=windows.flush_size,
        ring=windows.recent_size + windows.flush_size,
        slots=windows.total,
        cache=cache,
    )
