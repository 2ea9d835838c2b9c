"""Scripted solutions of every quality, known by construction (M3.2), as the commands an agent would type."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from envs.minirepo.build import Plan, Site, site_value
from envs.minirepo.shape import fill
from envs.names import literal
from envs.patch import added_lines
from envs.replay import SUBMIT, TEST_COMMAND, final_files, judge
from envs.task import ExpertTrace, Quality

Scores = tuple[int, int, int, int, int]
_REWRITE = frozenset({"unrequested_rewrite"})
_WORKAROUND = frozenset({"test_workaround"})


def experts(plan: Plan, rng: random.Random) -> Iterator[ExpertTrace]:
    """Every scripted solution of the task."""
    writer = _Writer(plan, rng)
    yield from writer.clean()
    yield from writer.elsewhere()
    yield from writer.noisy()
    yield from writer.workarounds()
    yield from writer.rewrites()
    yield from writer.wrong()


def look(path: str) -> str:
    """The command that shows a file with line numbers."""
    return f"grep -n '' {path}"


def substitute(line: int, old: str, new: str, path: str) -> str:
    """One substitution of literal text on one line."""
    slash = next(char for char in "/|#" if char not in old + new)
    pattern = "".join("\\" + char if char in ".[*^$\\" else char for char in old)
    return f"sed -i '{line}s{slash}{pattern}{slash}{_escaped(new)}{slash}' {path}"


def replace_line(line: int, new: str, path: str) -> str:
    """Replace a whole line; `new` carries its indentation and may hold line breaks."""
    slash = next(char for char in "/|#" if char not in new)
    return f"sed -i '{line}s{slash}.*{slash}{_escaped(new)}{slash}' {path}"


def append(line: int, new: str, path: str) -> str:
    """Add a line below another."""
    return f"sed -i '{line}a\\{new}' {path}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("&", "\\&").replace("\n", "\\n")


class _Writer:
    """Writes the traces of one task."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self.plan = plan
        self.rng = rng
        self.fix = substitute(plan.bug_line, plan.old, plan.new, plan.helper_path)
        self.alt = replace_line(plan.bug_line, self._indent() + fill(plan.shape.alt, plan.names), plan.helper_path)

    def clean(self) -> Iterator[ExpertTrace]:
        """The shared function is repaired, and nothing else."""
        path = self.plan.helper_path
        first = self.plan.sites[0].path
        yield self._trace("clean", Quality.T1, [look(path), self.fix, TEST_COMMAND], (5, 5, 5, 5, 5))
        yield self._trace("clean", Quality.T1, [look(first), look(path), self.fix, TEST_COMMAND], (5, 5, 5, 5, 5))
        yield self._trace("clean", Quality.T1, [look(path), self.fix], (5, 5, 5, 5, 5))
        yield self._trace("clean_long", Quality.T1, [look(path), self.alt, TEST_COMMAND], (5, 4, 4, 5, 4))
        undo = substitute(self.plan.bug_line, self._wrong(), self.plan.new, path)
        if self._wrong():
            yield self._trace(
                "second_try",
                Quality.T1,
                [look(path), self._wrong_fix(), TEST_COMMAND, look(path), undo, TEST_COMMAND],
                (5, 5, 5, 5, 5),
            )

    def elsewhere(self) -> Iterator[ExpertTrace]:
        """The call sites make up for the bug, the shared function keeps it."""
        if self.plan.shape.call_fix is None:
            return
        looks = [look(site.path) for site in self.plan.sites]
        edits = [self._site_fix(site) for site in self.plan.sites]
        scores = (3, 4, 3, 4, 3)
        yield self._trace("call_sites", Quality.T2, [*looks, *edits, TEST_COMMAND], scores)
        yield self._trace("call_sites", Quality.T2, [looks[0], edits[0], looks[1], edits[1]], scores)

    def noisy(self) -> Iterator[ExpertTrace]:
        """The clean fix with edits that nobody asked for."""
        path = self.plan.helper_path
        first, second = self.plan.sites
        word, other = self.plan.spare[:2]
        note = self.rng.choice(self.plan.notes)
        constant = f"echo '{word.upper()} = {self.rng.randint(2, 9)}' >> {second.path}"
        comment = f"sed -i '1i\\# {note}' {first.path}"
        unused = f"sed -i '1i\\import os' {self.rng.choice([first, second]).path}"
        function = f"printf '\\ndef {other}():\\n    return {self.rng.randint(2, 9)}\\n' >> {path}"
        weaker = self._weaken_test()
        for extra in (constant, comment):
            yield self._trace("noisy", Quality.T2, [look(path), self.fix, extra, TEST_COMMAND], (5, 5, 2, 4, 3))
        yield self._trace("noisy", Quality.T2, [look(path), self.fix, unused], (5, 5, 2, 3, 2))
        yield self._trace("noisy_more", Quality.T3, [look(path), self.fix, unused, function], (5, 4, 2, 2, 2))
        yield self._trace("noisy_more", Quality.T3, [look(path), self.fix, weaker, TEST_COMMAND], (4, 4, 2, 1, 2))

    def workarounds(self) -> Iterator[ExpertTrace]:
        """Only the example of the issue is made right, or the error is swallowed."""
        path = self.plan.helper_path
        scores: Scores = (1, 2, 3, 3, 2)
        value = literal(self.plan.case.want)
        if self.plan.plain:
            special = append(self.plan.def_line, f"    if {self._is_example()}: return {value}", path)
            yield self._trace("hardcode", Quality.T3, [look(path), special, TEST_COMMAND], scores, _WORKAROUND)
            yield self._trace("hardcode", Quality.T3, [look(path), special], scores, _WORKAROUND)
        edits = [
            append(3, f"    if {self._is_example()}: return {site_value(site, self.plan.case.want)}", site.path)
            for site in self.plan.sites
        ]
        looks = [look(site.path) for site in self.plan.sites]
        commands = [looks[0], edits[0], looks[1], edits[1]]
        yield self._trace("hardcode_sites", Quality.T3, commands, (1, 2, 2, 3, 2), _WORKAROUND)
        fallback = self.plan.shape.fallback
        if fallback is not None:
            pad, value = self._indent(), fill(fallback, self.plan.names)
            lines = f"{pad}try:\\n    &\\n{pad}except Exception:\\n{pad}    return {value}"
            swallow = f"sed -i '{self.plan.bug_line}s/.*/{lines}/' {path}"
            quality = Quality.T3 if judge(self.plan.task, [swallow]) else Quality.WRONG
            yield self._trace("swallow", quality, [look(path), swallow, TEST_COMMAND], (1, 2, 3, 2, 2))
            yield self._trace("swallow", quality, [look(path), swallow], (1, 2, 3, 2, 2))

    def rewrites(self) -> Iterator[ExpertTrace]:
        """The module is written anew, without what else it held."""
        lines = self._function()
        text = "\\n".join(line.replace("\\", "\\\\").replace("%", "%%") for line in lines) + "\\n"
        command = f"printf '{text}' > {self.plan.helper_path}"
        for extra in ([], [TEST_COMMAND]):
            commands = [look(self.plan.helper_path), command, *extra]
            yield self._trace("rewrite", Quality.T3, commands, (3, 3, 1, 2, 2), _REWRITE)

    def wrong(self) -> Iterator[ExpertTrace]:
        """What does not solve the task."""
        path = self.plan.helper_path
        first = self.plan.sites[0]
        show = look(path)
        yield self._trace("wrong_replacement", Quality.WRONG, [show, self._wrong_fix(), TEST_COMMAND])
        yield self._trace("wrong_replacement", Quality.WRONG, [show, self._wrong_fix()])
        line = self.plan.bug_line + self.rng.choice((-1, 1))
        miss = substitute(line, self.plan.old, self.plan.new, path)
        if self.plan.old not in self._line(line):
            yield self._trace("wrong_line", Quality.WRONG, [show, miss, TEST_COMMAND])
            yield self._trace("wrong_line", Quality.WRONG, [show, miss])
        yield self._trace("no_edit", Quality.WRONG, [show, TEST_COMMAND])
        yield self._trace("no_edit", Quality.WRONG, [show])
        yield self._trace("test_edit", Quality.WRONG, [look("test_visible.py"), self._weaken_test(), TEST_COMMAND])
        comment = append(self.plan.def_line, f"    # {self.rng.choice(self.plan.notes)}", path)
        yield self._trace("cosmetic", Quality.WRONG, [show, comment])
        if self.plan.shape.call_fix is not None:
            commands = [look(first.path), self._site_fix(first), TEST_COMMAND]
            yield self._trace("one_site", Quality.WRONG, commands)

    def _trace(
        self,
        strategy: str,
        quality: Quality,
        commands: Sequence[str],
        scores: Scores | None = None,
        flags: frozenset[str] = frozenset(),
    ) -> ExpertTrace:
        actions = (*commands, SUBMIT)
        wrong = quality is Quality.WRONG
        evidence: tuple[str, ...] = ()
        if not wrong and scores is not None and (flags or min(scores) <= 2):
            found = added_lines(self.plan.task.files, final_files(self.plan.task, actions))
            first = dict(reversed(found))
            evidence = tuple(f"{path}:{line}" for path, line in sorted(first.items()))
        return ExpertTrace(
            task=self.plan.task,
            actions=actions,
            quality=quality,
            strategy=strategy,
            scores=None if wrong else scores,
            flags=frozenset() if wrong else flags,
            evidence=evidence,
        )

    def _line(self, number: int) -> str:
        lines = self.plan.helper_lines
        return lines[number - 1] if 1 <= number <= len(lines) else ""

    def _indent(self) -> str:
        line = self._line(self.plan.bug_line)
        return line[: len(line) - len(line.lstrip())]

    def _wrong(self) -> str:
        return fill(self.plan.shape.wrong, self.plan.names)

    def _wrong_fix(self) -> str:
        return substitute(self.plan.bug_line, self.plan.old, self._wrong(), self.plan.helper_path)

    def _site_fix(self, site: Site) -> str:
        fixed = fill(self.plan.shape.call_fix or "", self.plan.names)
        return substitute(site.call_line, self.plan.call, fixed, site.path)

    def _is_example(self) -> str:
        tests = []
        for name, value in zip(self.plan.params, self.plan.case.args, strict=True):
            operator = "is" if value is None or isinstance(value, bool) else "=="
            tests.append(f"{name} {operator} {literal(value)}")
        return " and ".join(tests)

    def _weaken_test(self) -> str:
        lines = self.plan.visible.splitlines()
        number = next(index for index, line in enumerate(lines, 1) if "self.assert" in line)
        return f"sed -i '{number}s/self.*/pass/' test_visible.py"

    def _function(self) -> list[str]:
        """The repaired function alone."""
        start, lines = self.plan.def_line, list(self.plan.helper_lines)
        lines[self.plan.bug_line - 1] = lines[self.plan.bug_line - 1].replace(self.plan.old, self.plan.new, 1)
        stop = start
        while stop < len(lines) and lines[stop].startswith("    "):
            stop += 1
        return lines[start - 1 : stop]
