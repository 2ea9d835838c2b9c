"""A harness that rewrites its history, for tests/bench/harness.py: runs inside a jail, with OpenAI's client library.

What a command printed is shown once; from the next turn on "[cut]" stands in its place, as agents do to save context.

    python3 rewriting_agent.py FOLDER      with the packages in FOLDER
"""

import os
import subprocess
import sys

sys.path.append(sys.argv[1])

from openai import OpenAI, PermissionDeniedError


def run(command: str) -> str:
    """What is shown of a command, in the words of the built-in loop."""
    try:
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, errors="replace", timeout=10)
    except subprocess.TimeoutExpired:
        return "[timeout]"
    text = (done.stdout + done.stderr).strip("\n")[:1600]
    return f"[exit {done.returncode}]\n{text}" if done.returncode else text or "[ok]"


def main() -> None:
    """Until the policy submits, or a budget of the rollout is used up."""
    client = OpenAI(max_retries=0)
    messages = [{"role": "user", "content": os.environ["GAGAR_TASK"]}]
    while True:
        try:
            reply = client.chat.completions.create(model="policy", messages=messages).choices[0].message.content or ""
        except PermissionDeniedError as error:
            raise SystemExit(str(error)) from None
        if reply.strip() == "submit":
            return
        if len(messages) > 1:
            messages[-1]["content"] = "[cut]"
        shown = run(reply.replace("\0", ""))
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": shown}]


if __name__ == "__main__":
    main()
