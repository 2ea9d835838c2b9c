"""`gagar audit`: two runs on the same held-out tasks, judged blind by a grader or by people."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from configs.schema import GraderConfig, RubricConfig, RunConfig, VllmGraderBackend
from grader.exchange import GradeReply
from grader.stored import StoredGroup
from infra.errors import ConfigError, StorageError
from infra.pool import ActorPool
from infra.sinks import JsonlFile
from orchestrator.audit_sheet import Agreement, agree, read_answers, write_sheet
from orchestrator.audit_table import AGREEMENT, FIGURES, agreement_rows, figure_rows, markdown
from orchestrator.blind_audit import (
    SIDES,
    Audit,
    AuditFigures,
    Judgements,
    audit_figures,
    by_grader,
    by_person,
    draw,
    find_evaluations,
    keep,
    short_name,
)
from orchestrator.evaluation import read_evaluation
from orchestrator.grading import (
    Asked,
    default_order_seed,
    grade_groups,
    read_results,
    setup_digest,
    with_graders,
)
from orchestrator.progress import Progress
from orchestrator.runfiles import CONFIG
from orchestrator.trust import GroupResult

GRADES = "grades.jsonl"
RESULT = "audit.json"
_RESULT = TypeAdapter(GroupResult)


def run_audit(
    runs: tuple[str, str],
    *,
    tasks: int,
    most: int,
    seed: int,
    output: Path,
    grader: RunConfig | None,
    export: Path | None,
    answers: Sequence[Path],
    console: Console | None = None,
) -> None:
    """Draw the cases, have them judged by whoever is asked for, and print the figures.

    Raises:
        GagarError: with one message for the user; grades that were given are kept.
    """
    console = console or Console()
    files = (find_evaluations(runs[0]), find_evaluations(runs[1]))
    audit, groups = draw(runs, files, tasks=tasks, most=most, seed=seed)
    keep(output, audit, groups)
    if grader is not None:
        for run in trained_by(files, grader):
            console.print(
                escape(f"warning: {run} was trained with the grader that judges here; give another"), soft_wrap=True
            )
    console.print(
        escape(
            f"{len(audit.drawn)} held-out tasks drawn, {len(groups)} with a pass to judge; cases and key in {output}"
        ),
        soft_wrap=True,
    )
    if export is not None:
        console.print(escape(f"blind sheet: {write_sheet(export, audit, groups)}"), soft_wrap=True)
    judges: dict[str, Judgements] = {}
    if grader is not None:
        replies = _grade(grader, groups, output / GRADES, console)
        models = sorted({reply.model for reply in replies.values() if reply.model})
        judges[f"grader {', '.join(models) or 'unknown'}"] = by_grader(replies)
    rubric = grader.algorithm.rubric if grader is not None else RubricConfig()
    raters: dict[str, Path] = {}
    for path in answers:
        rater, given = read_answers(path, audit, groups)
        if (other := raters.setdefault(rater, path)) is not path:
            raise ConfigError(
                f"--import {path}: answers of {rater!r}, as {other}; give the newer file alone, or, if these are two "
                "people, another `rater` in one of them"
            )
        judges[f"{rater} ({path.name})"] = by_person(given, rubric)
    figures = {judge: audit_figures(audit, judgements) for judge, judgements in judges.items()}
    for judge, found in figures.items():
        console.print(_table(audit, judge, found))
    names = list(judges)
    agreements = {
        f"{first} and {second}": agree(judges[first], judges[second])
        for i, first in enumerate(names)
        for second in names[i + 1 :]
    }
    for pair, agreement in agreements.items():
        console.print(_agreement_table(pair, agreement))
    if judges:
        data = {
            "runs": dict(audit.names),
            "digest": audit.digest,
            "seed": audit.seed,
            "judges": {judge: FIGURES.dump_python(found, mode="json") for judge, found in figures.items()},
            "agreement": {pair: AGREEMENT.dump_python(found, mode="json") for pair, found in agreements.items()},
        }
        _write(output, data)
        console.print(escape(f"figures: {output / RESULT}, and as tables beside it"), soft_wrap=True)


def trained_by(files: tuple[Sequence[Path], Sequence[Path]], judge: RunConfig) -> list[str]:
    """Runs that were trained with the grader's model that is to judge them. A policy's run is the folder in which its
    checkpoint lies, or for a run's own evaluation this one; of other policies nothing is known."""
    found = []
    for path in (*files[0], *files[1]):
        model = read_evaluation(path).model
        folders = Path(model).absolute().parents[2:3] if model else path.absolute().parents[1:2]
        if not folders or not (folders[0] / CONFIG).is_file():
            continue
        run_dir = folders[0]
        try:
            config = RunConfig.model_validate(yaml.safe_load((run_dir / CONFIG).read_text(encoding="utf-8")))
        except (OSError, yaml.YAMLError, ValidationError):
            continue
        if config.grader is not None and _model(config.grader) == _model(judge.grader):
            found.append(run_dir.name)
    return found


def _model(grader: GraderConfig | None) -> str | None:
    if grader is None:
        return None
    backend = grader.backend
    if isinstance(backend, VllmGraderBackend):
        return os.path.abspath(backend.engine.model)  # however the folder was written
    return f"{backend.base_url} {backend.model}"


def _grade(config: RunConfig, groups: Sequence[StoredGroup], file: Path, console: Console) -> dict[str, GradeReply]:
    """Every case once; those whose grader has answered before are not graded again."""
    assert config.grader is not None
    timeout_s = config.grader.timeout_s
    setup = setup_digest(config, repeat=1, permute=False)
    done = read_results(file, setup)
    left = [group for group in groups if group.group_id not in done]
    progress = Progress(0, config.telemetry.progress_every_s, console=console)
    kept = JsonlFile(file, sync=True)

    def on_result(result: GroupResult) -> None:
        kept.append(_RESULT.dump_python(result, mode="json"))
        done[result.group_id] = result
        if len(done) % 10 == 0 or len(done) == len(groups):
            progress.event(f"judged {len(done)}/{len(groups)} cases")

    def plan(group: StoredGroup) -> list[Asked]:
        return [Asked(order_seed=default_order_seed(config, group.group_id), permuted=False)]

    async def work(pool: ActorPool) -> None:
        slots = pool.occupancy()[1]
        await grade_groups(pool, left, plan, concurrency=slots, timeout_s=timeout_s, setup=setup, on_result=on_result)

    try:
        if left:
            with_graders(config, progress, work)
    finally:
        progress.close()
        kept.close()
    return {group.group_id: done[group.group_id].gradings[0].reply for group in groups if group.group_id in done}


def _write(folder: Path, data: Mapping[str, Any]) -> None:
    path = folder / RESULT
    try:
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(markdown(data), encoding="utf-8")
    except OSError as e:
        raise StorageError(f"{path}: cannot be written ({e}); free space or give another --output") from e


def _table(audit: Audit, judge: str, found: AuditFigures) -> Table:
    a, b = (short_name(audit.names[side]) for side in SIDES)
    title = (
        f"{a} against {b}, judged by {judge}; {found.judged} tasks, {found.both} with passes of both; 95 % intervals"
    )
    table = Table(title=escape(title), title_justify="left")
    for name in ("", a, b, "difference"):
        table.add_column(escape(name), justify="left" if not name else "right")
    for name, cells in figure_rows(found):
        table.add_row(escape(name), *map(escape, cells))
    return table


def _agreement_table(pair: str, found: Agreement) -> Table:
    table = Table(title=escape(f"Agreement: {pair}, {found.candidates} candidates"), title_justify="left")
    for name in ("", "kappa", "same"):
        table.add_column(name, justify="left" if not name else "right")
    for row in agreement_rows(found):
        table.add_row(*row)
    return table
