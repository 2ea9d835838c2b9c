"""The system calls that a jailed command may not make, as a seccomp program for bubblewrap.

Refused is what no other limit of a jail reaches: memory that belongs to no process or file system, kernel objects that
namespaces do not divide (keyrings, sockets of virtual machines), and looking into other processes.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    audit_arch: int
    numbers: dict[str, int]
    x32_bit: int | None = None
    """Numbers from here on are a second way to make the same calls."""


# Said not to exist, so that programs fall back on files; files count against the workspace.
_ABSENT = ("memfd_create", "memfd_secret", "io_uring_setup")
_FORBIDDEN = (
    "shmget",
    "msgget",
    "semget",
    "add_key",
    "request_key",
    "keyctl",
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "kcmp",
    "pidfd_getfd",
    "bpf",
    "perf_event_open",
    "userfaultfd",
)
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
"""Divided by network namespaces; others, AF_VSOCK above all, reach past them."""

_NEW = {"memfd_secret": 447, "io_uring_setup": 425, "pidfd_getfd": 438}
_MACHINES = {
    "x86_64": _Machine(
        audit_arch=0xC000003E,
        x32_bit=0x40000000,
        numbers={
            **_NEW, "memfd_create": 319, "shmget": 29, "msgget": 68, "semget": 64, "add_key": 248, "request_key": 249,
            "keyctl": 250, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "bpf": 321,
            "perf_event_open": 298, "userfaultfd": 323, "socket": 41,
        },
    ),
    "aarch64": _Machine(
        audit_arch=0xC00000B7,
        numbers={
            **_NEW, "memfd_create": 279, "shmget": 194, "msgget": 186, "semget": 190, "add_key": 217,
            "request_key": 218, "keyctl": 219, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271,
            "kcmp": 272, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "socket": 198,
        },
    ),
}  # fmt: skip

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCH, _ARG_0 = 0, 4, 16
"""Byte offsets in the kernel's `seccomp_data`."""


def seccomp_program(machine: str | None = None) -> bytes | None:
    """The program for a machine as `uname -m` names it (None: this one); None where none is known."""
    about = _MACHINES.get(machine or os.uname().machine)
    if about is None:
        return None
    words = [_step(_LOAD, _ARCH), *_unless(about.audit_arch, errno.ENOSYS), _step(_LOAD, _NUMBER)]
    if about.x32_bit is not None:
        words += [_step(_AT_LEAST, about.x32_bit, 0, 1), _refuse(errno.ENOSYS)]
    for names, error in ((_ABSENT, errno.ENOSYS), (_FORBIDDEN, errno.EPERM)):
        for name in names:
            words += [_step(_EQUAL, about.numbers[name], 0, 1), _refuse(error)]
    words += [_step(_EQUAL, about.numbers["socket"], 1, 0), _step(_RETURN, _ALLOW), _step(_LOAD, _ARG_0)]
    for family in _FAMILIES:
        words += [_step(_EQUAL, family, 0, 1), _step(_RETURN, _ALLOW)]
    return b"".join([*words, _refuse(errno.EAFNOSUPPORT)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _unless(value: int, error: int) -> list[bytes]:
    return [_step(_EQUAL, value, 1, 0), _refuse(error)]


def _refuse(error: int) -> bytes:
    return _step(_RETURN, _ERRNO | error)
