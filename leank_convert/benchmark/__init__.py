"""How fast a pruned cache decodes and how little it holds, and what training costs, beside dense peers.

Measured beside its peers in one process, decoding through a checkpoint's own runtime files, on random
weights or random keys and values of a real model's shape. A figure is reported only after what was timed has
been checked against a reference.

The JSON document, format_version 1. Units are in the names; a GB/s is 1e9 bytes a second; a ratio above 1
says that ours is faster, or that more rows of ours fit; null stands where nothing was measured:

    benchmark, command, environment, subject    what was run, on what, for which mask and windows
    ok          every result of ours passed its check; the command exits 1 if false
    kernel      `compiled kernel`, or `plain torch`, whose figures are not the kernel's
    check       ‖result - exact‖ / ‖exact‖ as `error`, torch's own as `torch_error`, `tolerance` times which
                is allowed (in `kernel` one for each peer and layer)

    kernel      read_bandwidth: GB/s of each way of reading; shares are of the fastest
                cases[]: peers{} and layers[] with the same figures: `milliseconds` of one call (median of
                `rounds` measurements of `calls` calls by `method`; `spread` is half the quartiles'
                distance over the median), `bytes` that have to be read once, `copies` of the inputs taking
                turns, `beyond_l2` whether they outgrow it. Then the mean over layers; `byte_ratio` is the
                ceiling, `ratio_to_best` ours against the fastest peer
    generate    cases[].sides{}: `step_milliseconds` inside `generate`, `loop_step_milliseconds` of forward
                pass and argmax, `replay_milliseconds` of that step's CUDA graph, whole calls
                (`generate_seconds`, `tokens_per_second`), `graph` how ours was run, `compiled_graphs` of
                the static cache's step; `ratios` of each peer
    memory      allocated (bytes by region and per token), prefill (peaks beyond the weights),
                largest_batch[]: `batch` that was decoded, all that was `tried`, `predicted_by_bytes`
    train       check.cases[]: errors of gradient and loss, `torch_error` is full sequences', `window_effect`
                step: `seconds` of prefills alone and of steps[], each with its ratios to them
                peer[]: our step against `full_sequence`'s by SDPA backend, at each length that was tried
                memory: steps[].`peak_bytes`, `ratio` to weights and K/V, which may be `limit_ratio`
                schedule[]: `seconds` of steps at `lengths`; by their mean, `schedule_seconds` of all
                scale: alone, under torchrun; `samples_per_second` of all processes and of one
    onnx        `layers` that were measured; read_bandwidth of the host's memory, by torch
                cases[].attention and .step: `checks` of both sides' logits, `milliseconds` and
                `cpu_milliseconds` of dense and leank, `ratio` and `cpu_ratio` of them, `byte_ratio` of all
                that a step reads; `cache_bytes`, `cache_share` of the dense cache
                whole_mask: that share for all layers, its `limit` in long contexts, and the length from
                which the percentage next to it is reached
"""
