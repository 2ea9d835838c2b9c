"""The workspace of a task: how it starts, and what the policy changed in it."""

from __future__ import annotations

import base64
import shlex

from envs.sandbox import WORKSPACE, Sandbox, SandboxProvider
from envs.shell import batch, file_commands, unpack_commands
from envs.task import HiddenTests, Image, Task
from envs.tree import RepoTree
from infra.errors import ImageError, WorkspaceError

SETUP_TIMEOUT_S = 60.0
ADOPT_TIMEOUT_S = 300.0
"""A repository of an image can hold many thousand files."""
MAX_PATCH_BYTES = 1024 * 1024
"""A longer patch is cut there, and so no longer applies."""

BASE_REF = "refs/gagar/base"
_DATE = "2024-01-01T00:00:00+0000"
_ADD = "git add -A -f ."
# Fixed author, date and message: the same files give the same commit id everywhere.
_COMMIT = """
git init -q --template= --initial-branch=main . &&
printf '[user]\\n\\tname = developer\\n\\temail = developer@example.com\\n[gc]\\n\\tauto = 0\\n' >> .git/config &&
mkdir -p .git/info && printf '__pycache__/\\n*.pyc\\n' > .git/info/exclude &&
{ADD} &&
GIT_AUTHOR_DATE='{DATE}' GIT_COMMITTER_DATE='{DATE}' git commit -q --allow-empty -m 'Base' &&
git update-ref {BASE_REF} HEAD
""".replace("{DATE}", _DATE).replace("{BASE_REF}", BASE_REF)
_TRACKED, _START_PATCH, _PACKED = "/tmp/.tracked", "/tmp/.start.patch", "/tmp/.tree"
_NOT_THERE = 79
# The history of a repository in an image often holds the answer, as commits after the one that the task starts from.
# What it ignores (built files, packages) stays where it is, and outside of the base and of every patch.
_ADOPT = f"""
[ -d {{FOLDER}} ] && [ -n "$(ls -A {{FOLDER}})" ] || exit {_NOT_THERE}
if [ "$(readlink -f {{FOLDER}})" != {WORKSPACE} ]; then
    cd / && rmdir {WORKSPACE} && ln -s {{FOLDER}} {WORKSPACE} && cd {{FOLDER}} || exit 1
fi
git config --global --add safe.directory '*' || exit 1
if [ -d .git ]; then git ls-files -z > {_TRACKED} && rm -rf .git; else find . -type f -print0 > {_TRACKED}; fi
"""
_ADD_ADOPTED = f"xargs -0 -r sh -c 'git add -f -- \"$@\" 2>/dev/null || true' add < {_TRACKED} && git add -A ."
# The policy may have changed the repository's settings: hooks, filters and monitors of its own must not run here.
_GIT = "git -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.quotePath=true -c core.autocrlf=false"
# No command runs any more: a lock is what one left that was killed. Files may hold any bytes, and output only text.
_DIFF = f"""
rm -rf .git/index.lock
{_GIT} add -A . && printf '\\n=' &&
{_GIT} diff --cached --binary --no-color --no-ext-diff --no-textconv --no-renames --src-prefix=a/ --dst-prefix=b/ \
{BASE_REF} -- . | head -c {MAX_PATCH_BYTES} | base64 -w0; exit ${{PIPESTATUS[0]}}
"""


async def start(provider: SandboxProvider, task: Task) -> Sandbox:
    """A sandbox for a task, of its image where the provider has images. Raises SandboxError, and ImageError (which is a
    WorkspaceError) that names the task whose image cannot be had."""
    try:
        return await provider.start(task)
    except ImageError as error:
        raise ImageError(f"{task.meta.get('record', task.task_id)}: {error.message}") from error


async def prepare(sandbox: Sandbox, task: Task) -> None:
    """Put the task's files in place; for a code task, commit them as the base of a git repository.

    One round trip for a small task. Raises SandboxError when the sandbox is lost, WorkspaceError when it cannot hold
    the task or has not got its files.
    """
    if task.image is not None and await _adopt(sandbox, task, task.image):
        return
    if task.image is not None and not task.files:
        raise WorkspaceError(
            f"{task.task_id} needs a sandbox made of {task.image.name}, with its repository in {task.image.folder}; "
            "use a rollout.sandbox.type that has images (docker, kubernetes, modal), or name a folder of repositories "
            "(sources.*.repos)"
        )
    if isinstance(task.files, RepoTree):
        unpack = f"tar -xzmf {_PACKED} --no-same-owner --no-same-permissions && rm {_PACKED}"
        commands = [*file_commands(_PACKED, task.files.packed()), unpack]
    else:
        commands = unpack_commands(task.files)
    if isinstance(task.verifier, HiddenTests):
        commands.append(_COMMIT.replace("{ADD}", _ADD))
    await _run(sandbox, task, commands, SETUP_TIMEOUT_S)


async def _adopt(sandbox: Sandbox, task: Task, image: Image) -> bool:
    """Make the folder of the image the workspace; false where a new sandbox has nothing there."""
    result = await sandbox.run(_ADOPT.replace("{FOLDER}", shlex.quote(image.folder)), timeout_s=ADOPT_TIMEOUT_S)
    if result.exit_code == _NOT_THERE:
        return False
    if result.exit_code != 0:
        raise WorkspaceError(f"{image.folder} of {image.name} cannot be the workspace: {result.output[-500:]}")
    commands = []
    if image.patch.strip():
        commands = file_commands(_START_PATCH, image.patch.encode("utf-8", errors="surrogateescape"))
        commands.append(f"git apply --whitespace=nowarn {_START_PATCH} && rm {_START_PATCH}")
    await _run(sandbox, task, [*commands, _COMMIT.replace("{ADD}", _ADD_ADOPTED)], ADOPT_TIMEOUT_S)
    return True


async def _run(sandbox: Sandbox, task: Task, commands: list[str], timeout_s: float) -> None:
    for script in batch((command, 1) for command in commands):
        result = await sandbox.run(script, timeout_s=timeout_s)
        if result.exit_code != 0:
            raise WorkspaceError(f"the workspace of {task.task_id} could not be set up: {result.output[-500:]}")


async def extract_patch(sandbox: Sandbox) -> str:
    """Everything that changed since the base commit, new and binary files included, as `git diff` prints it.

    Bytes that are no UTF-8 come as surrogate escapes. Empty where nothing changed, and where the policy broke the
    repository so that git cannot tell: both are verified as they are. Raises SandboxError only when the sandbox is
    lost.
    """
    result = await sandbox.run(_DIFF, timeout_s=SETUP_TIMEOUT_S)
    if result.exit_code != 0:
        return ""
    return base64.b64decode(result.output.rpartition("\n=")[2]).decode("utf-8", errors="surrogateescape")
