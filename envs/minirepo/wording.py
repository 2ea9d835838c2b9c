"""Issue texts: who reports, in which words. The splits share neither scenes nor sentences."""

from __future__ import annotations

from collections.abc import Mapping

from envs.task import Split

SCENES: Mapping[Split, tuple[str, ...]] = {
    Split.TRAIN: (
        "shop", "library", "garden", "school", "clinic", "museum", "theatre", "farm", "hotel", "bank",
        "studio", "kitchen", "airport", "gym", "market", "office",
    ),
    Split.HELDOUT: ("harbor", "bakery", "cinema", "laundry", "stadium", "winery"),
}  # fmt: skip
"""One word for where the code is used."""

REPORTS: Mapping[Split, tuple[str, ...]] = {
    Split.TRAIN: (
        "Bug in the {scene} code: {call} {got}, expected {want}. Note: {symptom}. See {helper} in {path}.",
        "{call} {got} but should return {want}. In {helper} ({path}), {symptom}.",
        "The {scene} app is wrong: {symptom}. Example: {call} {got}, expected {want}. Fix {helper} in {path}.",
        "Please fix {helper} in {path}: {symptom}. {call} {got}, it should return {want}.",
        "In {path} the function {helper} is wrong: {symptom}. {call} {got} instead of {want}.",
        "{scene}: {call} should return {want}, but it {got}. It uses {helper} from {path}; {symptom}.",
        "{path}, function {helper}: {symptom}. I called {call}, which {got}. I wanted {want}.",
        "The answer should be {want}, yet {call} {got}. {symptom}: check {helper}, file {path}.",
        "Report, {scene}: {symptom}. I did {call}. It {got}. It should give {want}. Module {path}, {helper}.",
        "{helper} misbehaves. {call} {got}; by the manual {want}. File {path}, {symptom}.",
        "Can someone repair {path}? {symptom}, as {call} {got} and not {want}. The function is {helper}.",
        "At the {scene} we call {call} and it {got}, although {want} is due; {symptom}. Source: {helper} at {path}.",
        "Ticket: {symptom}. Seen with {call}: {got}. Wanted: {want}. Where: {path} ({helper}).",
        "{want} is what {call} has to give. Now it {got}. Culprit: {helper} of {path}, {symptom}.",
        "Since yesterday {call} {got}. Before, it was {want}. {symptom}, says the {scene}. Open {path}, see {helper}.",
        "{symptom}! The {scene} gets a wrong value: {call} {got}, not {want}. Look into {path} at {helper}.",
    ),
    Split.HELDOUT: (
        "From the {scene} users: {symptom}. {call} {got}, and {want} is right. Look at {helper} in {path}.",
        "{helper} from {path} has a bug, {symptom}. {call} {got}; correct is {want}.",
        "Wrong result at the {scene}. {call} {got} where {want} was due. The cause is {helper} in {path}: {symptom}.",
    ),
}
"""Sentences; `got` reads "returns 3" or "raises KeyError"."""

DIAGNOSES: Mapping[Split, tuple[str, ...]] = {
    Split.TRAIN: (
        "It says `{old}` where `{new}` is meant.",
        "Cause: `{old}` stands for `{new}`.",
        "There `{old}` must become `{new}`.",
        "We think that `{old}` should be `{new}`.",
        "Someone put `{old}`; it takes `{new}`.",
        "Change `{old}` to `{new}` and it works.",
        "Reviewer: `{old}` looks off, try `{new}`.",
        "I found `{old}` in there, I would expect `{new}`.",
        "`{old}` -> `{new}`, most likely.",
        "The line has `{old}`. Good would be `{new}`.",
        "Replacing `{old}` by `{new}` helped me.",
        "With `{old}` it fails, with `{new}` it is fine.",
        "Blame `{old}`, it had to be `{new}`.",
    ),
    Split.HELDOUT: (
        "A maintainer writes: not `{old}`, but `{new}`.",
        "In the code `{old}` is wrong and `{new}` is right.",
    ),
}
"""What the reporter found in the shared function. Reports with a diagnosis keep the task within reach of a model of a
million parameters, which can copy and place a repair, but cannot infer it from words it has never seen."""

FILES_LINES: Mapping[Split, tuple[str, ...]] = {
    Split.TRAIN: ("Files: {files}", "Tree: {files}", "The files are {files}", "We have {files}", "Paths: {files}"),
    Split.HELDOUT: ("Files here: {files}",),
}

NOTES: Mapping[Split, tuple[str, ...]] = {
    Split.TRAIN: ("helpers for the {scene}", "used by the {scene} app", "see the {scene} notes", "part of the {scene}"),
    Split.HELDOUT: ("shared {scene} code", "code for the {scene} staff"),
}
"""Texts of harmless comments."""
