"""What the commands of scripted experts print and do, computed in process: exact, and fast.

Only the command forms that experts use are known, anything else raises ValueError. For trusted code only: tests run in this
process.
"""

from __future__ import annotations

import builtins
import re
import types
import unittest
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from envs.patch import unified_diff
from envs.task import ExactAnswer, FinalState, HiddenTests, Task

SUBMIT = "submit"
TEST_COMMAND = "python3 -m unittest -q 2>&1 | tail -n 1"
"""How experts run the visible tests: the last line says "OK" or "FAILED (failures=1)"."""

_TOKEN = re.compile(r"\s*(?:'([^']*)'|(>>|&&|[<>|])|([A-Za-z0-9_./=+:,-]+))(?=\s|$)")


def replay(task: Task, actions: Sequence[str]) -> list[tuple[str, int]]:
    """Raw output and exit code of every action but the final submit or answer.

    Raises ValueError for unknown command forms.
    """
    return _run(task, actions)[1]


def final_files(task: Task, actions: Sequence[str]) -> dict[str, str]:
    """The workspace after the actions, path -> content. Raises ValueError for unknown command forms."""
    return _run(task, actions)[0].files


def patch_of(task: Task, actions: Sequence[str]) -> str:
    """What the actions change in the repository, as `git diff` prints it; empty for tasks without hidden tests."""
    if not isinstance(task.verifier, HiddenTests):
        return ""
    return unified_diff(task.files, final_files(task, actions))


def judge(task: Task, actions: Sequence[str]) -> bool:
    """The verifier's word on the state after the actions, or on the answer (M1.2)."""
    verifier = task.verifier
    if isinstance(verifier, ExactAnswer):
        return bool(actions) and actions[-1].strip() == verifier.answer
    files = final_files(task, actions)
    if isinstance(verifier, FinalState):
        return all(files.get(path) == content for path, content in verifier.files.items())
    names = verifier.modules or tuple(path.removesuffix(".py") for path in verifier.files)
    return run_tests({**files, **verifier.files}, names) == "OK"


def run_tests(files: Mapping[str, str], modules: Sequence[str]) -> str:
    """Last line of `python3 -m unittest -q MODULES` over in-memory files."""
    importer = _Importer(files)
    counts = _Counts()
    for name in modules:
        try:
            module = importer.load(name)
        except Exception:  # a module that does not import counts as one error, as in unittest
            counts.error_count += 1
            continue
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, unittest.TestCase):
                unittest.defaultTestLoader.loadTestsFromTestCase(value).run(counts)
    parts = [f"failures={counts.failure_count}"] * bool(counts.failure_count)
    parts += [f"errors={counts.error_count}"] * bool(counts.error_count)
    return f"FAILED ({', '.join(parts)})" if parts else "OK"


class _Counts(unittest.TestResult):
    """Counts without formatting tracebacks, which would take most of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.failure_count = 0
        self.error_count = 0

    def addFailure(self, test: Any, err: Any) -> None:
        self.failure_count += 1

    def addError(self, test: Any, err: Any) -> None:
        self.error_count += 1


class _Importer:
    """Imports modules from in-memory files into fresh namespaces, everything else as usual."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files
        self._loaded: dict[str, types.ModuleType] = {}
        self._builtins = {**vars(builtins), "__import__": self._import}

    def load(self, name: str) -> types.ModuleType:
        if name not in self._loaded:
            module = types.ModuleType(name)
            module.__dict__["__builtins__"] = self._builtins
            exec(_compiled(self._files[_path(name)], _path(name)), module.__dict__)
            self._loaded[name] = module
        return self._loaded[name]

    def _import(self, name: str, *rest: Any) -> types.ModuleType:
        return self.load(name) if _path(name) in self._files else __import__(name, *rest)


def _path(module: str) -> str:
    return module.replace(".", "/") + ".py"


@lru_cache(maxsize=2048)
def _compiled(source: str, path: str) -> types.CodeType:
    return compile(source, path, "exec")


class CommandError(Exception):
    """A command failed: what it printed and its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def _run(task: Task, actions: Sequence[str]) -> tuple[_Shell, list[tuple[str, int]]]:
    shell = _Shell(task.files)
    if isinstance(task.verifier, ExactAnswer):
        return shell, []
    return shell, [shell.run(action) for action in actions if action != SUBMIT]


class _Shell:
    """A workspace in memory and the few commands that experts use."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)
        self._commands: dict[str, Callable[[list[str], str], str]] = {
            "cat": self._cat,
            "echo": self._echo,
            "grep": self._grep,
            "printf": self._printf,
            "sed": self._sed,
            "tail": self._tail,
        }

    def run(self, command: str) -> tuple[str, int]:
        if command == TEST_COMMAND:
            names = sorted(path.removesuffix(".py") for path in self.files if re.fullmatch(r"test\w*\.py", path))
            return run_tests(self.files, names) + "\n", 0
        output = ""
        for pipeline in _split(_tokens(command), "&&"):
            text, code = self._pipeline(pipeline)
            output += text
            if code:
                return output, code
        return output, 0

    def _pipeline(self, tokens: list[_Token]) -> tuple[str, int]:
        errors, text, code = "", "", 0
        for part in _split(tokens, "|"):
            try:
                text, code = self._simple(part, text), 0
            except CommandError as error:
                errors, text, code = errors + error.message, "", error.code
        return errors + text, code

    def _simple(self, tokens: list[_Token], stdin: str) -> str:
        words: list[str] = []
        target: tuple[str, str] | None = None
        parts = iter(tokens)
        for token in parts:
            if not token.operator:
                words.append(token.text)
                continue
            path = next(parts).text
            if token.text == "<":
                stdin = self._read("bash", path)
            else:
                target = (token.text, path)
        if words[0] not in self._commands:
            raise ValueError(f"unknown command: {words[0]}")
        output = self._commands[words[0]](words[1:], stdin)
        if target is None:
            return output
        mode, path = target
        self.files[path] = (self.files.get(path, "") if mode == ">>" else "") + output
        return ""

    def _read(self, program: str, path: str) -> str:
        if path not in self.files:
            raise CommandError(f"{program}: {path}: No such file or directory\n", 2 if program == "grep" else 1)
        return self.files[path]

    def _cat(self, args: list[str], stdin: str) -> str:
        return "".join(self._read("cat", path) for path in args)

    def _echo(self, args: list[str], stdin: str) -> str:
        return " ".join(args) + "\n"

    def _printf(self, args: list[str], stdin: str) -> str:
        if len(args) != 1:
            raise ValueError("printf with arguments")
        known = {"\\n": "\n", "\\\\": "\\", "%%": "%"}
        return re.sub(r"\\.|%.", lambda match: known[match.group()], args[0])

    def _grep(self, args: list[str], stdin: str) -> str:
        options, pattern, *paths = args
        if options != "-n" or pattern or len(paths) != 1:
            raise ValueError("unknown form of grep")
        text = self._read("grep", paths[0])
        if not text:
            raise CommandError("", 1)
        return "".join(f"{number}:{line}\n" for number, line in enumerate(_lines(text), 1))

    def _tail(self, args: list[str], stdin: str) -> str:
        if args[:1] != ["-n"] or len(args) != 2:
            raise ValueError("unknown form of tail")
        return "".join(line + "\n" for line in _lines(stdin)[-int(args[1]) :])

    def _sed(self, args: list[str], stdin: str) -> str:
        if args[0] != "-i" or len(args) != 3:
            raise ValueError("unknown form of sed")
        text = self._read("sed", args[2]) if args[2] in self.files else None
        if text is None:
            raise CommandError(f"sed: can't read {args[2]}: No such file or directory\n", 2)
        self.files[args[2]] = "".join(line + "\n" for line in edit(args[1], _lines(text)))
        return ""


def edit(script: str, lines: list[str]) -> list[str]:
    """What sed makes of the lines with one command: substitute (first, or all with g), append, insert or delete."""
    match = re.fullmatch(r"(\d*)(?:(d)|([ai])\\(.*)|s([/|#])(.*))", script)
    if match is None:
        raise ValueError(f"unknown sed script: {script}")
    address, delete, insert, text, slash, rest = match.groups()
    if slash:
        pattern, template, flags = _split_substitution(rest, slash)
        regex, count = re.compile(pattern), 0 if flags == "g" else 1
        new = [
            regex.sub(template, line, count=count) if not address or number == int(address) else line
            for number, line in enumerate(lines, 1)
        ]
        return "\n".join(new).split("\n") if new else []
    index = int(address) - 1
    if index >= len(lines):
        return lines
    if delete:
        return lines[:index] + lines[index + 1 :]
    at = index + (insert == "a")
    return [*lines[:at], *_unescape_text(text), *lines[at:]]


def _unescape_text(text: str) -> list[str]:
    """Text of an a or i command: a backslash before n starts a new line, before anything else it is dropped."""
    return re.sub(r"\\(.)", lambda match: "\n" if match.group(1) == "n" else match.group(1), text).split("\n")


@lru_cache(maxsize=4096)
def _split_substitution(rest: str, slash: str) -> tuple[str, Any, str]:
    parts, current, index = [], "", 0
    while index < len(rest):
        if rest[index] == "\\" and index + 1 < len(rest):
            piece = rest[index : index + 2]
            current += slash if piece[1] == slash else piece
            index += 2
        elif rest[index] == slash:
            parts.append(current)
            current = ""
            index += 1
        else:
            current += rest[index]
            index += 1
    if len(parts) != 2 or current not in ("", "g"):
        raise ValueError(f"unknown sed substitution: {rest}")
    return _basic_regex(parts[0]), _replacement(parts[1]), current


def _basic_regex(pattern: str) -> str:
    """A POSIX basic regular expression as a Python one: only `.`, `x*`, `^` first, `$` last, escaped characters."""
    if re.search(r"\\[^.\[\]*^$/\\]|(?<!\\)\[", pattern):
        raise ValueError(f"unknown regular expression: {pattern}")
    result, index = "", 0
    while index < len(pattern):
        char = pattern[index]
        if char == "\\":
            result += re.escape(pattern[index + 1])
            index += 2
            continue
        special = char == "." or (char == "*" and index > 0) or (char == "^" and index == 0)
        special = special or (char == "$" and index == len(pattern) - 1)
        result += char if special else re.escape(char)
        index += 1
    return result


def _replacement(template: str) -> Callable[[re.Match[str]], str]:
    def expand(match: re.Match[str]) -> str:
        def piece(found: re.Match[str]) -> str:
            text = found.group()
            if text == "&":
                return match.group()
            if text == "\\n":
                return "\n"
            return text[1:]

        return re.sub(r"&|\\.", piece, template)

    return expand


class _Token:
    __slots__ = ("operator", "text")

    def __init__(self, text: str, operator: bool) -> None:
        self.text = text
        self.operator = operator


def _tokens(command: str) -> list[_Token]:
    tokens, position, command = [], 0, command.strip()
    while position < len(command):
        match = _TOKEN.match(command, position)
        if match is None:
            raise ValueError(f"unknown command form: {command}")
        quoted, operator, word = match.groups()
        tokens.append(_Token(operator or (quoted if quoted is not None else word), operator is not None))
        position = match.end()
    return tokens


def _split(tokens: list[_Token], operator: str) -> list[list[_Token]]:
    groups: list[list[_Token]] = [[]]
    for token in tokens:
        if token.operator and token.text == operator:
            groups.append([])
        else:
            groups[-1].append(token)
    return groups


def _lines(text: str) -> list[str]:
    return text.split("\n")[:-1] if text.endswith("\n") else text.split("\n")
