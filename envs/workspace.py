"""The workspace of a task: how it starts, and what the policy changed in it."""

from __future__ import annotations

from envs.sandbox import Sandbox
from envs.shell import batch, unpack_commands
from envs.task import HiddenTests, Task
from infra.errors import WorkspaceError

SETUP_TIMEOUT_S = 60.0
MAX_PATCH_BYTES = 1024 * 1024
"""A longer patch is cut there, and so no longer applies."""

BASE_REF = "refs/gagar/base"
_DATE = "2024-01-01T00:00:00+0000"
# Fixed author, date and message: the same files give the same commit id everywhere.
_COMMIT = f"""
git init -q --template= --initial-branch=main . &&
printf '[user]\\n\\tname = developer\\n\\temail = developer@example.com\\n[gc]\\n\\tauto = 0\\n' >> .git/config &&
mkdir -p .git/info && printf '__pycache__/\\n*.pyc\\n' > .git/info/exclude &&
git add -A -f . &&
GIT_AUTHOR_DATE='{_DATE}' GIT_COMMITTER_DATE='{_DATE}' git commit -q --allow-empty -m 'Base' &&
git update-ref {BASE_REF} HEAD
"""
# The policy may have changed the repository's settings: hooks, filters and monitors of its own must not run here.
_GIT = "git -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.quotePath=true -c core.autocrlf=false"
_DIFF = f"""
{_GIT} add -A . &&
{_GIT} diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames --src-prefix=a/ --dst-prefix=b/ \
{BASE_REF} -- . | head -c {MAX_PATCH_BYTES}; exit ${{PIPESTATUS[0]}}
"""


async def prepare(sandbox: Sandbox, task: Task) -> None:
    """Write the task's files; for a code task, commit them as the base of a git repository.

    One round trip for a small task. Raises SandboxError when the sandbox is lost, WorkspaceError when it cannot hold
    the task.
    """
    commands = unpack_commands(task.files)
    if isinstance(task.verifier, HiddenTests):
        commands.append(_COMMIT)
    for script in batch((command, 1) for command in commands):
        result = await sandbox.run(script, timeout_s=SETUP_TIMEOUT_S)
        if result.exit_code != 0:
            raise WorkspaceError(f"the workspace of {task.task_id} could not be set up: {result.output[-500:]}")


async def extract_patch(sandbox: Sandbox) -> str:
    """Everything that changed since the base commit, new and binary files included, as `git diff` prints it.

    Empty where nothing changed, and where the policy broke the repository so that git cannot tell: both are verified as
    they are. Raises SandboxError only when the sandbox is lost.
    """
    result = await sandbox.run(_DIFF, timeout_s=SETUP_TIMEOUT_S)
    return result.output if result.exit_code == 0 else ""
