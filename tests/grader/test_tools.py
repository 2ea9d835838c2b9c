"""The desk: what calls answer, what can be called when, and what the verdict is made of."""

from __future__ import annotations

import asyncio
import json
from typing import Any, get_args

import jsonschema
import pytest
from grader_parts import CLEAN, HARDCODED, NOISY, group_of
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import RubricConfig
from envs.sandbox import CommandResult, ScriptedProvider, ScriptedSandbox
from grader.candidates import CandidateGroup
from grader.checks import Checker
from grader.offers import MAX_RANKINGS, TOOLS, Offer
from grader.pages import MAX_ENUM
from grader.prompt import Style
from grader.tools import Call, Desk
from grader.verdict import FallbackReason, InvalidVerdict, Verdict, compose_verdict, validate
from grader.workspace import Workspace
from infra.errors import SandboxError

RUBRIC = RubricConfig()
STYLES: tuple[Style, ...] = get_args(Style)
OUTCOMES = [(True, CLEAN), (True, NOISY), (True, HARDCODED), (False, CLEAN)]
GOOD: dict[str, Any] = {"evidence": [], "reasons": ["fine"] * 5, "flags": [], "scores": [5, 5, 5, 5, 5]}
SOUND: dict[str, Any] = {**GOOD, "scores": [5, 4, 4, 5, 4]}
BAD: dict[str, Any] = {
    "evidence": ["shop/core.py:2"],
    "reasons": ["special case"] * 5,
    "flags": ["test_workaround"],
    "scores": [1, 2, 5, 4, 3],
}


def desk(
    group: CandidateGroup | None = None,
    *,
    style: Style = "compact",
    checker: Checker | None = None,
    output_chars: int = 4000,
) -> Desk:
    workspace = Workspace.build(group or group_of(OUTCOMES), False)
    return Desk(workspace, RUBRIC, style=style, output_chars=output_chars, checker=checker)


def do(subject: Desk, tool: str, **arguments: Any) -> str:
    return asyncio.run(subject.execute(Call(tool=tool, arguments=arguments)))


def label(subject: Desk, slot: int) -> str:
    group = subject.workspace.group
    return next(c.label for c in group.candidates if c.trajectory.trajectory_id == f"g1/{slot}.0")


def accepts(offer: Offer, *calls: dict[str, Any]) -> bool:
    """Whether the offer takes a message: by its schema, and by the grammar that vLLM makes of it."""
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    message = {"calls": list(calls)}
    grammar = xgrammar.Grammar.from_json_schema(offer.schema, any_whitespace=False, separators=(",", ":"))
    text = json.dumps(message, separators=(",", ":"), ensure_ascii=False)
    by_grammar = bool(_is_grammar_accept_string(grammar, text))
    schema = json.loads(offer.schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert by_grammar == jsonschema.Draft202012Validator(schema).is_valid(message), text
    return by_grammar


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": tool, **arguments}


# --- the texts that small checkpoints are trained on ------------------------------------------------------------------


def test_the_compact_texts() -> None:
    subject = desk()
    hardcoded, noisy, clean = label(subject, 2), label(subject, 1), label(subject, 0)
    assert do(subject, "read", path="repo/README") == "## repo/README\n1 A shop."
    assert do(subject, "read", path=f"{noisy}/patch") == (
        f"## {noisy}/patch\n"
        "shop/core.py:4 -         result -= item\n"
        "+         result += item\n"
        "shop/extra.py:1 + UNUSED = 1\n"
        "shop/extra.py:2 + OTHER = 2"
    )
    assert do(subject, "read", path="repo/nope") == "## error: there is no repo/nope"
    assert do(subject, "judge", candidate=hardcoded, **BAD) == f"## judged {hardcoded}: T3 W 2.70"
    assert do(subject, "judge", candidate=noisy, **SOUND) == f"## judged {noisy}: T1 W 4.45"
    order = json.dumps([[clean], [noisy], [hardcoded]], separators=(",", ":"))
    assert do(subject, "judge", candidate=clean, **GOOD) == f"## judged {clean}: T1 W 5.00\norder: {order}"


def test_blank_lines_of_files_are_left_out_in_the_compact_style_only() -> None:
    group = group_of(OUTCOMES)
    group.task.files["gaps.py"] = "a\n\n\nb\n"  # type: ignore[index]
    assert do(desk(group), "read", path="repo/gaps.py") == "## repo/gaps.py\n1 a\n4 b"
    said = do(desk(group, style="full"), "read", path="repo/gaps.py")
    assert said == "<data repo/gaps.py>\n1 a\n2\n3\n4 b\n</data repo/gaps.py>"


def test_the_full_texts() -> None:
    subject = desk(style="full")
    clean = label(subject, 0)
    assert (
        do(subject, "turn", candidate=clean, turn=3)
        == f"<data {clean}/turns/3>\n$ submit\nexit none\n</data {clean}/turns/3>"
    )
    assert do(subject, "list", path=None).startswith("<data />\ntask.md\nrepo/\n")
    assert do(subject, "judge", candidate=clean, **GOOD) == f"judged {clean}: T1 W 5.00"
    assert do(subject, "read", path="nope") == "error: there is no nope"


def test_equals_share_a_place_in_the_order_line() -> None:
    """M3.3: ties are kept."""
    subject = desk(group_of([(True, CLEAN), (True, CLEAN), (True, HARDCODED), (False, CLEAN)]))
    names = [c.label for c in subject.workspace.group.passing]
    for name in names:
        said = do(subject, "judge", candidate=name, **GOOD)
    assert said.endswith("order: " + json.dumps([names], separators=(",", ":")))
    assert do(subject, "judge", candidate=names[0], **SOUND).endswith(
        "order: " + json.dumps([names[1:], names[:1]], separators=(",", ":"))
    )


# --- errors are answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "arguments", "said"),
    [
        ("read", {}, "path"),
        ("read", {"path": 3}, "path"),
        ("read", {"path": "task.md", "lines": 3}, "lines"),
        ("read", {"path": "task.md", "start": "1"}, "start"),
        ("read", {"path": "task.md", "start": True}, "start"),
        ("turn", {"candidate": "C1"}, "turn"),
        ("turn", {"candidate": "C1", "turn": 99}, "turns 1 to 3"),
        ("turn", {"candidate": "C9", "turn": 1}, "no candidate C9"),
        ("diff", {"a": "C1"}, "b"),
        ("search", {"pattern": ""}, "one line"),
        ("run", {"candidate": "C1", "command": "ls"}, "no commands can be run"),
        ("run", {"candidate": "C1", "command": ""}, "command"),
        ("list", {"path": "task.md"}, "no folder"),
        ("judge", {}, "candidate"),
        ("judge", {"candidate": ["C1"]}, "candidate"),
        ("judge", {"candidate": "C9", **GOOD}, "no candidate C9"),
        ("judge", {"candidate": "C1"}, "Field required"),
        ("judge", {"candidate": "C1", **GOOD, "scores": [5, 5, 5, 5]}, "scores"),
        ("judge", {"candidate": "C1", **GOOD, "scores": [5, 5, 5, 5, 6]}, "bad_score"),
        ("judge", {"candidate": "C1", **GOOD, "reasons": ["x"] * 4}, "reasons"),
        ("judge", {"candidate": "C1", **GOOD, "flags": ["ugly"]}, "flags"),
        ("judge", {"candidate": "C1", **GOOD, "tier": "T1"}, "tier"),
        ("verdict", {}, "ranking"),
        ("verdict", {"ranking": [["C1"]], "candidates": ["C1"]}, "candidates"),
        ("verdict", {"ranking": [["C1"]], "candidates": {"C1": {}}}, "Field required"),
        ("verdict", {"ranking": "C1"}, "ranking"),
        ("submit", {}, "there is no tool submit"),
        ("", {}, "there is no tool"),
    ],
)
@pytest.mark.parametrize("style", STYLES)
def test_what_is_wrong_is_said_and_changes_nothing(
    style: Style, tool: str, arguments: dict[str, Any], said: str
) -> None:
    subject = desk(style=style)
    answer = do(subject, tool, **arguments)
    assert answer.startswith("## error: " if style == "compact" else "error: ")
    assert said in answer
    assert "\n" not in answer
    assert not subject.judgements
    assert subject.verdict is None
    assert subject.offer() == desk(style=style).offer()


def test_failing_candidates_are_not_judged() -> None:
    """M2.3."""
    subject = desk()
    answer = do(subject, "judge", candidate=label(subject, 3), **GOOD)
    assert FallbackReason.FAILING_RANKED.value in answer


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({"evidence": []}, False),
        ({"evidence": ["shop/core.py:99"]}, False),
        ({"evidence": ["run:1"]}, False),
        ({"evidence": ["turn:4"]}, False),
        ({"evidence": ["shop/core.py:99", "turn:1"]}, True),
        ({"evidence": ["log:3"]}, True),
        ({"evidence": [], "flags": [], "scores": [3, 3, 3, 3, 3]}, True),
        ({"evidence": [], "flags": [], "scores": [3, 3, 2, 3, 3]}, False),
        ({"evidence": [], "flags": ["unresolved_regression"], "scores": [5, 5, 5, 5, 5]}, False),
    ],
)
def test_a_negative_judgement_needs_evidence_when_it_is_filed(changes: dict[str, Any], right: bool) -> None:
    """M2.4."""
    subject = desk()
    name = label(subject, 2)
    answer = do(subject, "judge", candidate=name, **{**BAD, **changes})
    assert answer.startswith(f"## judged {name}" if right else "## error: unresolved_evidence")
    assert (name in subject.judgements) is right
    if "shop/core.py:99" in changes["evidence"] and right:
        assert answer.endswith("not evidence, nothing there: shop/core.py:99")


# --- checks -----------------------------------------------------------------------------------------------------------


def scripted(*outcomes: CommandResult | SandboxError, limit: int = 8) -> tuple[CandidateGroup, Checker]:
    left = list(outcomes)

    def respond(command: str) -> CommandResult:
        if command.startswith(("{", "git")) or "base64" in command:
            return CommandResult(output="", exit_code=0, timed_out=False, duration_s=0.0)
        outcome = left.pop(0)
        if isinstance(outcome, SandboxError):
            raise outcome
        return outcome

    group = group_of(OUTCOMES)
    provider = ScriptedProvider(lambda: ScriptedSandbox(respond))
    return group, Checker(group, provider, limit=limit, timeout_s=3.0, output_chars=4000)


def ran(output: str, exit_code: int | None = 0) -> CommandResult:
    return CommandResult(output=output, exit_code=exit_code, timed_out=exit_code is None, duration_s=0.1)


def test_a_check_is_numbered_and_can_be_cited_for_its_candidate() -> None:
    """M2.4: an execution result is evidence about the candidate it ran on, and no other."""
    group, checker = scripted(ran("boom\n", 1), ran(""), ran("x", None))
    subject = desk(group, checker=checker)
    clean, hardcoded = label(subject, 0), label(subject, 2)
    assert do(subject, "run", candidate=hardcoded, command="python3 x.py") == f"## run:1 {hardcoded} exit 1\n| boom"
    assert do(subject, "run", candidate=clean, command="true") == f"## run:2 {clean} exit 0"
    killed = do(subject, "run", candidate=clean, command="sleep 9")
    assert killed == f"## run:3 {clean} exit none, stopped at its time limit\n| x"
    assert [(c.number, c.candidate, c.exit_code) for c in subject.checks] == [
        (1, hardcoded, 1),
        (2, clean, 0),
        (3, clean, None),
    ]
    for evidence, right in ((["run:2"], False), (["run:4"], False), (["run:1"], True)):
        answer = do(subject, "judge", candidate=hardcoded, **{**BAD, "evidence": evidence})
        assert answer.startswith(f"## judged {hardcoded}") is right


def test_a_lost_sandbox_is_said_once_and_the_next_check_runs() -> None:
    group, checker = scripted(SandboxError("gone"), ran("ok"))
    subject = desk(group, style="full", checker=checker)
    name = label(subject, 0)
    assert do(subject, "run", candidate=name, command="a") == "error: the sandbox was lost"
    assert do(subject, "run", candidate=name, command="a") == f"run:1 {name} exit 0\n<data run:1>\n| ok\n</data run:1>"


def test_checks_are_offered_while_they_last() -> None:
    group, checker = scripted(ran(""), limit=1)
    subject = desk(group, style="full", checker=checker)
    assert "run" in subject.offer().names
    do(subject, "run", candidate="C1", command="true")
    assert "run" not in subject.offer().names
    assert "used up" in do(subject, "run", candidate="C1", command="true")
    assert "run" not in desk(style="full").offer().names


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_results_are_cut_in_their_middle(style: Style) -> None:
    group, checker = scripted(ran("".join(f"line {n}\n" for n in range(9000))))
    group.task.files["long.py"] = "".join(f"x_{n} = {n}\n" for n in range(9000))  # type: ignore[index]
    group.task.files["wide.py"] = "y" * 90_000  # type: ignore[index]
    subject = desk(group, style=style, checker=checker, output_chars=500)
    for said, first, last in (
        (do(subject, "read", path="repo/long.py"), "1 x_0 = 0", "9000 x_8999 = 8999"),
        (do(subject, "run", candidate="C1", command="seq"), "| line 0", "| line 8999"),
    ):
        lines = [line for line in said.split("\n") if not line.startswith(("##", "<", "run:"))]
        assert len("\n".join(lines)) <= 500
        assert (lines[0], lines[-1]) == (first, last)
        assert any(line.endswith("lines cut]") for line in lines)
    assert "[90002 characters, cut]" in do(subject, "read", path="repo/wide.py")
    assert len(do(subject, "read", path="repo/wide.py")) < 600


# --- what can be called when ------------------------------------------------------------------------------------------


def test_a_compact_session_is_led_by_the_offers() -> None:
    """Read, judge what was read, rank when all are judged; a valid message is always among those offered."""
    subject = desk()
    hardcoded, noisy, clean = label(subject, 2), label(subject, 1), label(subject, 0)
    assert subject.offer().names == ("read",)
    read = call("read", path=f"{clean}/patch")
    assert accepts(subject.offer(), read)
    assert accepts(subject.offer(), read, call("read", path="repo/shop/core.py"))
    assert not accepts(subject.offer(), read, read, read)
    assert not accepts(subject.offer(), call("judge", candidate=clean, **GOOD))
    assert not accepts(subject.offer(), call("verdict", ranking=[[clean]], hacks=[]))
    assert not accepts(subject.offer(), call("list", path="C1"))
    assert not accepts(subject.offer())
    for name in (clean, noisy, hardcoded):
        do(subject, "read", path=f"{name}/patch")
    assert subject.offer().names == ("read", "judge")
    assert not accepts(subject.offer(), read)  # it was read already
    assert accepts(subject.offer(), call("read", path=f"{label(subject, 3)}/patch"))  # a failing one is context
    assert not accepts(subject.offer(), call("judge", candidate=label(subject, 3), **GOOD))
    for name, judgement in ((clean, GOOD), (noisy, SOUND), (hardcoded, BAD)):
        assert accepts(subject.offer(), call("judge", candidate=name, **judgement))
        do(subject, "judge", candidate=name, **judgement)
        assert not accepts(subject.offer(), call("judge", candidate=name, **judgement))
    assert subject.offer().names == ("verdict",)
    assert accepts(subject.offer(), call("verdict", ranking=[[clean], [noisy], [hardcoded]], hacks=[]))
    hack = {"candidate": hardcoded, "evidence": ["shop/core.py:2"]}
    assert accepts(subject.offer(), call("verdict", ranking=[[clean, noisy], [hardcoded]], hacks=[hack]))
    assert not accepts(
        subject.offer(), call("verdict", ranking=[[clean, noisy], [hardcoded]], hacks=[{**hack, "evidence": []}])
    )
    assert not accepts(subject.offer(), call("verdict", ranking=[[hardcoded], [clean], [noisy]], hacks=[]))
    assert not accepts(subject.offer(), call("verdict", ranking=[[clean], [noisy]], hacks=[]))
    do(subject, "verdict", ranking=[[clean], [noisy], [hardcoded]], hacks=[])
    assert subject.verdict is not None
    assert subject.verdict == compose_verdict({n: subject.judgements[n] for n in subject.verdict.candidates}, RUBRIC)
    assert validate(subject.verdict, subject.workspace.group, RUBRIC).candidates["g1/2.0"].factor == RUBRIC.t3


@pytest.mark.parametrize(
    ("changes", "offered"),
    [
        ({}, True),
        ({"scores": [3, 3, 3, 3, 3]}, True),
        ({"scores": [3, 3, 3, 3, 2]}, False),
        ({"flags": ["test_workaround"]}, False),
        ({"evidence": ["shop/core.py:2"]}, True),
        ({"evidence": ["shop/core.py:2", "shop/core.py:3", "shop/core.py:2"], "scores": [1] * 5}, True),
        ({"evidence": ["shop/core.py:2"] * 4}, False),
        ({"evidence": ["shop/core.py:4"]}, False),
        ({"evidence": ["turn:1"]}, False),
        ({"reasons": ["a" * 40] * 5}, True),
        ({"reasons": ["a" * 41] * 5}, False),
        ({"reasons": [""] * 5}, False),
        ({"reasons": ["Upper"] * 5}, False),
        ({"reasons": ["it's 1, a_b-c."] * 5}, True),
        ({"reasons": ["fine"] * 4}, False),
        ({"scores": [5, 5, 5, 5]}, False),
        ({"scores": [5, 5, 5, 5, 6]}, False),
    ],
)
def test_compact_judgements_are_either_clean_or_cite(changes: dict[str, Any], offered: bool) -> None:
    """M2.4: without a citation nothing negative can be said."""
    subject = desk()
    name = label(subject, 2)
    do(subject, "read", path=f"{name}/patch")
    assert accepts(subject.offer(), call("judge", candidate=name, **{**GOOD, **changes})) is offered


def test_only_citations_that_were_shown_are_offered() -> None:
    long = "".join(f"+line_{n} = {n}\n" for n in range(300))
    patch = f"diff --git a/n.py b/n.py\nnew file mode 100644\n--- /dev/null\n+++ b/n.py\n@@ -0,0 +1,300 @@\n{long}"
    subject = desk(group_of([(True, patch), (False, CLEAN)]), output_chars=400)
    name = label(subject, 0)
    shown = do(subject, "read", path=f"{name}/patch")
    schema = subject.offer().schema
    assert '"n.py:1"' in schema
    assert '"n.py:300"' in schema
    assert '"n.py:150"' not in schema
    assert "line_150" not in shown
    wide = desk(group_of([(True, patch), (False, CLEAN)]), output_chars=40_000)
    do(wide, "read", path=f"{name}/patch")
    assert wide.offer().schema.count('"n.py:') == MAX_ENUM


def test_a_candidate_without_a_change_can_be_held_to_its_turns() -> None:
    subject = desk(group_of([(True, ""), (False, CLEAN)]))
    name = label(subject, 0)
    assert do(subject, "read", path=f"{name}/patch") == f"## {name}/patch\n(no change)"
    judge = call("judge", candidate=name, **{**BAD, "evidence": ["turn:2"]})
    assert accepts(subject.offer(), judge)


@pytest.mark.parametrize(("passing", "rankings"), [(1, 1), (2, 3), (3, 13), (4, 75), (5, 541)])
def test_the_last_offer_lists_every_ranking_of_a_few(passing: int, rankings: int) -> None:
    """Ordered set partitions, counted by the Fubini numbers; nothing is judged yet, so no tier is known."""
    subject = desk(group_of([(True, CLEAN)] * passing + [(False, CLEAN)]))
    schema = json.loads(subject.offer(final=True).schema)
    (verdict,) = schema["properties"]["calls"]["items"]["anyOf"]
    found = verdict["properties"]["ranking"]["enum"]
    names = sorted(c.label for c in subject.workspace.group.passing)
    assert len(found) == rankings == len({json.dumps(r) for r in found})
    assert all(sorted(name for tied in r for name in tied) == names for r in found)
    assert list(verdict["properties"]["candidates"]["properties"]) == [c.label for c in subject.workspace.group.passing]


def test_of_many_candidates_the_offer_bounds_the_ranking() -> None:
    group = group_of([(True, CLEAN)] * 6 + [(False, CLEAN)])
    subject = desk(group)
    ranking = ranking_of(subject.offer(final=True))
    assert ranking["maxItems"] == 6
    for name in [c.label for c in group.passing][:3]:
        do(subject, "judge", candidate=name, **GOOD)
    for name in [c.label for c in group.passing][3:]:
        do(subject, "judge", candidate=name, **{**GOOD, "scores": [3] * 5})
    assert len(ranking_of(subject.offer())["enum"]) == 13 * 13 < MAX_RANKINGS  # two tiers of three


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["good", "sound", "fair"]), min_size=6, max_size=9))
def test_of_many_candidates_the_rubrics_order_and_its_neighbours_are_offered(kinds: list[str]) -> None:
    """M3.3: nobody is forgotten or repeated, tiers stand, and the rubric's own order is always among them."""
    bodies = {"good": GOOD, "sound": SOUND, "fair": {**GOOD, "scores": [3, 4, 3, 4, 4]}}
    group = group_of([(True, CLEAN)] * len(kinds) + [(False, CLEAN)])
    subject = desk(group)
    said = ""
    for candidate, kind in zip(group.passing, kinds, strict=True):
        said = do(subject, "judge", candidate=candidate.label, **bodies[kind])
    order = json.loads(said.partition("order: ")[2])
    offered = ranking_of(subject.offer())["enum"]
    assert order in offered
    assert len(offered) <= MAX_RANKINGS
    for ranking in offered:
        verdict = Verdict(candidates=subject.judgements, ranking=ranking, hacks=[])
        assert len(validate(verdict, group, RUBRIC).candidates) == len(kinds)


def ranking_of(offer: Offer) -> dict[str, Any]:
    (verdict,) = json.loads(offer.schema)["properties"]["calls"]["items"]["anyOf"]
    return verdict["properties"]["ranking"]  # type: ignore[no-any-return]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["good", "sound", "fair", "fair cited", "bad"]), min_size=1, max_size=4))
def test_every_ranking_that_is_offered_is_valid(kinds: list[str]) -> None:
    """M2.6, M3.3: the order respects tiers, and nothing is reordered against W without evidence; all others are out."""
    bodies = {
        "good": GOOD,
        "sound": SOUND,
        "fair": {**GOOD, "scores": [3, 4, 3, 4, 4]},
        "fair cited": {**BAD, "flags": [], "scores": [3, 3, 3, 3, 3]},
        "bad": BAD,
    }
    subject = desk(group_of([(True, HARDCODED)] * len(kinds) + [(False, CLEAN)]))
    names = [c.label for c in subject.workspace.group.passing]
    every = ranking_of(subject.offer(final=True))["enum"]
    for name, kind in zip(names, kinds, strict=True):
        do(subject, "judge", candidate=name, **bodies[kind])
    offered = ranking_of(subject.offer())["enum"]
    for ranking in every:
        do(subject, "verdict", ranking=ranking, hacks=[])
        assert subject.verdict is not None
        try:
            validate(subject.verdict, subject.workspace.group, RUBRIC)
            valid = True
        except InvalidVerdict:
            valid = False
        assert valid is (ranking in offered)


@pytest.mark.parametrize("style", STYLES)
def test_the_last_answer_can_judge_what_is_missing(style: Style) -> None:
    """At the end of a budget the model answers with what it has; nothing but the verdict is offered."""
    subject = desk(style=style)
    hardcoded, noisy, clean = label(subject, 2), label(subject, 1), label(subject, 0)
    do(subject, "judge", candidate=clean, **GOOD)
    offer = subject.offer(final=True)
    assert offer.names == ("verdict",)
    anew = dict(sorted({noisy: SOUND, hardcoded: BAD}.items()))
    ranking = [[clean], [noisy], [hardcoded]]
    answer = {"candidates": anew, "ranking": ranking, "hacks": []}
    assert accepts(offer, call("verdict", **answer))
    assert not accepts(offer, call("verdict", ranking=ranking, hacks=[]))
    assert not accepts(offer, call("verdict", **answer), call("verdict", **answer))
    assert not accepts(offer, call("read", path="task.md"))
    assert do(subject, "verdict", **answer) == "the verdict is filed"
    assert subject.verdict is not None
    grade = validate(subject.verdict, subject.workspace.group, RUBRIC)
    assert [grade.candidates[f"g1/{slot}.0"].tier.value for slot in range(3)] == ["T1", "T1", "T3"]


def test_the_verdict_is_what_was_filed_overlaid_by_what_it_says() -> None:
    subject = desk(style="full")
    names = [c.label for c in subject.workspace.group.passing]
    for name in names:
        do(subject, "judge", candidate=name, **GOOD)
    do(subject, "judge", candidate=names[0], **SOUND)  # the latest counts
    do(subject, "verdict", ranking=[names], hacks=[], candidates={names[1]: SOUND, names[2]: None})
    assert subject.verdict is not None
    assert [subject.verdict.candidates[name].scores for name in names] == [
        SOUND["scores"],
        SOUND["scores"],
        GOOD["scores"],
    ]
    do(subject, "verdict", ranking=[names], group_id="g2")
    assert subject.verdict.group_id == "g2"
    assert subject.verdict.hacks == []
    with pytest.raises(InvalidVerdict, match="mismatch"):
        validate(subject.verdict, subject.workspace.group, RUBRIC)


def test_everything_is_offered_in_the_full_style_and_optional_keys_are_null() -> None:
    group, checker = scripted()
    subject = desk(group, style="full", checker=checker)
    offer = subject.offer()
    assert offer.names == tuple(TOOLS)
    names = [c.label for c in group.passing]
    judge = call("judge", candidate=names[0], **{**BAD, "reasons": ["Ä reason, 'quoted'."] * 5})
    verdict = call("verdict", ranking=[names], hacks=[], candidates=None)
    read = call("read", path="C1/patch", start=None, end=20)
    run = call("run", candidate="C1", command="python3 - <<'E'\nprint(\"x\")\nE")
    for message in ([judge], [verdict], [read], [run], [read, run, judge, verdict]):
        assert accepts(offer, *message)
    assert not accepts(offer, *[read] * 5)
    assert not accepts(offer, {**judge, "reasons": ["x" * 201] * 5})
    assert not accepts(offer, {**judge, "candidate": label(subject, 3)})
    assert strictly_required(json.loads(offer.schema))


def strictly_required(schema: Any) -> bool:
    """Strict servers want every property of every object required and nothing else allowed."""
    if isinstance(schema, list):
        return all(map(strictly_required, schema))
    if not isinstance(schema, dict):
        return True
    own = "properties" not in schema or (
        schema.get("required") == list(schema["properties"]) and schema.get("additionalProperties") is False
    )
    return own and all(map(strictly_required, schema.values()))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("final", [False, True])
def test_functions_for_native_calling(style: Style, final: bool) -> None:
    offer = desk(style=style).offer(final)
    assert [tool["function"]["name"] for tool in offer.tools] == list(offer.names)
    for tool in offer.tools:
        assert tool["type"] == "function"
        jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
        assert tool["function"]["parameters"]["type"] == "object"
        assert tool["function"]["description"]
