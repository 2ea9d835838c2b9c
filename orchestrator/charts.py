"""Geometry of the report's charts, in SVG user units; templates/charts.html.j2 draws it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from infra.spans import Span

WIDTH, HEIGHT = 560.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 72.0, 10.0, 10.0, 24.0
BINS = 280
"""Columns of the occupancy timeline."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A point or a bar's part, with what it says when pointed at."""

    x: float
    y: float
    height: float
    tip: str
    weight: float = 1.0
    """How strongly a cell of a heat map is filled, 0..1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One series: a line's path (empty for bars) and its marks."""

    name: str
    color: int
    """Index into the template's palette."""
    path: str
    marks: tuple[Mark, ...]
    area: str = ""
    """Outline of the band around a line; empty for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What the template draws."""

    title: str
    kind: str
    """line, bars, heat or timeline."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    shapes: tuple[Shape, ...]
    bar_width: float = 0.0


def line_chart(
    title: str, series: Mapping[str, Sequence[Point]], *, low: float | None = None, high: float | None = None
) -> Chart | None:
    """Lines over steps; None without any point. `low` and `high` fix the axis where given."""
    points = [p for line in series.values() for p in line]
    if not points:
        return None
    y = _axis([p[1] for p in points], low, high)
    x_low, x_high = min(p[0] for p in points), max(p[0] for p in points)
    shapes = []
    for color, (name, line) in enumerate(series.items()):
        at = [(_x(px, x_low, x_high), _y(py, y)) for px, py in line]
        path = " ".join(f"{'M' if i == 0 else 'L'}{px:.1f} {py:.1f}" for i, (px, py) in enumerate(at))
        marks = tuple(
            Mark(x=px, y=py, height=0.0, tip=f"{name}, step {step:g}: {value:.4g}")
            for (px, py), (step, value) in zip(at, line, strict=True)
        )
        shapes.append(Shape(name=name, color=color, path=path, marks=marks))
    return Chart(
        title=title, kind="line", x_ticks=_step_ticks(x_low, x_high), y_ticks=_y_ticks(y), shapes=tuple(shapes)
    )


def band_chart(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float, float, float]]],
    *,
    colors: Mapping[str, int] | None = None,
    low: float | None = None,
    high: float | None = None,
) -> Chart | None:
    """Lines with a band around each: (step, middle, least, most). None without any point. `colors` keeps a series in
    one colour over several charts."""
    points = [p for line in series.values() for p in line]
    if not points:
        return None
    y = _axis([v for p in points for v in p[1:]], low, high)
    x_low, x_high = min(p[0] for p in points), max(p[0] for p in points)
    shapes = []
    for i, (name, line) in enumerate(series.items()):
        if not line:
            continue
        at = [(_x(step, x_low, x_high), *(_y(v, y) for v in values)) for step, *values in line]
        upper = " ".join(f"{'M' if j == 0 else 'L'}{p[0]:.1f} {p[3]:.1f}" for j, p in enumerate(at))
        lower = " ".join(f"L{p[0]:.1f} {p[2]:.1f}" for p in reversed(at))
        path = " ".join(f"{'M' if j == 0 else 'L'}{p[0]:.1f} {p[1]:.1f}" for j, p in enumerate(at))
        marks = tuple(
            Mark(x=p[0], y=p[1], height=0.0, tip=f"{name}, step {step:g}: {middle:.4g} ({least:.4g} to {most:.4g})")
            for p, (step, middle, least, most) in zip(at, line, strict=True)
        )
        color = i if colors is None else colors[name]
        shapes.append(Shape(name=name, color=color, path=path, marks=marks, area=f"{upper} {lower} Z"))
    return Chart(
        title=title, kind="line", x_ticks=_step_ticks(x_low, x_high), y_ticks=_y_ticks(y), shapes=tuple(shapes)
    )


def heat_map(
    title: str, columns: Mapping[int, Sequence[tuple[float, float]]], *, rows: int = 16, low: float | None = None
) -> Chart | None:
    """How values are spread in each step: (value, how many) by step. Each column is a share of its own step, so steps
    with many groups are not darker. None without any value."""
    values = [value for column in columns.values() for value, count in column if count]
    if not values:
        return None
    y = _axis(values, low, None)
    steps = sorted(columns)
    slot, height = (WIDTH - LEFT - RIGHT) / len(steps), (HEIGHT - TOP - BOTTOM) / rows
    marks = []
    for i, step in enumerate(steps):
        total = sum(count for _, count in columns[step])
        cells = [0.0] * rows
        for value, count in columns[step]:
            cells[min(int((value - y[0]) / (y[1] - y[0]) * rows), rows - 1)] += count
        for row, count in enumerate(cells):
            if count:
                edges = [y[0] + (y[1] - y[0]) * (row + side) / rows for side in (0, 1)]
                marks.append(
                    Mark(
                        x=LEFT + slot * i,
                        y=HEIGHT - BOTTOM - height * (row + 1),
                        height=height,
                        tip=f"step {step}: {count:g} of {total:g} between {edges[0]:.3g} and {edges[1]:.3g}",
                        weight=count / total,
                    )
                )
    every = math.ceil(len(steps) / 12)
    return Chart(
        title=title,
        kind="heat",
        x_ticks=tuple(Tick(at=LEFT + slot * (i + 0.5), label=str(s)) for i, s in enumerate(steps) if i % every == 0),
        y_ticks=_y_ticks(y),
        shapes=(Shape(name="share of the step's groups", color=0, path="", marks=tuple(marks)),),
        bar_width=slot,
    )


def stacked_bars(title: str, series: Mapping[str, Mapping[int, float]]) -> Chart | None:
    """Parts of a whole by step; None without any value."""
    steps = sorted({step for parts in series.values() for step in parts})
    if not steps:
        return None
    top = max(sum(parts.get(step, 0.0) for parts in series.values()) for step in steps)
    y = _axis([top], 0.0, None)
    slot = (WIDTH - LEFT - RIGHT) / len(steps)
    base = dict.fromkeys(steps, 0.0)
    shapes = []
    for color, (name, parts) in enumerate(series.items()):
        marks = []
        for i, step in enumerate(steps):
            value = parts.get(step, 0.0)
            if value > 0.0:
                upper = _y(base[step] + value, y)
                mark = Mark(
                    x=LEFT + slot * (i + 0.1),
                    y=upper,
                    height=_y(base[step], y) - upper,
                    tip=f"{name}, step {step}: {value:.4g}",
                )
                marks.append(mark)
                base[step] += value
        shapes.append(Shape(name=name, color=color, path="", marks=tuple(marks)))
    every = math.ceil(len(steps) / 12)
    x_ticks = tuple(Tick(at=LEFT + slot * (i + 0.5), label=str(s)) for i, s in enumerate(steps) if i % every == 0)
    return Chart(
        title=title,
        kind="bars",
        x_ticks=x_ticks,
        y_ticks=_y_ticks(y),
        shapes=tuple(s for s in shapes if s.marks),
        bar_width=slot * 0.8,
    )


def timeline(title: str, spans: Sequence[Span], lanes: Sequence[str], window: tuple[float, float]) -> Chart | None:
    """How many spans of each name ran at a time: one lane each, scaled to its own maximum; None if nothing ran."""
    start, end = window
    if end <= start:
        return None
    width = (end - start) / BINS
    lane_height = (HEIGHT - TOP - BOTTOM) / max(len(lanes), 1)
    shapes, y_ticks = [], []
    for lane, name in enumerate(lanes):
        load = [0.0] * BINS
        for span in spans:
            low, high = max(span.start_s, start), min(span.end_s, end)
            if span.name != name or high <= low:
                continue
            first, last = int((low - start) / width), min(int((high - start) / width), BINS - 1)
            for i in range(first, last + 1):
                left = start + i * width
                load[i] += max(min(high, left + width) - max(low, left), 0.0) / width
        peak = max(load)
        floor = TOP + lane_height * (lane + 1)
        y_ticks.append(Tick(at=floor, label=name))
        if peak == 0.0:
            continue
        scale = (lane_height - 6.0) / peak
        column = (WIDTH - LEFT - RIGHT) / BINS
        points = [
            (LEFT + column * (i + side), floor - value * scale) for i, value in enumerate(load) for side in (0, 1)
        ]
        path = f"M{LEFT:.1f} {floor:.1f} " + " ".join(f"L{x:.1f} {y:.1f}" for x, y in points)
        path += f" L{WIDTH - RIGHT:.1f} {floor:.1f} Z"
        most = _most_at_once([s for s in spans if s.name == name], window)
        shapes.append(Shape(name=f"{name} (up to {most} at once)", color=lane, path=path, marks=()))
    if not shapes:
        return None
    x_ticks = tuple(
        Tick(at=LEFT + (WIDTH - LEFT - RIGHT) * i / 4, label=f"{(end - start) * i / 4:.0f} s") for i in range(5)
    )
    return Chart(title=title, kind="timeline", x_ticks=x_ticks, y_ticks=tuple(y_ticks), shapes=tuple(shapes))


def _most_at_once(spans: Sequence[Span], window: tuple[float, float]) -> int:
    start, end = window
    edges = [
        e for s in spans if s.end_s > start and s.start_s < end for e in ((max(s.start_s, start), 1), (s.end_s, -1))
    ]
    return max(accumulate(change for _, change in sorted(edges)), default=0)


def _x(value: float, low: float, high: float) -> float:
    inner = WIDTH - LEFT - RIGHT
    return LEFT + (inner * (value - low) / (high - low) if high > low else inner / 2)


def _y(value: float, axis: tuple[float, float]) -> float:
    low, high = axis
    return TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low)


def _axis(values: Sequence[float], low: float | None, high: float | None) -> tuple[float, float]:
    bottom = min(values) if low is None else low
    top = max(values) if high is None else high
    if top <= bottom:
        top = bottom + max(abs(bottom) * 0.1, 1e-9)
    return bottom, top


def _y_ticks(axis: tuple[float, float]) -> tuple[Tick, ...]:
    """Round values 1, 2 or 5 times a power of ten apart."""
    low, high = axis
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1.0, 2.0, 5.0, 10.0) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return tuple(Tick(at=_y((first + i) * step, axis), label=_short((first + i) * step)) for i in range(count))


def _short(value: float) -> str:
    """At most four digits: 0.25, 1500, 400k, 2.5M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if abs(value) >= max(size, 1e4):
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


def _step_ticks(low: float, high: float) -> tuple[Tick, ...]:
    every = max(math.ceil((high - low) / 10), 1)
    steps = range(math.ceil(low), math.floor(high) + 1, every)
    return tuple(Tick(at=_x(s, low, high), label=str(s)) for s in steps)
