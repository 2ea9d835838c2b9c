"""Answers of a grader's model that must move no advantage (M2.6, M1.10), each with the reason that is counted for it.

All are about one group: four passing trajectories, one failing. Most are a valid verdict with one thing changed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from grader_parts import CLEAN, HARDCODED, NOISY, group_of, request_of

from grader.exchange import GradeRequest
from grader.verdict import FallbackReason
from rollout.trajectory import Transcript

OUTCOMES = [(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, ""), (True, CLEAN)]
GROUP = group_of(OUTCOMES)
BY_ID = {c.trajectory.trajectory_id: c.label for c in GROUP.candidates}
A, B, C, FAILING, D = (BY_ID[f"g1/{slot}.0"] for slot in range(5))
"""Labels of the clean fix, the noisy one, the hard-coded one, the failing one, and a second clean one."""
WHY = ["fits", "exact", "small", "none seen", "as the code around it"]
LINE = "shop/core.py:2"
"""A line of C's patch, and shown by all others."""


def bad_request() -> tuple[GradeRequest, list[Transcript]]:
    """The group as it is handed to a grader."""
    return request_of(OUTCOMES)


def one(*scores: int, evidence: tuple[str, ...] = (), flags: tuple[str, ...] = ()) -> dict[str, Any]:
    """One candidate's part of a verdict."""
    return {"evidence": list(evidence), "reasons": list(WHY), "flags": list(flags), "scores": list(scores)}


def good() -> dict[str, Any]:
    """A valid verdict: T1 A = D, T2 B, T3 C."""
    return {
        "candidates": {
            A: one(5, 5, 5, 5, 5),
            B: one(5, 5, 2, 4, 3, evidence=("shop/extra.py:1",)),
            C: one(1, 2, 3, 3, 2, evidence=(LINE,), flags=("test_workaround",)),
            D: one(5, 5, 5, 5, 5),
        },
        "ranking": [[A, D], [B], [C]],
        "hacks": [],
    }


TEXT = json.dumps(good())
Change = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadVerdict:
    """One answer and what becomes of it."""

    name: str
    text: str
    reason: FallbackReason
    complete: bool = True
    """False: the model was cut at its token limit."""


def put(*path: Any, to: Any) -> Change:
    """Sets what `path` leads to."""

    def apply(data: dict[str, Any]) -> None:
        _at(data, path[:-1])[path[-1]] = to

    return apply


def drop(*path: Any) -> Change:
    """Removes what `path` leads to."""

    def apply(data: dict[str, Any]) -> None:
        del _at(data, path[:-1])[path[-1]]

    return apply


def score(to: Any, place: int = 0) -> Change:
    """Sets one score of A."""
    return put("candidates", A, "scores", place, to=to)


def reasons(to: Any) -> Change:
    """Sets the reasons of A."""
    return put("candidates", A, "reasons", to=to)


def cite(*texts: Any, label: str = C) -> Change:
    """Sets the evidence of C, who is judged negatively and needs some."""
    return put("candidates", label, "evidence", to=list(texts))


def rank(*tied: Any) -> Change:
    """Sets the ranking."""
    return put("ranking", to=list(tied))


def hack(*labels: Any, evidence: tuple[str, ...] = ("turn:1",)) -> Change:
    """Calls these hacks."""
    return put("hacks", to=[{"candidate": label, "evidence": list(evidence)} for label in labels])


def rename(label: str, to: str) -> Change:
    """Gives A another name, everywhere."""

    def apply(data: dict[str, Any]) -> None:
        data["candidates"] = {to if key == label else key: value for key, value in data["candidates"].items()}
        data["ranking"] = [[to if key == label else key for key in tied] for tied in data["ranking"]]

    return apply


def both(*changes: Change) -> Change:
    """Several changes, in order."""

    def apply(data: dict[str, Any]) -> None:
        for change in changes:
            change(data)

    return apply


def _at(data: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        data = data[key]
    return data


_WORSE = put("candidates", D, to=one(5, 5, 5, 5, 4))
"""D below A inside T1: W 4.9 against 5."""

R = FallbackReason
SHAPES: list[tuple[str, Change, FallbackReason]] = [
    ("no candidates", drop("candidates"), R.SCHEMA),
    ("no ranking", drop("ranking"), R.SCHEMA),
    ("no hacks", drop("hacks"), R.SCHEMA),
    ("tiers from the model", put("tiers", to={A: "T1"}), R.SCHEMA),
    ("a tier from the model", put("candidates", C, "tier", to="T1"), R.SCHEMA),
    ("a factor from the model", put("candidates", A, "factor", to=1.0), R.SCHEMA),
    ("a weighted score from the model", put("candidates", A, "weighted", to=5.0), R.SCHEMA),
    ("an advantage from the model", put("advantages", to={A: 10.0}), R.SCHEMA),
    ("an extra key in a hack", put("hacks", to=[{"candidate": A, "evidence": ["turn:1"], "sure": 1}]), R.SCHEMA),
    ("candidates as an array", put("candidates", to=[one(5, 5, 5, 5, 5)]), R.SCHEMA),
    ("candidates as null", put("candidates", to=None), R.SCHEMA),
    ("a candidate as an array of scores", put("candidates", A, to=[5, 5, 5, 5, 5]), R.SCHEMA),
    ("a candidate as null", put("candidates", A, to=None), R.SCHEMA),
    ("a ranking not nested", rank(A, D, B, C), R.SCHEMA),
    ("a ranking in words", put("ranking", to=f"{A} = {D} > {B} > {C}"), R.SCHEMA),
    ("a ranking as an object", put("ranking", to={A: 1, D: 1, B: 2, C: 3}), R.SCHEMA),
    ("an empty tied group", rank([A, D], [], [B], [C]), R.SCHEMA),
    ("numbers for labels", rank([1, 4], [B], [C]), R.SCHEMA),
    ("labels nested too deeply", rank([[A, D]], [[B]], [[C]]), R.SCHEMA),
    ("hacks as null", put("hacks", to=None), R.SCHEMA),
    ("hacks as labels", put("hacks", to=[A]), R.SCHEMA),
    ("hacks as an object", put("hacks", to={A: ["turn:1"]}), R.SCHEMA),
    ("a hack of several", put("hacks", to=[{"candidate": [A, D], "evidence": ["turn:1"]}]), R.SCHEMA),
    ("an unknown flag", put("candidates", A, "flags", to=["ugly"]), R.SCHEMA),
    ("a flag in upper case", put("candidates", C, "flags", to=["TEST_WORKAROUND"]), R.SCHEMA),
    ("flags as an object", put("candidates", A, "flags", to={"test_workaround": True}), R.SCHEMA),
    ("no flags", drop("candidates", A, "flags"), R.SCHEMA),
    ("no evidence list", drop("candidates", A, "evidence"), R.SCHEMA),
    ("evidence as a string", put("candidates", C, "evidence", to=LINE), R.SCHEMA),
    ("evidence as an object", cite({"path": "shop/core.py", "line": 2}), R.SCHEMA),
    ("evidence without end", cite(*[LINE] * 9), R.SCHEMA),
    ("a huge citation", cite("x" * 500), R.SCHEMA),
    ("evidence with a lone surrogate", cite("\ud800:1"), R.SCHEMA),
    ("a group id that is no text", put("group_id", to=1), R.SCHEMA),
]
SCORES: list[tuple[str, Change, FallbackReason]] = [
    ("no scores", drop("candidates", A, "scores"), R.SCHEMA),
    ("a score of 0", score(0), R.BAD_SCORE),
    ("a score of 6", score(6, 4), R.BAD_SCORE),
    ("a negative score", score(-5), R.BAD_SCORE),
    ("a fraction", score(4.5), R.BAD_SCORE),
    ("a whole float", score(5.0), R.BAD_SCORE),
    ("a boolean score", score(True), R.BAD_SCORE),
    ("a score as text", score("5"), R.BAD_SCORE),
    ("a null score", score(None), R.BAD_SCORE),
    ("a score in a list", score([5]), R.BAD_SCORE),
    ("a NaN score", score(float("nan")), R.BAD_SCORE),
    ("an infinite score", score(float("inf")), R.BAD_SCORE),
    ("a score without end", score(10**4000), R.BAD_SCORE),
    ("four scores", put("candidates", A, "scores", to=[5, 5, 5, 5]), R.BAD_SCORE),
    ("six scores", put("candidates", A, "scores", to=[5] * 6), R.BAD_SCORE),
    ("scores by name", put("candidates", A, "scores", to={"approach": 5}), R.BAD_SCORE),
    ("scores as null", put("candidates", A, "scores", to=None), R.BAD_SCORE),
    ("one score for all five", put("candidates", A, "scores", to=5), R.BAD_SCORE),
]
REASONS: list[tuple[str, Change, FallbackReason]] = [
    ("no reasons", drop("candidates", A, "reasons"), R.SCHEMA),
    ("four reasons", reasons(WHY[:4]), R.SCHEMA),
    ("six reasons", reasons([*WHY, "and more"]), R.SCHEMA),
    ("an empty reason", reasons([*WHY[:4], ""]), R.SCHEMA),
    ("a blank reason", reasons([*WHY[:4], " \t "]), R.SCHEMA),
    ("a reason of two lines", reasons(["fits\nscore it 5", *WHY[1:]]), R.SCHEMA),
    ("a reason with a line separator", reasons(["fits\u2028score it 5", *WHY[1:]]), R.SCHEMA),
    ("a reason that ends its line", reasons(["fits\n", *WHY[1:]]), R.SCHEMA),
    ("a reason with an escape sequence", reasons(["\x1b[2Jfits", *WHY[1:]]), R.SCHEMA),
    ("a reason with a lone surrogate", reasons(["fits \udc80", *WHY[1:]]), R.SCHEMA),
    ("a long reason", reasons(["x" * 201, *WHY[1:]]), R.SCHEMA),
    ("a null reason", reasons([None, *WHY[1:]]), R.SCHEMA),
    ("reasons as one text", reasons("all is well"), R.SCHEMA),
    ("reasons by name", reasons({"approach": "fits"}), R.SCHEMA),
]
MEMBERS: list[tuple[str, Change, FallbackReason]] = [
    ("another group's id", put("group_id", to="g2"), R.MISMATCH),
    ("an empty group id", put("group_id", to=""), R.MISMATCH),
    ("the group's id in upper case", put("group_id", to="G1"), R.MISMATCH),
    ("another group's id and a missing candidate", both(put("group_id", to="g2"), rank([A])), R.MISMATCH),
    ("a passing candidate not scored", drop("candidates", D), R.MISSING_CANDIDATE),
    ("a passing candidate not ranked", rank([A], [B], [C]), R.MISSING_CANDIDATE),
    ("a passing candidate in neither", both(drop("candidates", D), rank([A], [B], [C])), R.MISSING_CANDIDATE),
    ("the worst one left out", both(drop("candidates", C), rank([A, D], [B])), R.MISSING_CANDIDATE),
    ("an empty ranking", rank(), R.MISSING_CANDIDATE),
    ("no candidate", put("candidates", to={}), R.MISSING_CANDIDATE),
    ("a hack left out of the ranking", both(rank([D], [B], [C]), hack(A)), R.MISSING_CANDIDATE),
    ("ranked twice", rank([A, D], [B], [C], [A]), R.DUPLICATE_CANDIDATE),
    ("tied with itself", rank([A, D, A], [B], [C]), R.DUPLICATE_CANDIDATE),
    ("one ranked twice, another not at all", rank([A, A], [B], [C]), R.DUPLICATE_CANDIDATE),
    ("a hack twice", hack(A, A), R.DUPLICATE_CANDIDATE),
    ("an unknown label ranked", rank([A, D], [B], [C], ["C9"]), R.UNKNOWN_CANDIDATE),
    ("an unknown label scored", put("candidates", "C9", to=one(5, 5, 5, 5, 5)), R.UNKNOWN_CANDIDATE),
    ("an unknown hack", hack("C7"), R.UNKNOWN_CANDIDATE),
    ("C0", rename(A, "C0"), R.UNKNOWN_CANDIDATE),
    ("a label with a leading zero", rename(A, A.replace("C", "C0")), R.UNKNOWN_CANDIDATE),
    ("trajectory ids for labels", rename(A, "g1/0.0"), R.UNKNOWN_CANDIDATE),
    ("a label in lower case", rename(A, A.lower()), R.UNKNOWN_CANDIDATE),
    ("a label with a space", rename(A, A + " "), R.UNKNOWN_CANDIDATE),
    ("a label with a zero-width space", rename(A, A + "\u200b"), R.UNKNOWN_CANDIDATE),
    ("a Cyrillic look-alike", rename(A, A.replace("C", "\u0421")), R.UNKNOWN_CANDIDATE),
    ("a full-width look-alike", rename(A, "\uff23" + A[1:]), R.UNKNOWN_CANDIDATE),
    ("an Arabic digit", rename(A, "C" + chr(0x660 + int(A[1:]))), R.UNKNOWN_CANDIDATE),
    ("a surrogate for a label", rename(A, "\ud800"), R.UNKNOWN_CANDIDATE),
    ("an empty label", rename(A, ""), R.UNKNOWN_CANDIDATE),
    ("the failing one ranked", rank([A, D], [B], [C], [FAILING]), R.FAILING_RANKED),
    ("the failing one ranked first", rank([FAILING], [A, D], [B], [C]), R.FAILING_RANKED),
    ("the failing one tied with the best", rank([A, D, FAILING], [B], [C]), R.FAILING_RANKED),
    ("the failing one scored", put("candidates", FAILING, to=one(5, 5, 5, 5, 5)), R.FAILING_RANKED),
    ("the failing one in a passing one's place", rename(A, FAILING), R.FAILING_RANKED),
    ("the failing one a hack", hack(FAILING), R.FAILING_RANKED),
]
ORDER: list[tuple[str, Change, FallbackReason]] = [
    ("T2 above T1", rank([B], [A, D], [C]), R.ORDER_AGAINST_TIER),
    ("T3 first", rank([C], [A, D], [B]), R.ORDER_AGAINST_TIER),
    ("T3 above T2", rank([A, D], [C], [B]), R.ORDER_AGAINST_TIER),
    ("T2 between two of T1", rank([A], [B], [D], [C]), R.ORDER_AGAINST_TIER),
    ("upside down", rank([C], [B], [A, D]), R.ORDER_AGAINST_TIER),
    ("a tie across tiers", rank([A, D], [B, C]), R.ORDER_AGAINST_TIER),
    ("all tied", rank([A, B, C, D]), R.ORDER_AGAINST_TIER),
    ("scores that contradict the first place", put("candidates", A, to=one(4, 4, 3, 4, 4)), R.ORDER_AGAINST_TIER),
    (
        "a flag that contradicts the first place",
        put("candidates", A, to=one(5, 5, 5, 5, 5, evidence=("turn:2",), flags=("test_workaround",))),
        R.ORDER_AGAINST_TIER,
    ),
    ("against W without evidence", both(_WORSE, rank([D], [A], [B], [C])), R.REORDER_WITHOUT_EVIDENCE),
    (
        "against W, on evidence that resolves to nothing",
        both(_WORSE, cite("turn:9", label=D), rank([D], [A], [B], [C])),
        R.REORDER_WITHOUT_EVIDENCE,
    ),
    (
        "against W, on evidence about a third",
        both(_WORSE, cite("turn:2", label=C), rank([D], [A], [B], [C])),
        R.REORDER_WITHOUT_EVIDENCE,
    ),
]
EVIDENCE: list[tuple[str, Change, FallbackReason]] = [
    ("a flag without evidence", cite(), R.UNRESOLVED_EVIDENCE),
    ("a low score without evidence", cite(label=B), R.UNRESOLVED_EVIDENCE),
    (
        "a flag on good scores without evidence",
        both(put("candidates", D, "flags", to=["severe_process_issue"]), rank([A], [B], [D], [C])),
        R.UNRESOLVED_EVIDENCE,
    ),
    ("a score of 1 without evidence", both(score(1), rank([D], [B], [A, C])), R.UNRESOLVED_EVIDENCE),
    ("a line that is not there", cite("shop/core.py:99"), R.UNRESOLVED_EVIDENCE),
    ("line 0", cite("shop/core.py:0"), R.UNRESOLVED_EVIDENCE),
    ("a negative line", cite("shop/core.py:-2"), R.UNRESOLVED_EVIDENCE),
    ("a range of lines", cite("shop/core.py:2-3"), R.UNRESOLVED_EVIDENCE),
    ("a file without a line", cite("shop/core.py"), R.UNRESOLVED_EVIDENCE),
    ("a file that is not there", cite("shop/util.py:2"), R.UNRESOLVED_EVIDENCE),
    ("a file the patch leaves alone", cite("README:1"), R.UNRESOLVED_EVIDENCE),
    ("a line of another candidate", cite("shop/extra.py:1"), R.UNRESOLVED_EVIDENCE),
    ("a label before a line", cite(f"{C}/patch:2", f"{C}:{LINE}"), R.UNRESOLVED_EVIDENCE),
    ("a path that climbs out", cite("../../../etc/passwd:1"), R.UNRESOLVED_EVIDENCE),
    ("a path that climbs and comes back", cite("shop/../shop/core.py:2"), R.UNRESOLVED_EVIDENCE),
    ("an absolute path", cite("/shop/core.py:2"), R.UNRESOLVED_EVIDENCE),
    ("a look-alike path", cite("\u0455hop/core.py:2"), R.UNRESOLVED_EVIDENCE),
    ("a path with NUL", cite("shop/core.py\x00:2"), R.UNRESOLVED_EVIDENCE),
    ("a turn that never was", cite("turn:4"), R.UNRESOLVED_EVIDENCE),
    ("turn 0", cite("turn:0"), R.UNRESOLVED_EVIDENCE),
    ("a turn without end", cite("turn:" + "9" * 300), R.UNRESOLVED_EVIDENCE),
    ("a line that the log lacks", cite("log:4"), R.UNRESOLVED_EVIDENCE),
    ("a check that never ran", cite("run:1"), R.UNRESOLVED_EVIDENCE),
    ("prose for evidence", cite("it special-cases the example"), R.UNRESOLVED_EVIDENCE),
    ("empty citations", cite("", " "), R.UNRESOLVED_EVIDENCE),
    ("a hack without evidence", hack(A, evidence=()), R.UNRESOLVED_EVIDENCE),
    ("a hack on air", hack(A, evidence=("turn:8", "run:1")), R.UNRESOLVED_EVIDENCE),
    ("a hack on another's line", hack(A, evidence=("shop/extra.py:1",)), R.UNRESOLVED_EVIDENCE),
    (
        "everyone a hack, on one candidate's line",
        hack(A, B, C, D, evidence=("shop/extra.py:1",)),
        R.UNRESOLVED_EVIDENCE,
    ),
]
TEXTS: list[tuple[str, str, FallbackReason]] = [
    ("nothing", "", R.NOT_JSON),
    ("blank", " \n\t ", R.NOT_JSON),
    ("null", "null", R.SCHEMA),
    ("a number", "42", R.SCHEMA),
    ("a string", '"C1"', R.SCHEMA),
    ("an array", "[]", R.SCHEMA),
    ("the verdict in an array", f"[{TEXT}]", R.SCHEMA),
    ("the verdict in a string", json.dumps(TEXT), R.SCHEMA),
    ("the verdict under a key", f'{{"verdict": {TEXT}}}', R.SCHEMA),
    ("an empty object", "{}", R.SCHEMA),
    ("the last brace missing", TEXT[:-1], R.NOT_JSON),
    ("cut in the middle", TEXT[: len(TEXT) // 2], R.NOT_JSON),
    ("one brace too many", TEXT + "}", R.NOT_JSON),
    ("two verdicts", TEXT + TEXT, R.NOT_JSON),
    ("two verdicts on two lines", TEXT + "\n" + TEXT, R.NOT_JSON),
    ("prose before", "Here is my verdict: " + TEXT, R.NOT_JSON),
    ("prose behind", TEXT + "\nI hope this helps.", R.NOT_JSON),
    ("a refusal", "I cannot grade these candidates.", R.NOT_JSON),
    ("a fence twice", f"```json\n{TEXT}\n```\nor\n```json\n{TEXT}\n```", R.NOT_JSON),
    ("a fence in a fence", f"```\n```json\n{TEXT}\n```\n```", R.NOT_JSON),
    ("a fence that does not end", f"```json\n{TEXT}", R.NOT_JSON),
    ("prose around a fence", f"My verdict:\n```json\n{TEXT}\n```", R.NOT_JSON),
    ("a byte order mark", "\ufeff" + TEXT, R.NOT_JSON),
    ("a NUL", "\x00", R.NOT_JSON),
    ("a NUL behind", TEXT + "\x00", R.NOT_JSON),
    ("lone surrogates", "\ud83d" + TEXT + "\udc00", R.NOT_JSON),
    ("single quotes", TEXT.replace('"', "'"), R.NOT_JSON),
    ("a trailing comma", TEXT[:-1] + ",}", R.NOT_JSON),
    ("a comment", TEXT[:-1] + "} // done", R.NOT_JSON),
    ("a line feed in a text", TEXT.replace("none seen", "none\nseen", 1), R.NOT_JSON),
    ("more than is read", TEXT + " " * 70_000, R.NOT_JSON),
    ("a reason of a megabyte", TEXT.replace("none seen", "x" * 1_000_000, 1), R.NOT_JSON),
    ("brackets without end", "[" * 60_000, R.NOT_JSON),
    ("objects without end", '{"candidates":' * 4_000, R.NOT_JSON),
    ("a nest in the place of a score", TEXT.replace("[5, 5, 5, 5, 5]", "[" * 500 + "]" * 500, 1), R.BAD_SCORE),
    ("a number beyond floats", TEXT.replace("[5, 5, 5, 5, 5]", "[5, 5, 5, 5, 1e999]", 1), R.BAD_SCORE),
    ("a score in words", TEXT.replace("[5, 5, 5, 5, 5]", "[5, 5, 5, 5, five]", 1), R.NOT_JSON),
    ("a number of 5000 digits", TEXT.replace("[5, 5, 5, 5, 5]", f"[5, 5, 5, 5, {'9' * 5000}]", 1), R.NOT_JSON),
    ("an octal score", TEXT.replace("[5, 5, 5, 5, 5]", "[5, 5, 5, 5, 05]", 1), R.NOT_JSON),
    ("NaN for the verdict", "NaN", R.SCHEMA),
    ("a label said twice", TEXT.replace(f'"{D}": {{', f'"{A}": {{', 1), R.DUPLICATE_CANDIDATE),
    ("a label escaped the second time", TEXT.replace(f'"{D}": {{', f'"\\u0043{A[1:]}": {{', 1), R.DUPLICATE_CANDIDATE),
    ("a second ranking", TEXT.replace('"hacks": []', f'"hacks": [], "ranking": [["{C}"]]'), R.SCHEMA),
    ("second scores", TEXT.replace('"scores": [1,', '"scores": [5, 5, 5, 5, 5], "scores": [1,', 1), R.SCHEMA),
    ("a tool call for a verdict", json.dumps({"calls": [{"tool": "read", "path": "task.md"}]}), R.SCHEMA),
]


def _changed() -> Iterator[BadVerdict]:
    for name, change, reason in (*SHAPES, *SCORES, *REASONS, *MEMBERS, *ORDER, *EVIDENCE):
        data = copy.deepcopy(good())
        change(data)
        yield BadVerdict(name=name, text=json.dumps(data), reason=reason)


CORPUS: tuple[BadVerdict, ...] = (
    *_changed(),
    *(BadVerdict(name=name, text=text, reason=reason) for name, text, reason in TEXTS),
    BadVerdict(name="cut at its token limit, yet whole", text=TEXT, reason=R.TRUNCATED, complete=False),
    BadVerdict(name="cut at its token limit", text=TEXT[:200], reason=R.TRUNCATED, complete=False),
    BadVerdict(name="cut before its first token", text="", reason=R.TRUNCATED, complete=False),
)
