"""The harness of paced workloads: model calls of given lengths, with waits between them. Standard library only.

Reads its plan from stdin: {"ready": time, "turns": [{"sample": tokens, "read": text, "tool_s": seconds of ours}]}.
``ready`` is when the first call is due, in seconds since the epoch: starting this process is part of the execution's
boot, not on top of it. Speaks OpenAI Chat Completions to OPENAI_BASE_URL; a failed call is repeated. Writes ``done``
when it came to its end.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

TRIES, DELAY_S = 20, 0.5
SILENCE_S = 600.0  # a held call is kept alive by the proxy


def main() -> None:
    """Run the plan."""
    messages = [{"role": "user", "content": "Begin."}]
    plan = json.load(sys.stdin)
    time.sleep(max(0.0, plan["ready"] - time.time()))
    for turn in plan["turns"]:
        body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": turn["sample"]}
        messages.append({"role": "assistant", "content": call(body)})
        time.sleep(turn["tool_s"])
        messages.append({"role": "user", "content": turn["read"]})
    Path("done").write_text("yes")


def call(body: dict[str, object]) -> str:
    """One model call's text."""
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
    )
    for attempt in range(TRIES):
        try:
            with urllib.request.urlopen(request, timeout=SILENCE_S) as response:
                text: str = json.load(response)["choices"][0]["message"]["content"]
                return text
        except urllib.error.HTTPError as error:
            if error.code < 500 or attempt == TRIES - 1:
                raise
        except OSError:
            if attempt == TRIES - 1:
                raise
        time.sleep(DELAY_S)
    raise AssertionError("unreachable")


if __name__ == "__main__":
    main()
