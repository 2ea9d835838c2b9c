"""What looks like a secret, and must therefore stand neither in a configuration nor in a message about one."""

from __future__ import annotations

import re

HIDDEN = "***"

_WORDS = ("TOKEN", "KEY", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS")
_SHAPES = (
    r"(?:sk|pk|rk)-[\w-]{6,}",
    r"gh[pousr]_\w{6,}",
    r"github_pat_\w{6,}",
    r"hf_\w{6,}",
    r"glpat-[\w-]{6,}",
    r"wandb_v\d+_\w{6,}",
)
_VALUE = re.compile(rf"(?<![\w-])(?:{'|'.join(_SHAPES)}|AKIA\w{{12,}}|xox[abprs]-[\w-]{{6,}})")
_LOGIN = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
_HEADER = re.compile(
    r"(?P<before>(?i:authorization[\"']*\s*[:=]\s*[\"']*(?:bearer|basic|token)?\s*)"
    r"|(?i:bearer)\s+(?=[\w.~+/=-]*\d)"
    r"|(?i:(?:x-)?api[-_]key[\"']*\s*[:=]\s*[\"']*)"
    r"|(?i:wandb[^\n]{0,60}?\b)(?=[0-9a-f]{40}\b))[\w.~+/=-]{6,}"
)
"""What stands behind the name of a header or service that takes keys. W&B's are 40 hex digits, as commits are."""
_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_][\w.-]*)(?P<sign>\s*[=:]\s*)(?P<value>\"[^\"]*\"|'[^']*'|[^\s,\]}{'\"=]+)")
_SHORT_ENV = re.compile(r"^-[a-zA-Z]*?e=?(?=[A-Za-z_])")
"""`-e` of `docker run` with its value in the same argument, alone or behind other short options (-ite NAME=VALUE)."""


def names_secret(name: str) -> bool:
    """Whether a variable or key of this name would hold a secret: API_KEY, githubToken, PGPASSWORD; not api_key_env."""
    last = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name.rsplit(".", 1)[-1]).upper()
    return not last.endswith("_ENV") and any(word.endswith(_WORDS) for word in re.split(r"[^A-Z0-9]+", last))


def is_secret(text: str) -> bool:
    """Whether the text itself has the shape of a well-known kind of key, or is an address with a login."""
    return bool(_VALUE.search(text) or _LOGIN.search(text))


def secret_in_argument(argument: str) -> str | None:
    """Which variable one argument of `docker run` writes a secret into ("" where it has no name); None: no secret.

    `-e NAME` and `--env-file FILE` hold none: the value comes from elsewhere.
    """
    option, equals, rest = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    name, assigned, value = _SHORT_ENV.sub("", rest).partition("=")
    if assigned and value and names_secret(name):
        return name
    if equals and rest and names_secret(option):
        return option
    return "" if is_secret(argument) else None


def redact(text: str) -> str:
    """The text with everything that looks like a secret replaced by ***."""

    def hide(found: re.Match[str]) -> str:
        no_variable = found["name"].endswith("_env") and not found["value"].strip("'\"").isidentifier()
        return f"{found['name']}{found['sign']}{HIDDEN}" if no_variable or names_secret(found["name"]) else found[0]

    return _ASSIGNED.sub(hide, hide_shapes(text))


def hide_shapes(text: str) -> str:
    """The text with well-known kinds of keys, logins in addresses and what stands in headers that take keys replaced by
    ***. What is assigned to a name stays, whatever the name: see `redact`."""
    text = _LOGIN.sub(HIDDEN, _VALUE.sub(HIDDEN, text))
    return _HEADER.sub(lambda found: found["before"] + HIDDEN, text)
