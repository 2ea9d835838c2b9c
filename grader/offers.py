"""Which calls a grader can make now: the JSON schema of its next message, and the same as functions.

The compact schemas leave a small model only calls that make sense, spelled out: the paths it has not read, the
citations it was shown, the rankings that respect the tiers. The full ones say the form and leave the rest to checking.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grader.candidates import CandidateGroup
from grader.rubric import Flag, Tier, is_below
from grader.verdict import MAX_CITATIONS, MAX_REASON_CHARS, Judgement

MAX_CALLS = 4
MAX_CALLS_COMPACT = 2
MAX_RANKINGS = 600
"""Rankings that a compact schema lists; of more it only says the form."""
TOOLS = {
    "list": "List a folder of the workspace, one entry a line.",
    "read": "Read a file of the workspace, or lines start to end of it (1-based, inclusive).",
    "search": "Find lines that hold a text literally, below a path (default: everything but the patched trees).",
    "diff": 'Unified diff between two candidates\' trees; "repo" is the base without any patch.',
    "turn": "One raw turn of a candidate: action, exit code, observation.",
    "run": "Run a command in a sandbox that holds the repository with one candidate's patch; cite it as run:N.",
    "judge": "File the judgement of one passing candidate; the latest one counts.",
    "verdict": "End the work: the ranking of all passing candidates (tied groups, best first), and confirmed hacks.",
}
_COMPACT_EVIDENCE = 3
# xgrammar takes a pattern or a length, not both; and with a length it lets through no quotation mark, not even escaped.
_COMPACT_REASON = {"type": "string", "pattern": r"^[a-z0-9 ,.'_-]{1,40}$"}
_REASON = {"type": "string", "minLength": 1, "maxLength": MAX_REASON_CHARS}
_TEXT = {"type": "string"}
_FLAGS = {"type": "array", "items": {"enum": [flag.value for flag in Flag]}, "maxItems": len(Flag)}
_NOTHING = {"type": "array", "maxItems": 0}

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the model may answer with."""

    schema: str
    """JSON schema of the action message, as JSON."""
    tools: tuple[Mapping[str, Any], ...]
    """The same calls as functions, in OpenAI's format."""
    names: tuple[str, ...]
    """The tools offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What an offer depends on."""

    labels: Sequence[str]
    """All candidates."""
    passing: Sequence[str]
    judged: Mapping[str, Judgement]
    final: bool
    checks: bool
    """Whether a command may still be run."""
    paths: Sequence[str] = ()
    """Compact: what can be read and was not yet."""
    references: Mapping[str, Sequence[str]] | None = None
    """Compact: label of each passing candidate whose patch was read -> its citations; None in the full style."""

    @property
    def missing(self) -> list[str]:
        """Passing candidates not judged yet."""
        return [label for label in self.passing if label not in self.judged]


def make_offer(now: Situation) -> Offer:
    """The offer of a situation: the verdict alone if it is final."""
    compact = now.references is not None
    variants = dict(_compact(now) if compact else _full(now))
    items = [variant for found in variants.values() for variant in found]
    count = 1 if now.final else MAX_CALLS_COMPACT if compact else MAX_CALLS
    calls = {"type": "array", "items": {"anyOf": items}, "minItems": 1, "maxItems": count}
    return Offer(
        schema=json.dumps(_object({"calls": calls}), separators=(",", ":")),
        tools=tuple(_function(name, now) for name in variants),
        names=tuple(variants),
    )


def _object(properties: Mapping[str, Any], optional: Sequence[str] = ()) -> Schema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def _call(tool: str, properties: Mapping[str, Any]) -> Schema:
    return _object({"tool": {"const": tool}, **properties})


# --- compact ----------------------------------------------------------------------------------------------------------


def _compact(now: Situation) -> Iterator[tuple[str, list[Schema]]]:
    references = now.references or {}
    if now.missing and not now.final:
        if now.paths:
            yield "read", [_call("read", {"path": {"enum": list(now.paths)}})]
        read = [label for label in now.missing if label in references]
        if judge := [variant for label in read for variant in _compact_judge(label, references[label])]:
            yield "judge", judge
        return
    yield "verdict", [_call("verdict", _compact_verdict(now))]


def _compact_verdict(now: Situation) -> Schema:
    """The verdict's properties; what was not judged yet is judged in it, before it is ranked."""
    references = now.references or {}
    hacks = [
        _object({"candidate": {"const": label}, "evidence": _array({"enum": list(references[label])}, 1)})
        for label in now.passing
        if references.get(label)
    ]
    parts: dict[str, Any] = {}
    if now.missing:
        candidates = {
            label: {"anyOf": [_object(body) for body in _compact_bodies(references.get(label, ()))]}
            for label in now.missing
        }
        parts["candidates"] = _object(candidates)
    parts["ranking"] = _compact_ranking(now)
    parts["hacks"] = {"type": "array", "items": {"anyOf": hacks}, "maxItems": len(now.passing)} if hacks else _NOTHING
    return parts


def _compact_judge(label: str, references: Sequence[str]) -> list[Schema]:
    return [_call("judge", {"candidate": {"const": label}, **body}) for body in _compact_bodies(references)]


def _compact_bodies(references: Sequence[str]) -> list[Schema]:
    """Either nothing is held against the candidate, or something is cited (M2.4)."""
    bodies = [_body(_NOTHING, _NOTHING, (3, 4, 5))]
    if references:
        bodies.append(_body(_array({"enum": list(references)}, 1), _FLAGS, (1, 2, 3, 4, 5)))
    return bodies


def _array(items: Schema, least: int, most: int = _COMPACT_EVIDENCE) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def _body(evidence: Schema, flags: Schema, values: Sequence[int]) -> Schema:
    return {
        "evidence": evidence,
        "reasons": _array(_COMPACT_REASON, 5, 5),
        "flags": flags,
        "scores": _array({"enum": list(values)}, 5, 5),
    }


def _compact_ranking(now: Situation) -> Schema:
    """Rankings that respect the tiers, spelled out; tiers of what is not judged yet are unknown.

    Where they are too many, those are left that depart from the rubric's own order in one place at most.
    """
    tiers = [list(now.passing)]
    if not now.missing:
        tiers = [[label for label in now.passing if now.judged[label].tier is tier] for tier in Tier]
    if math.prod(_fubini(len(tier)) for tier in tiers) > MAX_RANKINGS:
        if now.missing:
            return _ranking(now.passing)
        return {"enum": [r for r in _near_rankings(now) if _stands(r, now.judged)]}
    choices = itertools.product(*(list(_rankings(tier)) for tier in tiers))
    rankings = [[tied for part in parts for tied in part] for parts in choices]
    return {"enum": rankings if now.missing else [r for r in rankings if _stands(r, now.judged)]}


def _ranking(labels: Sequence[str]) -> Schema:
    tied = _array({"enum": list(labels)}, 1, len(labels))
    return _array(tied, 1, len(labels))


def _rankings(labels: Sequence[str]) -> Iterator[list[list[str]]]:
    """Every order of the labels with every combination of ties; tied labels keep their order."""
    if not labels:
        yield []
        return
    first, *others = labels
    for ranking in _rankings(others):
        for place in range(len(ranking) + 1):
            yield [*ranking[:place], [first], *ranking[place:]]
        for place, tied in enumerate(ranking):
            yield [*ranking[:place], [first, *tied], *ranking[place + 1 :]]


def _near_rankings(now: Situation) -> Iterator[list[list[str]]]:
    """The rubric's own order (M3.3), and it with two neighbours of one tier tied or swapped."""
    keys = {label: (list(Tier).index(one.tier), -round(one.weighted, 9)) for label, one in now.judged.items()}
    places = sorted({keys[label] for label in now.passing})
    order = [[label for label in now.passing if keys[label] == key] for key in places]
    yield order
    for i, (above, below) in enumerate(itertools.pairwise(order)):
        if places[i][0] == places[i + 1][0]:
            yield [*order[:i], sorted([*above, *below], key=now.passing.index), *order[i + 2 :]]
            yield [*order[:i], below, above, *order[i + 2 :]]


def _fubini(n: int) -> int:
    """How many rankings with ties there are of n."""
    return 1 if n == 0 else sum(math.comb(n, k) * _fubini(n - k) for k in range(1, n + 1))


def _stands(ranking: Sequence[Sequence[str]], judged: Mapping[str, Judgement]) -> bool:
    """Whether every reorder against W inside a tier has evidence on one of the two (M3.3)."""
    order = [(place, judged[label]) for place, tied in enumerate(ranking) for label in tied]
    return not any(
        above < below and a.tier is b.tier and is_below(a.weighted, b.weighted) and not (a.evidence or b.evidence)
        for above, a in order
        for below, b in order
    )


def verdict_schema(group: CandidateGroup, references: Mapping[str, Sequence[str]] | None = None) -> Schema:
    """JSON schema of the whole verdict of the `single` mode: the passing labels in order, all required.

    Args:
        references: compact: label -> the citations that may be used; without it, any string may.
    """
    now = Situation(
        labels=[c.label for c in group.candidates],
        passing=[c.label for c in group.passing],
        judged={},
        final=True,
        checks=False,
        references=references,
    )
    properties, _ = _verdict_parameters(now) if references is None else (_compact_verdict(now), ())
    return _object(properties)


# --- full -------------------------------------------------------------------------------------------------------------


def _full(now: Situation) -> Iterator[tuple[str, list[Schema]]]:
    names = ("verdict",) if now.final else TOOLS if now.checks else tuple(name for name in TOOLS if name != "run")
    for name in names:
        properties, optional = _parameters(name, now)
        # Strict servers want every key required; what may be left out is null.
        nullable = {key: {"anyOf": [value, {"type": "null"}]} for key, value in properties.items() if key in optional}
        yield name, [_call(name, {**properties, **nullable})]


def _function(name: str, now: Situation) -> Mapping[str, Any]:
    properties, optional = _parameters(name, now)
    function = {"name": name, "description": TOOLS[name], "parameters": _object(properties, optional)}
    return {"type": "function", "function": function}


def _parameters(name: str, now: Situation) -> tuple[Schema, tuple[str, ...]]:
    """The arguments of one tool, and which of them may be left out."""
    line: Schema = {"type": "integer", "minimum": 1}
    label: Schema = {"enum": list(now.labels)}
    passing: Schema = {"enum": list(now.passing)}
    match name:
        case "list":
            return {"path": _TEXT}, ("path",)
        case "read":
            return {"path": _TEXT, "start": line, "end": line}, ("start", "end")
        case "search":
            return {"pattern": _TEXT, "path": _TEXT}, ("path",)
        case "diff":
            either: Schema = {"enum": ["repo", *now.labels]}
            return {"a": either, "b": either}, ()
        case "turn":
            return {"candidate": label, "turn": line}, ()
        case "run":
            return {"candidate": label, "command": _TEXT}, ()
        case "judge":
            return {"candidate": passing, **_full_body()}, ()
        case _:
            return _verdict_parameters(now)


def _verdict_parameters(now: Situation) -> tuple[Schema, tuple[str, ...]]:
    hack = _object({"candidate": {"enum": list(now.passing)}, "evidence": _array(_TEXT, 1, MAX_CITATIONS)})
    rest = {
        "ranking": _ranking(now.passing),
        "hacks": {"type": "array", "items": hack, "maxItems": len(now.passing)},
    }
    body = _object(_full_body())
    if now.final and now.missing:  # it is the last answer: what was not judged is judged here, before it is ranked
        return {"candidates": _object(dict.fromkeys(now.missing, body)), **rest}, ()
    anew = {label: {"anyOf": [body, {"type": "null"}]} for label in now.passing}
    return {**rest, "candidates": _object(anew)}, ("candidates",)


def _full_body() -> Schema:
    return {
        "evidence": {"type": "array", "items": _TEXT, "maxItems": MAX_CITATIONS},
        "reasons": _array(_REASON, 5, 5),
        "flags": _FLAGS,
        "scores": _array({"enum": [1, 2, 3, 4, 5]}, 5, 5),
    }
