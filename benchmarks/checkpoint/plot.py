"""Draws cost against size, beside the report, where matplotlib is there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Curves = Mapping[str, Mapping[int, float]]  # by case, seconds by bytes


def draw(path: Path, panels: Mapping[str, Curves]) -> str:
    """Writes one panel for each title as SVG; returns what to say of it."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no plot: `pip install matplotlib`"
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    for index, (title, curves) in enumerate(panels.items()):
        axes = figure.add_subplot(1, len(panels), index + 1)
        for name, points in curves.items():
            is_ours, is_floor = name.startswith("residency"), name.startswith("floor")
            axes.plot(
                [size / 2**30 for size in sorted(points)],
                [points[size] for size in sorted(points)],
                label=name,
                marker="o",
                linewidth=2.5 if is_ours else 1.2,
                linestyle=":" if is_floor else "-",
                color="black" if is_floor else None,
            )
        axes.set_title(title)
        axes.set_xlabel("state, GiB")
        axes.set_ylabel("seconds")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path)
    return f"plot: {path.name}"
