"""Pictures of a finished run: the scaling factors, and where channels were kept."""

from __future__ import annotations

from pathlib import Path

from leank_convert.mask import ChannelMask


def plot_scaling_factors(mask: ChannelMask, path: Path) -> None:
    """Heat map of the scaling factors: a row per layer and head, a column per channel."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if mask.scaling_factors is None:
        raise ValueError("the mask has no scaling factors")
    num_layers, num_heads, head_dim = mask.scaling_factors.shape
    figure = Figure(figsize=(9, min(16, max(3, num_layers * num_heads / 16))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        mask.scaling_factors.reshape(-1, head_dim).numpy(),
        aspect="auto",
        vmin=0,
        vmax=1,
        interpolation="nearest",
    )
    axes.set_yticks(
        [layer * num_heads - 0.5 for layer in range(num_layers)], [str(i) for i in range(num_layers)]
    )
    axes.set(title="Scaling factors", xlabel="channel", ylabel=f"layer ({num_heads} KV heads each)")
    figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=120)


def plot_kept_channels(mask: ChannelMask, path: Path) -> None:
    """Kept channels per layer and head, and the kept fraction of each rotary pair (i, i + D/2)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kept = mask.channel_mask
    num_layers, num_heads, head_dim = kept.shape
    figure = Figure(figsize=(11, max(3, num_layers / 4)), layout="constrained")
    FigureCanvasAgg(figure)
    by_head, by_pair = figure.subplots(1, 2)
    image = by_head.imshow(
        kept.sum(-1).numpy(), aspect="auto", vmin=0, vmax=head_dim, interpolation="nearest", origin="upper"
    )
    by_head.set(title=f"Kept channels of {head_dim}", xlabel="KV head", ylabel="layer")
    by_head.xaxis.get_major_locator().set_params(integer=True)
    by_head.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=by_head)
    half = head_dim // 2
    pairs = kept[..., : 2 * half].reshape(num_layers, num_heads, 2, half).float().mean((0, 1, 2))
    by_pair.bar(range(half), pairs.numpy(), width=1.0)
    by_pair.axhline(1 - mask.pruning_ratio, color="black", linewidth=0.8, linestyle="--")
    by_pair.set(
        title="Kept fraction by rotary pair",
        xlabel="pair (0 turns fastest)",
        ylabel="kept fraction",
        ylim=(0, 1),
    )
    figure.savefig(path, dpi=120)
