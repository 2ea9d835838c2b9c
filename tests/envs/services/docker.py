"""The command line of docker and podman, as far as it is used: refuses whatever those would refuse.

Run as `docker` or `podman` from the PATH; $FAKE_DOCKER is the folder of its state, $FAKE_BWRAP bubblewrap.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

STATE = Path(os.environ["FAKE_DOCKER"])
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import machine  # noqa: E402

FLAGS = {"--detach", "--rm"}
VALUES = {"--name", "--label", "--publish", "--env", "--volume", "--entrypoint", "--network"}
JOINED = re.compile(r"(--memory=\d+[mg]|--cpus=[\d.]+|--pids-limit=\d+|--cap-drop=ALL|--security-opt=no-new-privileges|"
                    r"--network=\S+)")  # fmt: skip


def fail(text: str, code: int = 1) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(code)


def read(name: str) -> dict[str, object]:
    path = STATE / "containers" / name / "facts.json"
    if not path.exists():
        fail(f"Error: No such container: {name}")
    found: dict[str, object] = json.loads(path.read_text())
    return found


def run(words: list[str]) -> None:
    options: dict[str, list[str]] = {}
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in FLAGS:
            options[word] = []
        elif word in VALUES:
            options.setdefault(word, []).append(words.pop(0))
        elif JOINED.fullmatch(word):
            options.setdefault("resources", []).append(word)
        else:
            fail(f"unknown flag: {word}\nSee 'docker run --help'.", 125)
    image, *command = words
    if not (STATE / "images" / image.replace("/", "_")).exists() and "server" not in image:
        fail(f"Unable to find image '{image}' locally", 125)
    if options.get("--entrypoint") == ["/bin/true"]:
        if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]+:/[a-z-]+", options["--volume"][0]):
            fail("invalid volume specification", 125)
        (STATE / "volume").write_text(options["--volume"][0].partition(":")[0])
        return
    for needed in ("--detach", "--name", "--label", "--publish", "--entrypoint"):
        if needed not in options:
            fail(f"the test expects {needed}", 125)
    if options["--publish"] != ["127.0.0.1::8000"]:
        fail(f"the test expects a port of loopback, not {options['--publish']}", 125)
    for volume in options.get("--volume", ()):
        if volume != f"{(STATE / 'volume').read_text()}:/gagar-server:ro":
            fail(f"unknown volume {volume}", 125)
    (name,) = options["--name"]
    folder = STATE / "containers" / name
    folder.mkdir(parents=True)
    environment = {key: os.environ[key] for key in options["--env"]}
    port = machine.free_port()
    if image == "ends:1":
        command = ["--signal=KILL", "9", "/bin/sh", "-c", "echo the server does not start here; exit 3"]
    words = [*options["--entrypoint"], *command]
    group = machine.start(folder, words, environment, ("127.0.0.1", port), os.environ["FAKE_BWRAP"])
    facts = {"group": group, "port": port, "label": options["--label"][0], "image": image, **options}
    (folder / "facts.json").write_text(json.dumps(facts))
    print(name)


def pull(image: str) -> None:
    with (STATE / "pulls").open("a") as log:
        log.write(f"{image}\n")
    times = (STATE / "pulls").read_text().split().count(image)
    if image.startswith("missing"):
        fail(f"Error response from daemon: manifest for {image} not found: manifest unknown: manifest unknown")
    if image.startswith("private"):
        fail(f"Error response from daemon: pull access denied for {image}, repository does not exist or may require "
             "'docker login': denied: requested access to the resource is denied")  # fmt: skip
    if image.startswith("never") or (image.startswith("busy") and times < 3):
        fail("Error response from daemon: toomanyrequests: You have reached your pull rate limit.")
    (STATE / "images" / image.replace("/", "_")).write_text("")


def main(words: list[str]) -> None:
    (STATE / "images").mkdir(parents=True, exist_ok=True)
    (STATE / "containers").mkdir(parents=True, exist_ok=True)
    match words:
        case ["image", "inspect", image]:
            sys.exit(0 if (STATE / "images" / image.replace("/", "_")).exists() else 1)
        case ["pull", "--quiet", image]:
            pull(image)
        case ["run", *rest]:
            run(rest)
        case ["port", name, "8000/tcp"]:
            print(f"127.0.0.1:{read(name)['port']}")
        case ["inspect", "--format", "{{.State.Running}}", name]:
            print(str(machine.runs(int(str(read(name)["group"])))).lower())
        case ["logs", "--tail", "20", name]:
            read(name)
            print((STATE / "containers" / name / "log").read_text())
        case ["rm", "--force", "--volumes", name]:
            machine.stop(int(str(read(name)["group"])))
            (STATE / "containers" / name / "facts.json").rename(STATE / "containers" / name / "removed.json")
        case ["ps", "--all", "--filter", "label=dev.gagar.worker", "--format", form]:
            assert form == '{{.Names}} {{.Label "dev.gagar.worker"}}', form
            for path in sorted((STATE / "containers").glob("*/facts.json")):
                print(path.parent.name, json.loads(path.read_text())["label"].partition("=")[2])
        case _:
            fail(f"unknown command: {words}", 125)


main(sys.argv[1:])
