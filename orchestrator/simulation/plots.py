"""Plots of a simulated run: who holds the slots over time, and how far each source's collection is.

The page is plotly's, with its script inside, so it opens without a network. The picture is matplotlib's: plotly's own
way to a PNG needs a browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infra.errors import StorageError
from orchestrator.simulation.figures import Sample, Simulation

PALETTE = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")


def write_plots(run: Simulation, folder: Path, name: str) -> tuple[Path, Path]:
    """`name.html` and `name.png`.

    Raises:
        StorageError: the folder cannot be written.
    """
    page, picture = folder / f"{name}.html", folder / f"{name}.png"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page.write_text(_page(run), encoding="utf-8")
        _picture(run, picture)
    except OSError as e:
        raise StorageError(f"{folder}: plots not written ({e}); give another --output") from e
    return page, picture


def _panels(run: Simulation) -> list[tuple[str, str, dict[str, list[float]], bool]]:
    """(title, unit, source -> values, stacked)."""
    samples, sources = run.samples, list(run.trace.sources)
    panels = [("Rollout slots by source", "trajectories", _series(samples, "rolling", sources), True)]
    if run.trace.grading is not None:
        code = [name for name in sources if run.trace.sources[name].kind == "code"]
        panels.append(("Grader slots by source", "groups", _series(samples, "grading", code), True))
    collected = {n: [100.0 * v for v in values] for n, values in _series(samples, "collected", sources).items()}
    panels.append(("Collected for the next step", "% of quota", collected, False))
    return panels


def _series(samples: Sequence[Sample], field: str, sources: Sequence[str]) -> dict[str, list[float]]:
    return {name: [float(getattr(sample, field)[name]) for sample in samples] for name in sources}


def _colors(run: Simulation) -> dict[str, str]:
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(run.trace.sources)}


def _title(run: Simulation) -> str:
    return f"{run.trace.name}, {run.schedule}, alpha {run.trace.scheduler.alpha:g}"


def _page(run: Simulation) -> str:
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    panels, colors = _panels(run), _colors(run)
    hours = [sample.time_s / 3600.0 for sample in run.samples]
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, subplot_titles=[p[0] for p in panels])
    for row, (_, unit, series, stacked) in enumerate(panels, start=1):
        for name, values in series.items():
            line: dict[str, Any] = {"x": hours, "y": values, "name": name, "legendgroup": name, "mode": "lines"}
            line["line"] = {"color": colors[name], "width": 0 if stacked else 1.5}
            if stacked:
                line |= {"stackgroup": f"row{row}", "fillcolor": colors[name]}
            figure.add_trace(go.Scatter(showlegend=row == 1, **line), row=row, col=1)
        figure.update_yaxes(title_text=unit, row=row, col=1)
    for step in run.steps:
        figure.add_vline(x=step.end_s / 3600.0, line={"color": "#888", "width": 1, "dash": "dot"})
    figure.update_xaxes(title_text="virtual hours; dotted: the end of a step", row=len(panels), col=1)
    figure.update_layout(title=_title(run), height=320 * len(panels), template="plotly_white")
    return str(figure.to_html(include_plotlyjs=True, full_html=True))


def _picture(run: Simulation, path: Path) -> None:
    from matplotlib.figure import Figure

    panels, colors = _panels(run), _colors(run)
    hours = [sample.time_s / 3600.0 for sample in run.samples]
    figure = Figure(figsize=(11.0, 3.0 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (title, unit, series, stacked) in zip(axes, panels, strict=True):
        if stacked:
            axis.stackplot(hours, *series.values(), labels=list(series), colors=[colors[name] for name in series])
        else:
            for name, values in series.items():
                axis.plot(hours, values, label=name, color=colors[name], linewidth=1.2)
        for step in run.steps:
            axis.axvline(step.end_s / 3600.0, color="#888", linewidth=0.8, linestyle=":")
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylabel(unit)
        axis.legend(fontsize=7, loc="upper left", ncols=len(series))
    axes[-1].set_xlabel("virtual hours; dotted: the end of a step")
    figure.suptitle(_title(run))
    figure.savefig(path, dpi=110)
