"""A coding agent in one file of standard library: it is given an instruction and works in its current directory.

    instruction -> history -> model call -> tool calls? -- none --> the reply's text is the answer
                      ^                        | some
                      +------- results <-------+   all of a turn at once; ``agent`` runs this very loop, one level down
    usage over the limit, or "prompt is too long":  summary call, and the history starts again from the summary

A model call blocks until its stream ended; a failed or cut one is repeated with back-off. A turn waits for the slowest
of its tools. Nobody else is waited for.

Usage: harness.py [--compact-at TOKENS] [--max-tokens N] [--max-turns N] [INSTRUCTION], else the instruction is read
from stdin. Speaks streaming Anthropic Messages to ANTHROPIC_BASE_URL with ANTHROPIC_AUTH_TOKEN and ANTHROPIC_MODEL.
"""

# ruff: noqa: PTH103, PTH120, PTH123
# (pathlib would double the time this script takes to start)
from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False  # importing typing would cost as much as all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import IO, Any

    Json = dict[str, Any]
    ModelCall = Callable[[Json], Json]  # request body -> {"content": blocks, "stop_reason": str, "usage": {...}}

MAIN_SYSTEM = "You write Python."
SUB_SYSTEM = "You write one module."
ASK_SUMMARY = "Summarize."
SUMMARY_HEAD = "So far: "

COMPACT_AT = 230  # tokens of one call, prompt and reply; a clean run of a big task stays below
MAX_TOKENS = 160  # of one reply; twice what the longest useful one needs
MAX_TURNS = 12  # model calls of one agent; a clean run needs 4 or 5
MAX_RESAMPLED = 2  # replies in a row that are thrown away because they were cut or empty
TOOL_LIMIT_S = 120.0  # longest run of one command
OUTPUT_LIMIT = 2000  # characters of a tool result

TRIES = 10  # of one model call
FIRST_DELAY_S, LONGEST_DELAY_S = 0.25, 8.0  # between tries, doubling
SILENCE_S = 60.0  # a live stream pings several times within it
RETRYABLE = (408, 409, 425, 429)  # and all 5xx


def _tool(name: str, description: str, *arguments: str) -> Json:
    properties = {argument: {"type": "string"} for argument in arguments}
    schema = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"name": name, "description": description, "input_schema": schema}


SUB_TOOLS = [
    _tool("read", "Read a file", "path"),
    _tool("write", "Write a file", "path", "content"),
    _tool("run", "Run a shell command", "command"),
]
MAIN_TOOLS = [*SUB_TOOLS, _tool("agent", "Delegate a task", "task")]


class CallFailedError(Exception):
    """A model call failed; ``retry`` says whether trying again can help, ``after_s`` what the server asked for."""

    def __init__(self, message: str, *, retry: bool, after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry, self.after_s = retry, after_s


class TooLongError(Exception):
    """The server refused the prompt as too long."""


class Messages:
    """The model behind an Anthropic Messages endpoint, one connection per call."""

    def __init__(self, base_url: str, token: str, model: str, sleep: Callable[[float], object] = time.sleep) -> None:
        scheme, _, rest = base_url.partition("://")
        if scheme != "http":
            raise CallFailedError(f"ANTHROPIC_BASE_URL {base_url!r}: only http:// is spoken", retry=False)
        self.netloc, _, prefix = rest.partition("/")
        host, colon, port = self.netloc.rpartition(":")
        self.address = (host.strip("[]"), int(port)) if colon else (self.netloc, 80)
        self.path = "/".join(["", *filter(None, prefix.split("/")), "v1/messages"])
        self.token, self.model, self.sleep = token, model, sleep

    def __call__(self, request: Json) -> Json:
        """Call until a whole reply came. Raises CallFailedError after the last try, TooLongError at once."""
        body = json.dumps({"model": self.model, **request, "stream": True}).encode()
        delay_s = FIRST_DELAY_S
        for left in reversed(range(TRIES)):
            try:
                return self._attempt(body)
            except (OSError, ValueError) as error:  # refused, reset, silent, or not what the protocol promises
                failed = CallFailedError(f"{type(error).__name__}: {error}", retry=True)
            except CallFailedError as error:
                failed = error
            if not failed.retry or not left:
                raise failed
            self.sleep(delay_s if failed.after_s is None else failed.after_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
        raise AssertionError("unreachable")

    def _attempt(self, body: bytes) -> Json:
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: {self.netloc}\r\nAuthorization: Bearer {self.token}\r\n"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nAnthropic-Version: 2023-06-01\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(self.address, SILENCE_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(head.encode() + body)
            with connection.makefile("rb") as stream:
                status, headers = read_head(stream)
                lines = body_lines(stream, headers)
                if status != 200:
                    raise refusal(status, headers, b"".join(lines).decode(errors="replace"))
                return assemble(events(lines))


def read_head(stream: IO[bytes]) -> tuple[int, dict[str, str]]:
    """Status and headers (lower-case names) of a response. Raises ValueError if it is none."""
    parts = stream.readline().split(None, 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1."):
        raise ValueError("the connection closed without a response")
    headers: dict[str, str] = {}
    while (line := stream.readline().strip()) != b"":
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(parts[1]), headers


def body_lines(stream: IO[bytes], headers: dict[str, str]) -> Iterator[bytes]:
    """Lines of a body, whatever its framing. Raises ValueError where a chunked or counted body is cut."""
    rest = b""
    for piece in _pieces(stream, headers):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line + b"\n" for line in whole)
    if rest:
        yield rest


def _pieces(stream: IO[bytes], headers: dict[str, str]) -> Iterator[bytes]:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        while size := int(stream.readline().split(b";")[0], 16):
            piece = stream.read(size)
            if len(piece) < size:
                raise ValueError("cut in the middle of a chunk")
            yield piece
            stream.readline()
    elif "content-length" in headers:
        size = int(headers["content-length"])
        piece = stream.read(size)
        if len(piece) < size:
            raise ValueError("cut in the middle of the body")
        yield piece
    else:
        yield from stream


def refusal(status: int, headers: dict[str, str], text: str) -> Exception:
    """The error that a status other than 200 stands for."""
    if status in (400, 413) and "prompt is too long" in text.lower():
        return TooLongError(text)
    after = headers.get("retry-after", "")
    after_s = min(float(after), LONGEST_DELAY_S) if after.replace(".", "", 1).isdigit() else None
    retry = status in RETRYABLE or status >= 500
    return CallFailedError(f"HTTP {status}: {text[:300]}", retry=retry, after_s=after_s)


def events(lines: Iterator[bytes]) -> Iterator[tuple[str, Json]]:
    """(event, data) of a server-sent event stream; comments and pings are left out."""
    name, data = "", b""
    for line in lines:
        line = line.rstrip(b"\r\n")
        if line.startswith(b"event:"):
            name = line[6:].strip().decode()
        elif line.startswith(b"data:"):
            data += line[5:].strip()
        elif not line and data:
            if name != "ping":
                yield name, json.loads(data)
            name, data = "", b""


def assemble(stream: Iterator[tuple[str, Json]]) -> Json:
    """The whole reply of a stream. Raises CallFailedError on an error event and where the stream was cut."""
    blocks: list[Json] = []
    texts: list[str] = []  # partial JSON of each block
    usage: Json = {}
    stop_reason = "end_turn"
    for name, data in stream:
        if name == "message_start":
            usage.update(data["message"].get("usage") or {})
        elif name == "content_block_start":
            blocks.append(dict(data["content_block"]))
            texts.append("")
        elif name == "content_block_delta":
            block, delta = blocks[data["index"]], data["delta"]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "input_json_delta":
                texts[data["index"]] += delta["partial_json"]
            elif delta["type"] == "thinking_delta":
                block["thinking"] += delta["thinking"]
            elif delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
        elif name == "message_delta":
            stop_reason = data["delta"].get("stop_reason") or stop_reason
            usage.update({k: v for k, v in (data.get("usage") or {}).items() if v is not None})
        elif name == "message_stop":
            for block, text in zip(blocks, texts, strict=True):
                if block["type"] == "tool_use" and text:
                    block["input"] = _arguments(text)
            return {"content": blocks, "stop_reason": stop_reason, "usage": usage}
        elif name == "error":
            error = data.get("error", {})
            fatal = error.get("type") in ("invalid_request_error", "authentication_error", "permission_error")
            raise CallFailedError(f"{error.get('type')}: {error.get('message')}", retry=not fatal)
    raise CallFailedError("the stream was cut", retry=True)


def _arguments(text: str) -> Json:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"unparsed": text}


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(OUTPUT_LIMIT)


def _write(path: str, content: str) -> str:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(content)
    return "ok"


def _run(command: str) -> str:
    env = {k: v for k, v in os.environ.items() if k != "ANTHROPIC_AUTH_TOKEN"}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(["/bin/sh", "-c", command], env=env, **pipes) as process:  # type: ignore[call-overload]
        try:
            output = process.communicate(timeout=TOOL_LIMIT_S)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            process.kill()
            return "timed out"
    return output[-OUTPUT_LIMIT:] or f"exit {process.returncode}"


WORKSPACE_TOOLS: dict[str, Callable[..., str]] = {"read": _read, "write": _write, "run": _run}


class Limits:
    """Tokens and turns of one agent and its sub-agents."""

    def __init__(self, compact_at: int = COMPACT_AT, max_tokens: int = MAX_TOKENS, max_turns: int = MAX_TURNS) -> None:
        self.compact_at, self.max_tokens, self.max_turns = compact_at, max_tokens, max_turns


class Agent:
    """One history and the loop that grows it. ``call`` is any model; ``tools`` takes keyword arguments, gives text."""

    def __init__(
        self, call: ModelCall, tools: dict[str, Callable[..., str]], limits: Limits, *, is_sub: bool = False
    ) -> None:
        self.call, self.tools, self.limits, self.is_sub = call, tools, limits, is_sub
        self.system, self.specs = (SUB_SYSTEM, SUB_TOOLS) if is_sub else (MAIN_SYSTEM, MAIN_TOOLS)
        self.messages: list[Json] = []
        self.turns = 0

    def run(self, instruction: str) -> str:
        """Work until a reply has no tool call, or the turns are used up; the last text is the answer."""
        self.messages = [{"role": "user", "content": [{"type": "text", "text": instruction}]}]
        text = ""
        while self.turns < self.limits.max_turns:
            try:
                reply = self._reply()
            except TooLongError:
                self._compact(instruction, self.messages[:-2])
                continue
            text = text_of(reply)
            calls = [block for block in reply["content"] if block["type"] == "tool_use"]
            if not calls:
                return text
            self.messages.append({"role": "assistant", "content": reply["content"]})
            self.messages.append({"role": "user", "content": self._perform(calls)})
            if tokens_of(reply) > self.limits.compact_at:
                self._compact(instruction, self.messages)
        return text or "out of turns"

    def _reply(self) -> Json:
        """The next reply. One that was cut or is empty leads nowhere: the path is tried again from the same history."""
        for _ in range(1 + MAX_RESAMPLED):
            reply = self._ask(self.messages)
            if reply["content"] and reply["stop_reason"] != "max_tokens":
                break
        return reply

    def _ask(self, messages: list[Json]) -> Json:
        self.turns += 1
        return self.call(
            {
                "max_tokens": self.limits.max_tokens,
                "system": [{"type": "text", "text": self.system}],
                "messages": messages,
                "tools": self.specs,
            }
        )

    def _perform(self, calls: list[Json]) -> list[Json]:
        results: list[Json] = [{} for _ in calls]

        def one(index: int) -> None:
            results[index] = self._result(calls[index])

        threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(1, len(calls))]
        for thread in threads:
            thread.start()
        one(0)
        for thread in threads:
            thread.join()
        return results

    def _result(self, block: Json) -> Json:
        result = {"type": "tool_result", "tool_use_id": block["id"]}
        try:
            if block["name"] == "agent" and not self.is_sub:
                sub = Agent(self.call, self.tools, self.limits, is_sub=True)
                return {**result, "content": sub.run(str(block["input"]["task"])) or "no answer"}
            if block["name"] not in self.tools:
                raise ValueError(f"no tool {block['name']}")
            return {**result, "content": self.tools[block["name"]](**block["input"])}
        except KeyError as error:
            message = f"missing {error}"
        except (OSError, TypeError, ValueError, CallFailedError) as error:
            message = getattr(error, "strerror", None) or str(error)
        return {**result, "content": message, "is_error": True}

    def _compact(self, instruction: str, messages: list[Json]) -> None:
        """Start the history again from the model's own summary of ``messages``, or from nothing if none fits."""
        summary = ""
        while len(messages) > 1 and not summary:
            *earlier, last = messages
            asked = {**last, "content": [*last["content"], {"type": "text", "text": ASK_SUMMARY}]}
            try:
                summary = text_of(self._ask([*earlier, asked]))
                break
            except TooLongError:
                messages = messages[:-2]
        text = f"{instruction}\n{SUMMARY_HEAD}{summary}" if summary else instruction
        self.messages = [{"role": "user", "content": [{"type": "text", "text": text}]}]


def text_of(reply: Json) -> str:
    """The text blocks of a reply, joined."""
    return "".join(block["text"] for block in reply["content"] if block["type"] == "text").strip()


def tokens_of(reply: Json) -> int:
    """Tokens of the call, prompt and reply, however the server splits them over its caches."""
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
    return sum(int(reply["usage"].get(name) or 0) for name in names)


def main(argv: list[str]) -> int:
    """Run the instruction; the answer goes to stdout. Exit code 0: answered, 1: the model failed, 2: wrong usage."""
    options: dict[str, int] = {}
    while argv and argv[0].startswith("--"):
        name = argv.pop(0)[2:].replace("-", "_")
        if name not in ("compact_at", "max_tokens", "max_turns") or not argv or not argv[0].isdigit():
            sys.stderr.write(__doc__ or "")
            return 2
        options[name] = int(argv.pop(0))
    instruction = " ".join(argv) or sys.stdin.read()
    env = os.environ
    try:
        call = Messages(env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_AUTH_TOKEN"], env.get("ANTHROPIC_MODEL", "policy"))
        answer = Agent(call, WORKSPACE_TOOLS, Limits(**options)).run(instruction)
    except KeyError as error:
        sys.stderr.write(f"{error} is not set\n")
        return 2
    except (CallFailedError, TooLongError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(answer + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
