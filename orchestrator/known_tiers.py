"""The tier of a passing patch where a task's scripted solutions tell it, without any grader. Pure.

For `minirepo` every script's quality is known by construction. A patch is known if it is a script's patch to the
letter, or the clean repair plus additions of a kind that the scripts have, whatever words stand in them. The rest is
unknown, and counted as that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from envs.replay import patch_of
from envs.task import ExpertSource, Task
from grader.evidence import ChangeSign, index_patch
from grader.rubric import Flag, Flags, Scores, Tier, tier_of

Change = tuple[str, ChangeSign, str]
"""(path, sign, text) of one changed line."""

_ADDITIONS = (
    ("comment", re.compile(r"#.*")),
    ("import", re.compile(r"import os")),
    ("constant", re.compile(r"[A-Z]+ = \d+")),
    ("function", re.compile(r"def \w+\(\):|    return \d+|")),
)
"""What the scripts add to a clean repair (envs/minirepo/experts.py), by line."""
_TIERS: Mapping[frozenset[str], Tier] = {
    frozenset({"comment"}): Tier.T2,
    frozenset({"import"}): Tier.T2,
    frozenset({"constant"}): Tier.T2,
    frozenset({"import", "function"}): Tier.T3,
    frozenset({"test"}): Tier.T3,
}
"""The kinds of additions that a script has, and its tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownTiers:
    """What the scripted solutions of one task say of patches."""

    exact: Mapping[str, Tier]
    """Patch -> tier; the best where two scripts arrive at one patch."""
    clean: Sequence[Set[Change]]
    """Changed lines of the tier-1 patches."""

    @classmethod
    def of(cls, source: ExpertSource, task: Task) -> KnownTiers:
        """Runs every script in memory: up to half a second. A source without scripts knows nothing."""
        exact: dict[str, Tier] = {}
        for trace in source.experts(task):
            if trace.scores is None:
                continue
            tier = tier_of(Scores(*trace.scores), Flags(frozenset(map(Flag, trace.flags))))
            patch = patch_of(task, trace.actions)
            exact[patch] = min(exact.get(patch, tier), tier)
        return cls(exact=exact, clean=[_changes(patch) for patch, tier in exact.items() if tier is Tier.T1])

    def __call__(self, patch: str) -> Tier | None:
        """The tier of a patch that passed; None if nothing is known of it."""
        if (tier := self.exact.get(patch)) is not None:
            return tier
        changes = _changes(patch)
        for clean in self.clean:
            if clean < changes:
                return _TIERS.get(frozenset(_kind(change) for change in changes - clean))
        return None


def _changes(patch: str) -> Set[Change]:
    return {(line.path, line.sign, line.text) for line in index_patch(patch).changed}


def _kind(change: Change) -> str:
    path, sign, text = change
    if path == "test_visible.py":
        return "test"
    if sign is not ChangeSign.ADDED:
        return "removal"
    return next((kind for kind, pattern in _ADDITIONS if pattern.fullmatch(text)), "other")
