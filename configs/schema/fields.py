"""Types of values, with their bounds and messages, and the base of every section."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError


def _no_flag(value: Any) -> Any:
    """Pydantic would read `true` as 1, and text that looks like a number as that number."""
    if isinstance(value, bool | str):
        raise PydanticCustomError("number_type", "must be a number, not text, true or false")
    return value


def at_most(limit: int) -> AfterValidator:
    """Beyond any machine, and where clocks and C integers overflow."""

    def check(value: float) -> float:
        if abs(value) > limit:
            raise PydanticCustomError(
                "too_large", "is beyond what any machine can do (the limit is {limit})", {"limit": limit}
            )
        return value

    return AfterValidator(check)


Flag = Annotated[bool, Field(strict=True)]
Int = Annotated[int, BeforeValidator(_no_flag), at_most(2**63 - 1)]
Float = Annotated[float, BeforeValidator(_no_flag), at_most(10**9)]
PositiveInt = Annotated[Int, Field(gt=0), at_most(10**12)]
PositiveFloat = Annotated[Float, Field(gt=0)]
NonNegativeInt = Annotated[Int, Field(ge=0), at_most(10**12)]
NonNegativeFloat = Annotated[Float, Field(ge=0.0)]
Probability = Annotated[Float, Field(ge=0.0, le=1.0)]
Decay = Annotated[Float, Field(ge=0.0, lt=1.0)]


def _one_line(value: str) -> str:
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise PydanticCustomError("one_line", "must be one line of text")
    return value


Text = Annotated[str, Field(min_length=1)]
NonEmpty = Annotated[Text, AfterValidator(_one_line)]


def _against_config_folder(value: str, info: ValidationInfo) -> str:
    """A relative folder means one beside the configuration file (`configs.load` gives its folder)."""
    folder = (info.context or {}).get("folder")
    if folder is None:
        return value
    try:
        return str((folder / Path(value).expanduser()).resolve())
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"is not a usable path ({error}); give a folder that exists") from None


def _place_of_tasks(value: str, info: ValidationInfo) -> str:
    return value if value.startswith("hf://") else _against_config_folder(value, info)


InputFolder = Annotated[NonEmpty, AfterValidator(_against_config_folder)]
TaskPlace = Annotated[NonEmpty, AfterValidator(_place_of_tasks)]
ModelFolder = InputFolder

MAX_NAME = 239
"""A file system takes 255 bytes, and an earlier run of the name is kept with 16 more behind it."""


def run_name(value: str) -> str:
    """Names are folders, parts of Ray namespaces and W&B names."""
    if len(value) > MAX_NAME:
        raise ValueError(f"has {len(value)} characters and the folder of a run takes {MAX_NAME}; give a shorter name")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("._-")
        raise ValueError(
            "may hold only the letters A-Z and a-z, digits, '.', '_' and '-', and must start with a letter or a digit; "
            f"write e.g. name: {plain or 'my-run'}"
        )
    return value


def output_folder(value: str) -> str:
    """`~` is the home folder."""
    long = next((part for part in value.split("/") if len(os.fsencode(part)) > 255), None)
    if long is not None or len(os.fsencode(value)) > 3500:
        raise ValueError("is longer than file systems take (255 bytes a folder, 3,500 in all); give a shorter path")
    try:
        return str(Path(value).expanduser()) if value.startswith("~") else value
    except RuntimeError as error:
        raise ValueError(f"is not a usable path ({error}); give the parent folder of runs") from None


class Section(BaseModel):
    """Base of every section: unknown keys are refused and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, protected_namespaces=(), allow_inf_nan=False)
