"""An analysis as text for a person."""

from __future__ import annotations

from collections.abc import Sequence

from leank_convert.analyze.distribution import MaskAnalysis

_PER_LINE = 8


def render_analysis(facts: Sequence[tuple[str, str]], analysis: MaskAnalysis) -> str:
    """Render an analysis as text.

    Args:
        facts: The analysis in short, as `report.describe` gives it.
        analysis: The analysis.
    """
    size = max(len(name) for name, _ in facts)
    lines = [f"{name:<{size}}  {text}" for name, text in facts]
    named = {outlier.pair for outlier in analysis.outliers}
    lines += ["", "pair  kept (%)" + ("; * marks an outlier" if named else "")]
    for start in range(0, len(analysis.kept_by_pair), _PER_LINE):
        cells = (
            f"{100 * share:>6.1f}{'*' if pair in named else ' '}"
            for pair, share in enumerate(analysis.kept_by_pair[start : start + _PER_LINE], start)
        )
        lines.append(f"{start:>4}  {''.join(cells)}".rstrip())
    digits = max(5, len(str(analysis.head_dim)))
    lines += ["", "layer  kept (%)  width 0  widths by head"]
    for layer, (share, empty, widths) in enumerate(
        zip(analysis.kept_by_layer, analysis.empty_by_layer, analysis.widths, strict=True)
    ):
        cells = (f"{width:>{digits}}" for width in widths)
        lines.append(f"{layer:>5}  {100 * share:>8.1f}  {empty:>7}  {''.join(cells)}")
    return "\n".join(lines) + "\n"
