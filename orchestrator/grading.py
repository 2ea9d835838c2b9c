"""`gagar grade`: stored groups through a grader, without a policy, a learner or a training step.

run folder | folder of groups | minirepo:heldout:N -> groups -> [grader pool] -> replies -> one line a group
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from configs.schema import RunConfig
from grader.candidates import shuffled
from grader.exchange import GradeRequest, accept, base_state_of, lost_reply
from grader.stored import StoredGroup, finding
from grader.verdict import UNANSWERED
from infra.errors import GraderError, StorageError
from infra.pool import ActorLost, ActorPool, ActorTimeout
from infra.sinks import JsonlFile
from orchestrator.grading_stage import ATTEMPTS
from orchestrator.grading_target import Target
from orchestrator.progress import Progress
from orchestrator.trust import Grading, GroupResult, trust_figures, trust_rows

Work = Callable[[ActorPool], Coroutine[Any, Any, None]]
"""What is done with a pool of graders."""

_RESULT = TypeAdapter(GroupResult)
_LINE_START = b'{"group_id": '
"""How every line of an output file begins."""
_SIZING = {"workers", "groups_per_worker", "resources", "canaries", "alarms"}
"""Keys of the grader's section that do not change what it answers."""


# ---- what was graded already -----------------------------------------------------------------------------------------


def setup_digest(config: RunConfig, *, repeat: int, permute: bool) -> str:
    """Digest of everything that decides what a result means: the grader, the rubric, and how often it is asked."""
    assert config.grader is not None
    what = {
        "grader": config.grader.model_dump(mode="json", exclude=_SIZING),
        "rubric": config.algorithm.rubric.model_dump(mode="json"),
        "seed": config.seed,
        "repeat": repeat,
        "permute": permute,
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def read_results(path: Path, setup: str) -> dict[str, GroupResult]:
    """Group id -> result, of an output file that may have been cut off in its last line, which is then removed. What no
    grader answered is left out, to be asked again; a bad verdict is an answer.

    Nothing is removed from a file that is not one of ours.

    Raises:
        StorageError: it is damaged, was made with another setup, or holds something else.
    """
    if not path.exists():
        return {}
    try:
        data = path.read_bytes()
    except OSError as e:
        raise StorageError(f"{path}: cannot be read ({e}); give another --output") from e
    *whole, torn = data.split(b"\n")
    results: dict[str, GroupResult] = {}
    for number, line in enumerate(whole, 1):
        row = _row(line)
        if row is None:
            raise StorageError(f"{path}:{number}: no line of grades; give another --output, or remove this line")
        if row.get("setup") != setup:
            raise StorageError(
                f"{path}:{number}: setup = {row.get('setup')!r}: graded by another grader, or with other --repeat, "
                "--permute or seed; give another --output, or remove this file"
            )
        try:
            result = _RESULT.validate_python(row)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            said = finding(first["loc"], first["msg"])
            raise StorageError(f"{path}:{number}: {said}; remove this line to grade its group again") from None
        results[result.group_id] = result
    if torn:
        if torn[: len(_LINE_START)] != _LINE_START[: len(torn)]:
            raise StorageError(f"{path}: holds something else than grades; give another --output")
        try:
            os.truncate(path, len(data) - len(torn))
        except OSError as e:
            raise StorageError(f"{path}: cannot be written ({e}); give another --output") from e
    return {name: result for name, result in results.items() if not _unanswered(result)}


def _unanswered(result: GroupResult) -> bool:
    return any(grading.reply.fallback_reason in UNANSWERED for grading in result.gradings)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def still_holds(result: GroupResult, group: StoredGroup) -> bool:
    """Whether a result from before is about the group as it is now: the same repository, and the same that passed.

    Labels may have come since; they decide nothing of a grading.
    """
    passing = tuple(t.trajectory_id for t in group.trajectories if t.passed)
    states = {grading.reply.base_state for grading in result.gradings}
    return set(result.passing) == set(passing) and states == {base_state_of(group.task)}


# ---- grading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One grading to be asked for."""

    order_seed: int
    permuted: bool


def gradings_of(group: StoredGroup, seed: int, *, repeat: int, permute: bool) -> list[Asked]:
    """`repeat` independent gradings in one order, and with `permute` one more in another order, if there is another."""
    asked = [Asked(order_seed=seed, permuted=False)] * repeat
    ids = [t.trajectory_id for t in group.trajectories]
    if permute and len(ids) > 1:
        other = seed + 1
        while shuffled(ids, other) == shuffled(ids, seed):
            other += 1
        asked.append(Asked(order_seed=other, permuted=True))
    return asked


def default_order_seed(config: RunConfig, group_id: str) -> int:
    """Depends on the group alone, so that --limit and resuming change nothing."""
    return zlib.crc32(f"{config.seed}/{group_id}".encode("utf-8", "surrogatepass")) & 0x7FFFFFFF


async def grade_groups(
    pool: ActorPool,
    groups: Sequence[StoredGroup],
    plan: Callable[[StoredGroup], Sequence[Asked]],
    *,
    concurrency: int,
    timeout_s: float,
    setup: str,
    on_result: Callable[[GroupResult], None],
) -> None:
    """Every group as often as `plan` says, `concurrency` gradings at once; `on_result` as soon as a group is through.

    Raises:
        GraderError: no grader is left (in an ExceptionGroup).
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(group: StoredGroup, asked: Asked) -> Grading:
        async with slots:
            return await _ask(pool, group, asked, timeout_s)

    async def whole(group: StoredGroup) -> None:
        gradings = await asyncio.gather(*(one(group, asked) for asked in plan(group)))
        result = GroupResult(
            group_id=group.group_id,
            task_id=group.task.task_id,
            setup=setup,
            passing=tuple(t.trajectory_id for t in group.trajectories if t.passed),
            labels=group.labels,
            gradings=tuple(gradings),
        )
        on_result(result)

    async with asyncio.TaskGroup() as tasks:
        for group in groups:
            tasks.create_task(whole(group))


async def _ask(pool: ActorPool, group: StoredGroup, asked: Asked, timeout_s: float) -> Grading:
    """One grading; whatever goes wrong is a fallback, as in a run (M1.10)."""
    from ray.exceptions import RayError

    start_s = time.monotonic()
    request = GradeRequest(
        group_id=group.group_id,
        task=group.task,
        base_state=base_state_of(group.task),
        trajectories=group.trajectories,
        order_seed=asked.order_seed,
        submitted_unix_s=time.time(),
    )
    while True:
        try:
            reply = await pool.call("grade", request, *group.transcripts, timeout_s=timeout_s * 1.5 + 10.0)
            return Grading(permuted=asked.permuted, reply=accept(request, reply))
        except (ActorLost, ActorTimeout, RayError) as e:
            if pool.occupancy()[1] == 0:
                raise GraderError(
                    f"no grader worker is left ({e}); mend what ends them and run the command again"
                ) from e
            # Ray's own: a fault in the worker, or a group that it cannot carry. Asking again would not help.
            if isinstance(e, RayError) or request.attempt + 1 == ATTEMPTS:
                lost = lost_reply(request, f"{type(e).__name__}: {e}", run_s=time.monotonic() - start_s)
                return Grading(permuted=asked.permuted, reply=lost)
            request = replace(request, attempt=request.attempt + 1, submitted_unix_s=time.time())


# ---- the command -----------------------------------------------------------------------------------------------------


def with_graders(config: RunConfig, progress: Progress, work: Work) -> None:
    """Start Ray and the graders of a configuration, do `work` on their pool, and end them."""
    from orchestrator.build import grader_pool, ray_session, run_loop

    async def go() -> None:
        async with grader_pool(config, progress) as ready:
            pool = await ready()
            assert pool is not None  # the rules of a configuration allow a grader only where it is used
            await work(pool)

    with ray_session(config):
        run_loop(go(), stopped="stopped by SIGTERM; with --output, the same command goes on with the rest")


def run_grading(
    config: RunConfig,
    target: Target,
    *,
    source: str,
    repeat: int = 1,
    permute: bool = False,
    output: Path | None = None,
    console: Console | None = None,
    run: Callable[[RunConfig, Progress, Work], None] = with_graders,
) -> None:
    """Grade the groups, keep each result at once, and print the figures; `source` is what the user called the groups.

    Raises:
        GagarError, KeyboardInterrupt: after the figures of what was done are printed.
    """
    assert config.grader is not None
    timeout_s = config.grader.timeout_s
    progress = Progress(0, config.telemetry.progress_every_s, console=console)
    setup = setup_digest(config, repeat=repeat, permute=permute)
    known = {} if output is None else read_results(output, setup)
    done = {
        g.group_id: replace(known[g.group_id], labels=g.labels)
        for g in target.groups
        if g.group_id in known and still_holds(known[g.group_id], g)
    }
    left = [g for g in target.groups if g.group_id not in done]
    progress.event(_what(target, source, len(done)))
    file = None if output is None else JsonlFile(output, sync=False)

    def keep(result: GroupResult) -> None:
        if file is not None:
            file.append(_RESULT.dump_python(result, mode="json"))
        done[result.group_id] = result

    def plan(group: StoredGroup) -> Sequence[Asked]:
        seed = target.order_seeds.get(group.group_id, default_order_seed(config, group.group_id))
        return gradings_of(group, seed, repeat=repeat, permute=permute)

    async def work(pool: ActorPool) -> None:
        slots = pool.occupancy()[1]
        progress.event(f"grading, {slots} at once")
        with _Watch(progress, config.telemetry.progress_every_s, len(target.groups), len(done)) as watch:

            def on_result(result: GroupResult) -> None:
                keep(result)
                watch.on_result(result)

            await grade_groups(
                pool, left, plan, concurrency=slots, timeout_s=timeout_s, setup=setup, on_result=on_result
            )

    try:
        if left:
            run(config, progress, work)
    finally:
        progress.close()
        if file is not None:
            file.close()
        ordered = [done[g.group_id] for g in target.groups if g.group_id in done]
        print_figures(progress.console, ordered, config, source, output)


def _what(target: Target, source: str, done: int) -> str:
    before = f", {done} of them graded before" if done else ""
    missing = f"; {target.missing} more are not in the archive" if target.missing else ""
    return f"{len(target.groups)} groups of {source}{before}{missing}"


def print_figures(
    console: Console, results: Sequence[GroupResult], config: RunConfig, source: str, output: Path | None
) -> None:
    """The table at the end."""
    models = sorted({g.reply.model for r in results for g in r.gradings if g.reply.model})
    by = f", graded by {', '.join(models)}" if models else ""
    table = Table(title=escape(f"{source}{by}"), title_justify="left", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in trust_rows(trust_figures(results, config.algorithm.rubric)):
        table.add_row(escape(name), escape(value))
    console.print(table)
    kept = "give --output FILE.jsonl to keep every grade" if output is None else f"every grade: {output}"
    console.print(escape(kept), soft_wrap=True)


class _Watch:
    """Progress of the gradings: a bar on a terminal, a line every `interval_s` seconds elsewhere."""

    def __init__(self, progress: Progress, interval_s: float, total: int, done: int) -> None:
        self._progress = progress
        self._interval_s = interval_s
        self._total = total
        self._done = self._before = done
        self._fallbacks = 0
        self._started_s = self._told_s = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        terminal = progress.console.is_terminal
        self._bar = Bar(*columns, console=progress.console, transient=True) if terminal else None
        self._task = self._bar.add_task("graded", total=total, completed=done) if self._bar is not None else None

    def __enter__(self) -> _Watch:
        self._started_s = self._told_s = time.monotonic()
        (self._bar or nullcontext()).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_result(self, result: GroupResult) -> None:
        """A group is through."""
        self._done += 1
        self._fallbacks += sum(g.reply.grade is None for g in result.gradings)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done, description=f"graded ({self._fallbacks} fallbacks)")
        now = time.monotonic()
        if self._bar is None and (now - self._told_s >= self._interval_s or self._done == self._total):
            self._told_s = now
            a_minute = 60.0 * (self._done - self._before) / max(now - self._started_s, 1e-9)
            self._progress.event(
                f"graded {self._done}/{self._total} groups, {a_minute:.1f} a minute, {self._fallbacks} fallbacks"
            )
