"""Figures: the only door to matplotlib. Colours by Okabe and Ito, which colour-blind readers can tell apart."""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fusedmlp.config import BENCH_ARMS

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILION, PURPLE, BLACK = "#0072B2", "#D55E00", "#CC79A7", "#000000"
GREY = "#888888"
DPI = 150

Rows = list[dict[str, Any]]

_ARM_COLOURS = dict(zip(BENCH_ARMS, [VERMILION, BLACK, BLUE, SKY, GREEN, GREY, PURPLE, ORANGE, YELLOW], strict=True))


def _figure(panels: int, width: float, height: float, columns: int = 2) -> tuple[Figure, list[Axes]]:
    columns = min(columns, panels) or 1
    lines = -(-panels // columns) or 1
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
    for unused in axes[panels:]:
        unused.set_axis_off()
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=DPI)


def _label_ends(ax: Axes, ends: dict[str, tuple[float, float, str]]) -> None:
    """Write names beside the last points (x, y, colour), moved apart where they would overlap."""
    low, high = ax.get_ylim()
    gap = (high - low) / 18
    last = -float("inf")
    for name, (x, y, colour) in sorted(ends.items(), key=lambda item: item[1][1]):
        last = max(y, last + gap)
        ax.annotate(
            name,
            (x, y),
            (x + 0.15, last),
            color=colour,
            fontsize=8,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.5},
        )


def mlp(rows: Rows, path: Path) -> None:
    """Time over that of fused, by width: a panel for each pass, activation and dtype."""
    cases = list(dict.fromkeys((r["pass"], r["activation"], r["dtype"]) for r in rows))
    figure, axes = _figure(len(cases), 5.6, 3.6)
    for ax, case in zip(axes, cases, strict=False):
        group = [r for r in rows if (r["pass"], r["activation"], r["dtype"]) == case]
        widths = [r["width"] for r in group]
        ends: dict[str, tuple[float, float, str]] = {}
        for arm, colour in _ARM_COLOURS.items():
            found = [
                (i, r["us"][arm] / r["us"]["fused"]) for i, r in enumerate(group) if {arm, "fused"} <= set(r["us"])
            ]
            if not found:
                continue
            ax.plot(*zip(*found, strict=True), color=colour, marker="o", ms=4, lw=2.2 if arm == "fused" else 1.4)
            ends[arm] = (*found[-1], colour)
        ax.set_xlim(-0.3, len(widths) - 1 + max(0.9, len(widths) * 0.32))
        _label_ends(ax, ends)
        ax.set_xticks(range(len(widths)), [str(w) for w in widths])
        ax.set_title(" · ".join(case), loc="left", fontsize=10)
        ax.set_xlabel("width d (features)")
        ax.set_ylabel("time / time of fused")
        ax.grid(axis="y", color="#DDDDDD", lw=0.6)
    tokens = f"{rows[0]['tokens']:,} tokens" if rows else ""
    figure.suptitle(f"MLP, {tokens}: above 1 is slower than fused", x=0.01, ha="left", fontsize=11)
    _save(figure, path)


def gemm(rows: Rows, path: Path) -> None:
    """Bars for each epilog: plain GEMM, separate kernels, with epilog; a panel for each width and dtype."""
    arms = {
        "plain": ("plain GEMM", GREY),
        "separate": ("separate kernels", BLACK),
        "epilog_first": ("epilog, first algorithm", SKY),
        "epilog_tuned": ("epilog, autotuned", VERMILION),
    }
    cases = list(dict.fromkeys((r["width"], r["dtype"]) for r in rows))
    figure, axes = _figure(len(cases), 6.4, 5.2)
    for ax, case in zip(axes, cases, strict=False):
        group = [r for r in rows if (r["width"], r["dtype"]) == case]
        height = 0.8 / len(arms)
        for number, (arm, (label, colour)) in enumerate(arms.items()):
            at = [i + (number - 1.5) * height for i, r in enumerate(group) if arm in r["us"]]
            times = [r["us"][arm] for r in group if arm in r["us"]]
            if times:
                ax.barh(at, times, height, color=colour, label=label)
        ax.set_yticks(range(len(group)), [f"{r['gemm']} {r['epilog']}" for r in group], fontsize=8)
        ax.invert_yaxis()
        ax.set_xlabel("time (us)")
        ax.set_title(f"d {case[0]}, {case[1]}", loc="left", fontsize=10)
    if rows:
        # Outside of the bars, which reach the frame.
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8
        )
        figure.suptitle(f"GEMM with epilog, {rows[0]['tokens']:,} tokens", x=0.01, ha="left", fontsize=11)
    _save(figure, path)


def precision(rows: Rows, path: Path) -> None:
    """A bar for each compute type, its error written beside it: a panel for each width, a colour for each dtype."""
    colours = {"fp32": BLUE, "fp16": VERMILION, "bf16": GREEN}
    widths = list(dict.fromkeys(r["width"] for r in rows))
    figure, axes = _figure(len(widths), 7.0, 4.2)
    for ax, width in zip(axes, widths, strict=False):
        group = [(r, arm, t) for r in rows if r["width"] == width for arm, t in r["us"].items()]
        bars = ax.barh(range(len(group)), [t for *_, t in group], 0.75, color=[colours[r["dtype"]] for r, *_ in group])
        labels = [f" {t:.4g} us, error {r['relative_error'][arm]:.0e}" for r, arm, t in group]
        ax.bar_label(bars, labels, fontsize=8)
        ax.set_yticks(range(len(group)), [f"{r['dtype']}  {arm}" for r, arm, _ in group], fontsize=8)
        ax.invert_yaxis()
        ax.margins(x=0.35)
        ax.set_xlabel("time (us); error: relative, against float64")
        ax.set_title(f"linear layer with bias, {width} to {4 * width} features", loc="left", fontsize=10)
    _save(figure, path)


def host(rows: Rows, path: Path) -> None:
    """Two bars for each case, with their lengths written beside them."""
    figure, (ax, *_) = _figure(1, 6.4, 0.9 + 0.7 * len(rows))
    for number, (arm, colour) in enumerate({"torch": BLACK, "fused": VERMILION}.items()):
        found = [(i + (number - 0.5) * 0.4, r["us"][arm]) for i, r in enumerate(rows) if arm in r["us"]]
        bars = ax.barh([at for at, _ in found], [t for _, t in found], 0.38, color=colour)
        ax.bar_label(bars, [f" {arm} {t:.1f}" for _, t in found], fontsize=8, color=colour)
    ax.set_yticks(range(len(rows)), [f"{r['pass']}\n{r['activation']}" for r in rows])
    ax.invert_yaxis()
    ax.margins(x=0.2)
    ax.set_xlabel("host time of one call (us)")
    if rows:
        ax.set_title(f"{rows[0]['tokens']} tokens, d {rows[0]['width']}, {rows[0]['dtype']}", loc="left", fontsize=10)
    _save(figure, path)
