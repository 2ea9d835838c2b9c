"""Calls as the services' own clients take them: signatures.json was read from the packages that it names."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

_RECORDED = json.loads((Path(__file__).parent / "signatures.json").read_text())


def bound(package: str, name: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments by name. Raises TypeError where the real function would not take them."""
    parameters = [
        inspect.Parameter(
            parameter,
            inspect._ParameterKind[kind],
            default=None if optional else inspect.Parameter.empty,
        )
        for parameter, kind, optional in _RECORDED[package][name]
    ]
    return inspect.Signature(parameters).bind(*args, **kwargs).arguments
