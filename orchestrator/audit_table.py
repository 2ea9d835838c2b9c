"""What an audit found, as tables: rows for the console, and audit.md from what audit.json holds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from orchestrator.audit_sheet import Agreement
from orchestrator.blind_audit import SIDES, AuditFigures, short_name
from orchestrator.evaluation import estimate_text
from orchestrator.markdown import cell, table

FIGURES = TypeAdapter(AuditFigures)
AGREEMENT = TypeAdapter(Agreement)

Cells = tuple[str, str, str]


def figure_rows(found: AuditFigures) -> list[tuple[str, Cells]]:
    """(figure, its value for a, for b, and a less b); what is of both runs together stands at a."""
    shares = {"a": found.tier1["a"], "b": found.tier1["b"], "apart": found.tier1_apart}
    scores = {"a": found.score["a"], "b": found.score["b"], "apart": found.score_apart}
    rows: list[tuple[str, Cells]] = []
    for name, unit, parts in (
        ("weighted score", "number", scores),
        ("T1 share of passes", "percent", shares),
        *((name.replace("_", " "), "number", parts) for name, parts in found.dimensions.items()),
    ):
        a, b = (estimate_text(parts[side], unit) for side in SIDES)
        rows.append((name, (a, b, estimate_text(parts["apart"], unit, signed=True))))
    rows.append(("win rate over passing pairs", (estimate_text(found.win_rate, "percent"), "", "")))
    rows.append(("best of its task", (estimate_text(found.first_share, "percent"), "", "")))
    return rows


def agreement_rows(found: Agreement) -> list[tuple[str, str, str]]:
    """(dimension, or tier, or order; kappa or tau-b; share of the same answers, or how many tasks)."""
    rows = []
    for name, value in found.kappa.items():
        same = found.same[name]
        rows.append(
            (
                name.replace("_", " "),
                "-" if value is None else f"{value:+.2f}",
                "-" if same is None else f"{100 * same:.0f} %",
            )
        )
    tau = "-" if found.tau_b is None else f"{found.tau_b:+.2f}"
    return [*rows, ("order (tau-b)", tau, f"{found.cases} tasks")]


def markdown(data: Mapping[str, Any]) -> str:
    """The tables of an audit, from the content of its audit.json.

    Raises:
        ValidationError, KeyError: it is not that.
    """
    a, b = (cell(short_name(data["runs"][side])) for side in SIDES)
    lines = [f"# {a} against {b}", ""]
    for judge, figures in data["judges"].items():
        found = FIGURES.validate_python(figures)
        lines += [
            f"Judged by {cell(judge)}: {found.tasks} held-out tasks drawn, {found.judged} with a judged pass, "
            f"{found.both} with passes of both; 95 % bootstrap intervals over tasks.",
            "",
            *table(("", a, b, "difference"), [(name, *cells) for name, cells in figure_rows(found)]),
            "",
        ]
    for pair, agreement in data["agreement"].items():
        held = AGREEMENT.validate_python(agreement)
        lines += [f"Agreement of {cell(pair)}, on {held.candidates} candidates:", ""]
        lines += [*table(("", "kappa", "same"), agreement_rows(held)), ""]
    return "\n".join(lines).rstrip() + "\n"
