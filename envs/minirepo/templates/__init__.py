"""Function templates by split; the bug kinds are shared, the templates are not."""

from __future__ import annotations

from collections.abc import Mapping

from envs.minirepo.shape import Shape
from envs.minirepo.templates import heldout_crash, heldout_data, heldout_values, train_crash, train_data, train_values
from envs.task import Split

SHAPES: Mapping[Split, tuple[Shape, ...]] = {
    Split.TRAIN: (*train_values.SHAPES, *train_data.SHAPES, *train_crash.SHAPES),
    Split.HELDOUT: (*heldout_values.SHAPES, *heldout_data.SHAPES, *heldout_crash.SHAPES),
}
"""Every template of a split."""

KINDS: tuple[str, ...] = tuple(dict.fromkeys(shape.kind for shape in SHAPES[Split.TRAIN]))
"""Names of the bug kinds."""
