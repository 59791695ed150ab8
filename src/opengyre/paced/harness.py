"""The harness of paced workloads: model calls of given lengths, with waits between them. Standard library only.

Reads its plan from stdin: {"ready": time, "turns": [{"sample": tokens, "read": text, "tool_s": seconds of ours}]}.
``ready`` is when the first call is due, in seconds since the epoch: starting this process is part of the execution's
boot, not on top of it. Speaks OpenAI Chat Completions to OPENAI_BASE_URL; a failed call is repeated. Writes ``done``
when it came to its end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

TRIES, DELAY_S = 20, 0.5
SILENCE_S = 600.0  # a held call is kept alive by the proxy
_HTTP = "http://"


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
    with open("done", "w") as done:  # noqa: PTH123 - pathlib takes longer to import than all of this
        done.write("yes")


def call(body: dict[str, object]) -> str:
    """One model call's text."""
    for attempt in range(TRIES):
        try:
            status, answer = post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json.dumps(body).encode())
        except OSError:
            if attempt == TRIES - 1:
                raise
            status, answer = 503, b""
        if status == 200:
            text: str = json.loads(answer)["choices"][0]["message"]["content"]
            return text
        if status < 500 or attempt == TRIES - 1:
            raise SystemExit(f"{status}: {answer.decode(errors='replace')}")
        time.sleep(DELAY_S)
    raise AssertionError("unreachable")


def post(url: str, body: bytes) -> tuple[int, bytes]:
    """(status, body) of a request. HTTP/1.0 by hand: the answer is all that comes until the end, and a client library
    takes longer to import than all the rest of this process."""
    host, slash, path = url.removeprefix(_HTTP).partition("/")
    name, _, port = host.partition(":")
    head = [f"POST {slash}{path} HTTP/1.0", f"Host: {host}", "Content-Type: application/json"]
    head += [f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}", f"Content-Length: {len(body)}"]
    with socket.create_connection((name, int(port or 80)), timeout=SILENCE_S) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        pieces = []
        while piece := connection.recv(65536):
            pieces.append(piece)
    first, _, answer = b"".join(pieces).partition(b"\r\n\r\n")
    if not first:
        raise ConnectionError("closed without an answer")
    return int(first.split()[1]), answer


if __name__ == "__main__":
    main()
