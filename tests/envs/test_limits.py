from __future__ import annotations

import os

import pytest

from configs.schema import DockerSandbox, JailSandbox, ModalSandbox
from envs.limits import unenforced
from envs.sandbox import make_provider
from infra.errors import SandboxError

BOUNDED = ("--memory=1g", "--pids-limit", "64", "--network", "inner")


def kernel(monkeypatch: pytest.MonkeyPatch, *, release: str, machine: str) -> None:
    about = os.uname()
    changed = os.uname_result((about.sysname, about.nodename, release, about.version, machine))
    monkeypatch.setattr(os, "uname", lambda: changed)


def docker(*arguments: str, allow_weaker: bool = False) -> DockerSandbox:
    return DockerSandbox(type="docker", image="img", docker_args=arguments, allow_weaker=allow_weaker)


def test_a_jail_here_has_every_limit() -> None:
    assert unenforced(JailSandbox()) == ()


@pytest.mark.parametrize(
    ("release", "machine", "word"),
    [("5.10.0-generic", "x86_64", "max_processes"), ("6.1", "riscv64", "filter of system calls")],
)
def test_a_host_that_cannot_enforce_a_limit_is_refused(
    monkeypatch: pytest.MonkeyPatch, release: str, machine: str, word: str
) -> None:
    kernel(monkeypatch, release=release, machine=machine)
    (missing,) = unenforced(JailSandbox())
    assert word in missing
    with pytest.raises(SandboxError, match="allow_weaker") as refusal:
        make_provider(JailSandbox())
    assert missing in str(refusal.value)
    make_provider(JailSandbox(allow_weaker=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (BOUNDED, []),
        (BOUNDED[1:], ["memory"]),
        (("-m", "1g", *BOUNDED[3:]), ["processes"]),
        (BOUNDED[:3], ["network 'default'"]),
        ((*BOUNDED[:3], "--net=host"), ["network 'host'"]),
        ((), ["memory", "processes", "network"]),
    ],
)
def test_containers_are_as_bounded_as_their_arguments(arguments: tuple[str, ...], words: list[str]) -> None:
    missing = unenforced(docker(*arguments))
    assert len(missing) == len(words)
    assert all(word in text for word, text in zip(words, missing, strict=True))
    if words:
        with pytest.raises(SandboxError, match="allow_weaker"):
            make_provider(docker(*arguments))
    make_provider(docker(*arguments, allow_weaker=True))


def test_what_holds_elsewhere_is_not_judged_from_here() -> None:
    assert unenforced(ModalSandbox(type="modal", image="img")) == ()
