"""Using a repository's code from a process that it never enters: what the verifier's runner is made of.

One process imports the code and does with it what it is asked to (`serve`): get, call, compare. The other one asks
(`Link`). Only plain data comes back: exact builtin types, made anew, so that no `__eq__` of the tested code takes part
in a comparison with a plain value. Everything else stays there, and a `Remote` here stands for it.

Sent into the sandbox as text, as `envs.unittest_runner` is: its Python may be older, and nothing of ours is there.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import sys
from collections.abc import Callable, Iterable
from typing import IO, Any

NUMBERS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift")
BINARY = (*NUMBERS, "getitem", "delitem")
ORDER = ("lt", "le", "gt", "ge")
UNARY = ("neg", "pos", "abs", "invert")
OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in (*BINARY, *ORDER, *UNARY, "setitem", "eq")},
    **{name: getattr(builtins, name) for name in ("getattr", "setattr", "len", "iter", "next", "bool", "str", "repr")},
    **{name: getattr(builtins, name) for name in ("hash", "int", "float", "dir", "isinstance", "issubclass")},
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
}
CONTAINERS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}
LARGE_INT = 2**63
STANDARD = frozenset(getattr(sys, "stdlib_module_names", ()))


class Lost(Exception):
    """The tested code ended its process, or answered nonsense."""


class TestedCodeError(Exception):
    """Stands for what the tested code raised where no exception of the same type can be made here."""


# --- Both sides: values as JSON.


def encode(value: Any, refer: Callable[[Any], Any]) -> Any:
    """A value as JSON: exact builtin types as they are, anything else as `refer` says."""
    kind: Any = type(value)
    if kind in (type(None), bool, str):
        return value
    if kind is int:
        return value if -LARGE_INT < value < LARGE_INT else {"int": hex(value)}
    if kind is float:
        return {"float": value.hex()}
    if kind is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind.__name__ in CONTAINERS and kind is CONTAINERS[kind.__name__]:
        return {kind.__name__: [encode(item, refer) for item in value]}
    if kind is dict:
        return {"dict": [[encode(key, refer), encode(item, refer)] for key, item in value.items()]}
    if kind is slice:
        return {"slice": [encode(part, refer) for part in (value.start, value.stop, value.step)]}
    name = value.__name__ if isinstance(value, type) else ""
    if vars(builtins).get(name) is value:
        return {"builtin": name}
    return refer(value)


def decode(data: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """The value of what `encode` made. Raises Lost for anything else."""
    if data is None or type(data) in (bool, int, str):
        return data
    try:
        ((kind, content),) = data.items()
        if kind in CONTAINERS:
            return CONTAINERS[kind]([decode(item, resolve) for item in content])
        if kind == "dict":
            return {decode(key, resolve): decode(item, resolve) for key, item in content}
        if kind == "int":
            return int(content, 16)
        if kind == "float":
            return float.fromhex(content)
        if kind == "complex":
            return complex(*map(float.fromhex, content))
        if kind in ("bytes", "bytearray"):
            return getattr(builtins, kind).fromhex(content)
        if kind == "slice":
            return slice(*(decode(part, resolve) for part in content))
        if kind == "builtin" and isinstance(getattr(builtins, content), type):
            return getattr(builtins, content)
        return resolve(kind, content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Lost(f"no value: {data!r:.200}") from error


# --- The child: does what it is asked to with the repository.


def serve(requests: IO[str], replies: IO[str]) -> None:
    """Answer until there are no more requests."""
    import contextlib
    import importlib
    import site
    import traceback

    operations = {**OPERATIONS, "import": importlib.import_module}
    objects: list[Any] = []
    places: dict[int, int] = {}

    def refer(value: Any) -> Any:
        place = places.get(id(value))
        if place is None:
            place = places[id(value)] = len(objects)
            objects.append(value)  # and kept alive, so that its id stays its own
        about: dict[str, Any] = {"place": place, "name": str(getattr(value, "__name__", type(value).__name__))}
        if isinstance(value, type) and issubclass(value, BaseException):
            about["module"] = value.__module__
            about["bases"] = [encode(base, refer) for base in value.__bases__ if issubclass(base, BaseException)]
        bases: tuple[Any, ...] = (int, float, str, bytes, *CONTAINERS.values(), dict)
        for base in bases:
            if isinstance(value, base):
                about["plain"] = encode(base(value), refer)
                break
        return {"ref": about}

    def resolve(kind: str, content: Any) -> Any:
        if kind != "ref":
            raise ValueError(kind)
        return objects[content]

    site.main()
    sys.argv = ["unittest"]
    sys.path.insert(0, os.getcwd())
    for line in requests:
        try:
            request = json.loads(line)
            args = [decode(item, resolve) for item in request["args"]]
            kwargs = {name: decode(item, resolve) for name, item in request["kwargs"].items()}
            reply = {"value": encode(operations[request["do"]](*args, **kwargs), refer)}
        except BaseException as error:
            reply = {
                "raised": encode(type(error), refer),
                "args": [encode(item, refer) for item in error.args],
                "it": refer(error),
                "text": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
            }
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        replies.write(json.dumps({**reply, "number": request["number"]}) + "\n")
        replies.flush()


# --- The parent: runs the tests.


class Link:
    """The way to the child."""

    def __init__(self, requests: IO[str], replies: IO[str]) -> None:
        self.requests = requests
        self.replies = replies
        self.number = 0
        self.remotes: dict[int, Any] = {}

    def ask(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """The answer to one request, or what it raised."""
        self.number += 1
        request = {
            "number": self.number,
            "do": operation,
            "args": [encode(item, self.refer) for item in args],
            "kwargs": {name: encode(item, self.refer) for name, item in kwargs.items()},
        }
        try:
            self.requests.write(json.dumps(request) + "\n")
            self.requests.flush()
            reply = json.loads(self.replies.readline())
            if reply["number"] == self.number:
                if "raised" not in reply:
                    return decode(reply["value"], self.resolve)
                raised = self.raised(reply)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise Lost("the tested code ended its process, or broke off the connection") from error
        if reply["number"] != self.number:
            raise Lost("an answer to nothing that was asked")
        raise raised

    def refer(self, value: Any) -> Any:
        """See `encode`."""
        if isinstance(value, BaseException):
            value = getattr(value, "_it", None)
        place = vars(value).get("_place") if isinstance(value, (Remote, type)) else None
        if type(place) is not int:
            raise TypeError(f"{value!r:.100} cannot go to the tested code: only plain data can, and what came from it")
        return {"ref": place}

    def resolve(self, kind: str, content: Any) -> Any:
        """See `decode`."""
        if kind != "ref":
            raise ValueError(kind)
        place = content["place"]
        if place not in self.remotes:
            if "bases" in content:
                self.remotes[place] = self.exception_class(content)
            else:
                plain = [decode(content["plain"], self.resolve)] if "plain" in content else []
                self.remotes[place] = Remote(self, place, str(content["name"]), plain)
        return self.remotes[place]

    def exception_class(self, content: Any) -> type:
        """A class of exceptions of the tested code for `assertRaises`: the standard library's own, or made anew."""
        name, module = str(content["name"]), str(content["module"])
        # Never those by which unittest steers itself.
        if module.partition(".")[0] in STANDARD - {"unittest"}:
            known = getattr(sys.modules.get(module), name, None)
            if isinstance(known, type) and issubclass(known, Exception):
                return known

        def attribute(error: Any, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return self.ask("getattr", error._it, name)

        body = {"_place": content["place"], "_it": None, "__getattr__": attribute}
        body["__str__"] = lambda error: self.ask("str", error._it)
        return type(name, tuple(decode(base, self.resolve) for base in content["bases"]), body)

    def raised(self, reply: Any) -> Exception:
        """The exception that a reply tells of, with the child's traceback as its cause."""
        kind, text = decode(reply["raised"], self.resolve), str(reply["text"])
        args = [decode(item, self.resolve) for item in reply["args"]]
        try:
            if not issubclass(kind, Exception):
                raise TypeError(kind)
            error: Exception = kind.__new__(kind, *args)
            error.args = tuple(args)
            if "_place" in vars(kind):
                error.__dict__["_it"] = decode(reply["it"], self.resolve)
        except Exception:  # nothing that can be said about such a class is certain
            error = TestedCodeError(f"{getattr(kind, '__name__', kind)}: {args}")
        error.__cause__ = TestedCodeError("\n" + text)
        return error


class Remote:
    """Stands for an object of the tested code: what is done with it is done there."""

    _link: Link
    _place: int
    _plain: list[Any]

    def __init__(self, link: Link, place: int, name: str, plain: list[Any]) -> None:
        # `plain`: its value as exact builtin data, where its type derives from one; a list of one or none.
        vars(self).update(_link=link, _place=place, _name=name, _plain=plain)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__version__", "__all__"):
            raise AttributeError(name)
        return self._link.ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.ask("setattr", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._link.ask("call", self, *args, **kwargs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Remote):
            return self is other or self._link.ask("eq", self, other) is True
        return bool(self._plain) and bool(self._plain[0] == other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._plain[0] if self._plain else self._link.ask("hash", self))

    def __contains__(self, value: object) -> bool:
        return any(item == value for item in self)

    def __iter__(self) -> Any:
        return self._link.ask("iter", self)

    def __instancecheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._link.ask("isinstance", value, self) is True

    def __subclasscheck__(self, value: Any) -> bool:
        return isinstance(value, Remote) and self._link.ask("issubclass", value, self) is True

    def __enter__(self) -> Any:
        return self._link.ask("getattr", self, "__enter__")()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> Any:
        # The tested code's own exceptions are known to it; others it only hears of.
        known = getattr(error, "_it", None)
        return self._link.ask("getattr", self, "__exit__")(None if known is None else kind, known, None)


def forward(name: str) -> Callable[..., Any]:
    """A method that has the child do an operation."""
    return lambda self, *args: self._link.ask(name, self, *args)


def compare(name: str) -> Callable[[Remote, Any], Any]:
    """A method that decides an order with plain data here."""

    def method(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._link.ask(name, self, other)
        return OPERATIONS[name](self._plain[0], other) if self._plain else NotImplemented

    return method


for _name in ORDER:
    setattr(Remote, f"__{_name}__", compare(_name))
for _name in (*BINARY, *UNARY, "setitem", "len", "next", "bool", "str", "repr", "int", "float", "dir"):
    setattr(Remote, f"__{_name.rstrip('_')}__", forward(_name))
