"""What a task is. Frozen data, picklable, small; nothing here touches a sandbox."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class TaskKind(StrEnum):
    """Only `code` groups are graded; the others keep outcome advantages (M1, last paragraph)."""

    CODE = "code"
    GENERAL = "general"
    SINGLE_TURN = "single_turn"


class Split(StrEnum):
    """Train and held-out tasks share neither templates nor identifiers."""

    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenTests:
    """Run hidden tests against the extracted patch in a fresh sandbox (M1.2)."""

    files: Mapping[str, str]
    """Path -> content. With `modules` alone in the memory of the process that runs them; else written over the patched
    tree, in the place of whatever the patch put there."""
    command: str
    """Shell command, run in the repository root; without `modules`, exit code 0 means pass. Tested code that runs in
    the same process can forge that."""
    modules: tuple[str, ...] = ()
    """unittest modules (dotted, from the repository root) that `command` runs, visible and hidden. With them the
    verifier's own runner runs them in a process that tested code never enters (`envs.unittest_runner`). They may call
    what they import from the repository with plain data and with what it returned, but cannot pass it functions of
    theirs, derive from its classes or patch it."""
    timeout_s: float = 60.0


class Results(StrEnum):
    """What a command's tests are judged by."""

    EXIT_CODE = "exit_code"
    """The command alone: 0 is a pass."""
    LOG = "log"
    """A status for each test, read from what the command printed."""
    JUNIT = "junit"
    """A status for each test, from the JUnit XML that the command writes to $GAGAR_REPORT, outside the repository."""
    JSON = "json"
    """The same from JSON: {"tests": [{"name": ..., "status": "PASSED"}]}."""
    REWARD_FILE = "reward_file"
    """The number in /logs/verifier/reward.txt: 1 is a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryTests(HiddenTests):
    """Hidden tests of a real repository, judged test by test where their results say so.

    They run in the same sandbox as the tested code, which can forge whatever they print or write.
    """

    patch: str = ""
    """Unified diff of the tests, applied over the patched tree after the files that it names were put back."""
    outside: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Absolute folder -> path -> content: what the tests need outside of the repository."""
    results: Results = Results.EXIT_CODE
    parser: str = ""
    """Whose reader a log needs (`envs.reports.read_log`); empty for the usual runners."""
    must_pass: tuple[str, ...] = ()
    """Names of the tests that must pass, as the results give them; empty: all that ran, and at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalState:
    """The workspace must end in a given state."""

    files: Mapping[str, str | None]
    """Path -> exact content, or None for a path that must not exist. Paths not named may hold anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactAnswer:
    """The last message, stripped, must equal the answer."""

    answer: str


Verifier = HiddenTests | FinalState | ExactAnswer


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A container image that holds the repository of a task, and what its tests need."""

    name: str
    folder: str
    """Where the repository is in it, absolute."""
    patch: str = ""
    """Unified diff that belongs to the start of the task."""
    memory_mib: int | None = None
    cpus: float | None = None
    """What the task asks for; None for what the sandboxes of the run have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a source's configuration gives each sandbox of its tasks; None for what they have otherwise."""

    cpus: float | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task: what the policy sees, where it starts, and how it is judged."""

    task_id: str
    """Unique and stable: "<family>/<split>/<seed>/<index>"."""
    source: str
    """Name of the source in the mix."""
    kind: TaskKind
    split: Split
    statement: str
    """What the policy is told."""
    files: Mapping[str, str]
    """Initial workspace, path -> content; for code tasks committed as the base of a git repository. Large ones are
    read where they lie (`envs.tree.RepoTree`); empty where only the image has them."""
    verifier: Verifier
    image: Image | None = None
    """Sandboxes that have a folder of that name use what is in it instead of `files`."""
    needs: Needs = Needs()
    """Goes before what the image says."""
    reference_patch: str | None = None
    """A unified diff that solves the task; explains it to the grader where configured, never a criterion (M2.3)."""
    meta: Mapping[str, str] = field(default_factory=dict)
    """Free labels for reports, e.g. {"bug": "boundary", "template": "stock"}."""

    @property
    def needs_sandbox(self) -> bool:
        """Single-turn tasks are answered without one."""
        return self.kind is not TaskKind.SINGLE_TURN


class TaskSource(Protocol):
    """An endless, seekable stream of tasks: the same (split, index) always gives the same task."""

    name: str
    kind: TaskKind

    def task(self, split: Split, index: int) -> Task:
        """The task at `index` >= 0 of a split."""
        ...


class Quality(StrEnum):
    """Quality of an expert's solution, known by construction."""

    T1 = "T1"
    T2 = "T2"
    T3 = "T3"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTrace:
    """One scripted solution: feeds supervised warm-up and grader training, never a reward."""

    task: Task
    actions: tuple[str, ...]
    """Bash commands in order (for single-turn tasks: the one answer). The last one is `submit` for sandboxed tasks."""
    quality: Quality
    strategy: str
    """Name of the script, e.g. "clean", "call_sites", "hardcode", "swallow", "noisy", "rewrite", "wrong_line"."""
    scores: tuple[int, int, int, int, int] | None
    """approach, precision, minimality, side_effects, consistency (M3.1); None for wrong solutions."""
    flags: frozenset[str] = frozenset()
    """Subset of unrequested_rewrite, test_workaround, severe_process_issue, unresolved_regression."""
    evidence: tuple[str, ...] = ()
    """For every flag and score <= 2 at least one citation "path:line" that resolves in the patched tree's diff."""


class ExpertSource(TaskSource, Protocol):
    """A task source whose tasks come with scripted solutions."""

    def experts(self, task: Task) -> Iterator[ExpertTrace]:
        """Every scripted solution of a task, several a quality."""
        ...
