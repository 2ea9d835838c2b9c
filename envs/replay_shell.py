"""A workspace in memory and the few commands that scripted experts use, exact for the forms that it accepts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

_TOKEN = re.compile(r"\s*(?:'([^']*)'|(>>|&&|[<>|])|([A-Za-z0-9_./=+:,-]+))(?=\s|$)")


class CommandError(Exception):
    """A command failed: what it printed and its exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


class Shell:
    """Runs commands on files in memory. Raises ValueError for a command form that it does not know."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)
        self._folders: set[str] = set()
        self._commands: dict[str, Callable[[list[str], str], str]] = {
            "awk": self._awk,
            "cat": self._cat,
            "cp": self._cp,
            "echo": self._echo,
            "grep": self._grep,
            "head": self._head,
            "ls": self._ls,
            "mkdir": self._mkdir,
            "mv": self._mv,
            "printf": self._printf,
            "rm": self._rm,
            "sed": self._sed,
            "sort": self._sort,
            "tail": self._tail,
            "wc": self._wc,
        }

    def run(self, command: str) -> tuple[str, int]:
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
                stdin = self.files[path]
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

    def _read(self, message: str, path: str, code: int = 1) -> str:
        if path not in self.files:
            raise CommandError(f"{message}: No such file or directory\n", code)
        return self.files[path]

    def _is_folder(self, path: str) -> bool:
        return path in self._folders or any(name.startswith(path + "/") for name in self.files)

    def _awk(self, args: list[str], stdin: str) -> str:
        """Only the sum of a column."""
        match = re.fullmatch(r"\{s \+= \$(\d)\} END \{print s\}", args[0])
        _expect(match is not None and len(args) == 2, "awk", args)
        assert match is not None
        rows = [line.split() for line in _lines(self.files[args[1]])]
        return f"{sum(int(row[int(match.group(1)) - 1]) for row in rows)}\n"

    def _cat(self, args: list[str], stdin: str) -> str:
        return "".join(self._read(f"cat: {path}", path) for path in args)

    def _cp(self, args: list[str], stdin: str) -> str:
        _expect(len(args) == 2 and not self._is_folder(args[1]), "cp", args)
        self.files[args[1]] = self._read(f"cp: cannot stat '{args[0]}'", args[0])
        return ""

    def _echo(self, args: list[str], stdin: str) -> str:
        return " ".join(args) + "\n"

    def _grep(self, args: list[str], stdin: str) -> str:
        options, words = ([args[0]], args[1:]) if args[0].startswith("-") else ([], args)
        _expect(len(words) == 2 and options in ([], ["-n"], ["-v"]) and re.fullmatch(r"\w*", words[0]), "grep", args)
        pattern, path = words
        lines = _lines(self._read(f"grep: {path}", path, 2))
        found = [(number, line) for number, line in enumerate(lines, 1) if (pattern in line) != (options == ["-v"])]
        if not found:
            raise CommandError("", 1)
        return "".join(f"{number}:{line}\n" if options == ["-n"] else f"{line}\n" for number, line in found)

    def _head(self, args: list[str], stdin: str) -> str:
        return _text(self._input("head", args, stdin)[: int(args[1])])

    def _tail(self, args: list[str], stdin: str) -> str:
        return _text(self._input("tail", args, stdin)[-int(args[1]) :])

    def _input(self, program: str, args: list[str], stdin: str) -> list[str]:
        """Lines for `head` and `tail`: of a file or of the pipe."""
        _expect(args[0] == "-n" and len(args) in (2, 3), program, args)
        return _lines(self.files[args[2]] if len(args) == 3 else stdin)

    def _ls(self, args: list[str], stdin: str) -> str:
        _expect(args[:1] == ["-1"] and len(args) <= 2, "ls", args)
        prefix = args[1] + "/" if len(args) == 2 else ""
        paths = [*self.files, *(folder + "/" for folder in self._folders)]
        return _text(sorted({path[len(prefix) :].split("/")[0] for path in paths if path.startswith(prefix)}))

    def _mkdir(self, args: list[str], stdin: str) -> str:
        _expect(args[0] == "-p" and len(args) == 2, "mkdir", args)
        parts = args[1].split("/")
        self._folders |= {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}
        return ""

    def _mv(self, args: list[str], stdin: str) -> str:
        _expect(len(args) == 2 and not self._is_folder(args[1]), "mv", args)
        source, target = args
        text = self._read(f"mv: cannot stat '{source}'", source)
        if "/" in target and not self._is_folder(target.rpartition("/")[0]):
            raise CommandError(f"mv: cannot move '{source}' to '{target}': No such file or directory\n", 1)
        self._folders |= {source.rpartition("/")[0]} - {""}
        del self.files[source]
        self.files[target] = text
        return ""

    def _printf(self, args: list[str], stdin: str) -> str:
        _expect(len(args) == 1, "printf", args)
        known = {"\\n": "\n", "\\\\": "\\", "%%": "%"}
        return re.sub(r"\\.|%.", lambda match: known[match.group()], args[0])

    def _rm(self, args: list[str], stdin: str) -> str:
        _expect(len(args) == 1, "rm", args)
        self._read(f"rm: cannot remove '{args[0]}'", args[0])
        del self.files[args[0]]
        return ""

    def _sed(self, args: list[str], stdin: str) -> str:
        _expect(args[0] == "-i" and len(args) == 3, "sed", args)
        text = self._read(f"sed: can't read {args[2]}", args[2], 2)
        self.files[args[2]] = _text(edit(args[1], _lines(text)))
        return ""

    def _sort(self, args: list[str], stdin: str) -> str:
        options = args[:-1]
        _expect(options in ([], ["-n"], ["-u"]), "sort", args)
        lines = _lines(self.files[args[-1]])
        if options == ["-n"]:
            return _text(sorted(lines, key=lambda line: (int(line), line)))
        return _text(sorted(set(lines) if options else lines))

    def _wc(self, args: list[str], stdin: str) -> str:
        if args == ["-l"]:
            return f"{len(_lines(stdin))}\n"
        _expect(args[:1] == ["-w"] and len(args) == 2, "wc", args)
        return f"{len(self.files[args[1]].split())} {args[1]}\n"


def _expect(known: object, program: str, args: list[str]) -> None:
    if not known:
        raise ValueError(f"unknown form of {program}: {args}")


def _text(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


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
