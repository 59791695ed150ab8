"""The built-in harness against a scripted server: tools, sub-agents, compaction, retries, and what it imports."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from opengyre.quickstart import HARNESS_FILE, harness

Reply = dict | Callable[[BaseHTTPRequestHandler], None]
CUT = "cut"  # the stream ends in the middle of a block
OVERLOADED_EVENT = "overloaded"  # an error event in a 200 stream


def text(words: str, **more) -> dict:
    return {"content": [{"type": "text", "text": words}], "stop": "end_turn", "input_tokens": 10, **more}


def use(*calls: tuple[str, dict], ids: list[str] | None = None, **more) -> dict:
    blocks = [
        {"type": "tool_use", "id": (ids or [f"c{i}" for i in range(9)])[i], "name": name, "input": arguments}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"content": blocks, "stop": "tool_use", "input_tokens": 10, **more}


def failing(status: int, message: str = "no", **headers: str) -> dict:
    return {"status": status, "message": message, "headers": headers}


class Scripted:
    """Answers requests in order (or by ``choose``) and keeps them; ``paths`` and ``tokens`` are what was asked with."""

    def __init__(self, *replies, choose=None) -> None:
        self.replies, self.choose = list(replies), choose
        self.requests: list[dict] = []
        self.paths: list[tuple[str, str]] = []
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append(body)
                    outer.paths.append((self.path, self.headers["Authorization"]))
                    reply = outer.choose(body) if outer.choose else outer.replies.pop(0)
                outer.answer(self, reply)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/x/e-7"

    def answer(self, handler, reply) -> None:
        if "status" in reply:
            body = json.dumps({"type": "error", "error": {"type": "e", "message": reply["message"]}}).encode()
            handler.send_response(reply["status"])
            for name, value in {**reply["headers"], "Content-Length": str(len(body))}.items():
                handler.send_header(name.replace("_", "-"), value)
            handler.end_headers()
            handler.wfile.write(body)
            return
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        stream = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in wire(reply)).encode()
        if reply.get("broken") == CUT:
            stream = stream[: len(stream) // 2]
        for start in range(0, len(stream), 37):  # chunk borders fall anywhere, in the middle of a line too
            piece = stream[start : start + 37]
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        if reply.get("broken") != CUT:
            handler.wfile.write(b"0\r\n\r\n")
        handler.close_connection = True

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def wire(reply: dict):
    """The events of a reply."""
    yield "message_start", {"message": {"usage": {"input_tokens": reply["input_tokens"], "output_tokens": 0}}}
    yield "ping", {"type": "ping"}
    if reply.get("broken") == OVERLOADED_EVENT:
        yield "error", {"error": {"type": "overloaded_error", "message": "later"}}
        return
    for index, block in enumerate(reply["content"]):
        empty = {**block, **({"text": ""} if block["type"] == "text" else {"input": {}})}
        yield "content_block_start", {"index": index, "content_block": empty}
        whole = block["text"] if block["type"] == "text" else reply.get("raw") or json.dumps(block["input"])
        kind, key = ("text_delta", "text") if block["type"] == "text" else ("input_json_delta", "partial_json")
        for half in (whole[:5], whole[5:]):
            yield "content_block_delta", {"index": index, "delta": {"type": kind, key: half}}
        yield "content_block_stop", {"index": index}
    usage = {"output_tokens": reply.get("output_tokens", 5)}
    yield "message_delta", {"delta": {"stop_reason": reply["stop"]}, "usage": usage}
    yield "message_stop", {"type": "message_stop"}


@pytest.fixture
def server():
    made: list[Scripted] = []

    def make(*replies, choose=None) -> Scripted:
        made.append(Scripted(*replies, choose=choose))
        return made[-1]

    yield make
    for one in made:
        one.close()


def run(server: Scripted, workspace, *options: str, instruction: str = "Do it.", **env: str):
    """The harness as a process of its own."""
    return subprocess.run(
        [sys.executable, "-I", "-S", str(HARNESS_FILE), *options, instruction],
        cwd=workspace,
        capture_output=True,
        text=True,
        env={
            "PATH": os.defpath,
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_AUTH_TOKEN": "secret",
            "ANTHROPIC_MODEL": "policy",
            **env,
        },
    )


def drive(server: Scripted, workspace, monkeypatch, sleeps: list[float] | None = None, **limits: int) -> str:
    """The same code in this process, with a clock that only notes."""
    monkeypatch.chdir(workspace)
    call = harness.Messages(server.url, "secret", "policy", (sleeps if sleeps is not None else []).append)
    return harness.Agent(call, harness.WORKSPACE_TOOLS, harness.Limits(**limits)).run("Do it.")


def results(request: dict) -> list[dict]:
    return [b for b in request["messages"][-1]["content"] if b["type"] == "tool_result"]


def test_it_reads_writes_runs_and_answers(server, tmp_path):
    (tmp_path / "a.md").write_text("hello\n")
    fake = server(
        use(("read", {"path": "a.md"})),
        use(("write", {"path": "d/b.py", "content": "x = 1\n"})),
        use(("run", {"command": "cat d/b.py; echo $ANTHROPIC_AUTH_TOKEN$ANTHROPIC_BASE_URL"})),
        text("Done."),
    )
    done = run(fake, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Done.\n", "")
    assert [results(r)[0]["content"] for r in fake.requests[1:]] == ["hello\n", "ok", f"x = 1\n{fake.url}\n"]
    assert set(fake.paths) == {("/x/e-7/v1/messages", "Bearer secret")}
    first = fake.requests[0]
    assert first["stream"] and first["model"] == "policy" and [t["name"] for t in first["tools"]][-1] == "agent"
    for before, after in zip(fake.requests, fake.requests[1:], strict=False):  # the history is only ever appended to
        assert after["messages"][: len(before["messages"])] == before["messages"]


def test_the_instruction_may_come_from_stdin_and_what_is_missing_is_named(server, tmp_path):
    fake = server(text("Yes."))
    argv = [sys.executable, "-I", "-S", str(HARNESS_FILE), "--max-tokens", "9"]
    env = {"ANTHROPIC_BASE_URL": fake.url, "ANTHROPIC_AUTH_TOKEN": "t"}
    done = subprocess.run(argv, cwd=tmp_path, env=env, input="From stdin.", capture_output=True, text=True)
    assert done.stdout == "Yes.\n" and fake.requests[0]["max_tokens"] == 9
    assert fake.requests[0]["messages"][0]["content"][0]["text"] == "From stdin."
    done = subprocess.run(argv, cwd=tmp_path, env={}, input="x", capture_output=True, text=True)
    assert done.returncode == 2 and "ANTHROPIC_BASE_URL" in done.stderr


def test_parallel_calls_run_at_once_and_come_back_in_order_whatever_their_ids(server, tmp_path, monkeypatch):
    """Each waits for the other's file: one after the other would never end. Ids repeat, as some servers mint them."""
    wait = "while ! [ -e {} ]; do sleep 0.01; done; echo {}"
    both = (
        ("run", {"command": "touch a; " + wait.format("b", "one")}),
        ("run", {"command": "touch b; " + wait.format("a", "two")}),
    )
    fake = server(use(*both, ids=["call_0", "call_0"]), text("Done."))
    assert drive(fake, tmp_path, monkeypatch) == "Done."
    assert [(r["tool_use_id"], r["content"]) for r in results(fake.requests[1])] == [
        ("call_0", "one\n"),
        ("call_0", "two\n"),
    ]


def test_a_tool_that_fails_is_an_error_result(server, tmp_path, monkeypatch):
    fake = server(
        use(("read", {"path": "none"})),
        use(("fly", {})),
        use(("read", {"file": "x"})),
        use(("read", {}), raw='{"path": '),
        use(("run", {"command": "exit 3"})),
        text("Done."),
    )
    drive(fake, tmp_path, monkeypatch)
    *errors, exit_3 = [results(r)[0] for r in fake.requests[1:]]
    assert all(e["is_error"] for e in errors)
    assert "No such file" in errors[0]["content"] and "fly" in errors[1]["content"]
    assert exit_3["content"] == "exit 3"


def test_a_sub_agent_has_a_fresh_history_its_own_system_prompt_and_no_agent_tool(server, tmp_path, monkeypatch):
    fake = server(
        use(("agent", {"task": "Help."})),
        use(("write", {"path": "u.py", "content": ""})),
        use(("agent", {"task": "Deeper."})),
        text("Helped."),
        text("Done."),
    )
    assert drive(fake, tmp_path, monkeypatch) == "Done."
    main, sub = fake.requests[0], fake.requests[1]
    assert sub["messages"] == [{"role": "user", "content": [{"type": "text", "text": "Help."}]}]
    assert sub["system"] != main["system"] and "agent" not in [t["name"] for t in sub["tools"]]
    assert results(fake.requests[3])[0]["is_error"]  # a sub-agent cannot delegate
    assert results(fake.requests[4])[0]["content"] == "Helped."


def test_a_history_over_the_limit_starts_again_from_its_summary(server, tmp_path, monkeypatch):
    big = use(("run", {"command": "echo hi"}), input_tokens=0, cached=1)
    fake = server(use(("run", {"command": "echo a"})), {**big, "input_tokens": 90}, text("Half done."), text("Done."))
    assert drive(fake, tmp_path, monkeypatch, compact_at=94) == "Done."
    before, asked, after = fake.requests[1:]
    assert (asked["system"], asked["tools"]) == (before["system"], before["tools"])
    assert asked["messages"][: len(before["messages"])] == before["messages"]
    assert asked["messages"][-1]["content"][0]["content"] == "hi\n"
    assert asked["messages"][-1]["content"][-1]["text"] == harness.ASK_SUMMARY
    assert after["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Do it.\nSo far: Half done."}]},
    ]


def test_a_prompt_that_is_too_long_is_summarised_from_what_fits(server, tmp_path, monkeypatch):
    too_long = failing(400, "prompt is too long: 5000 tokens > 4096 maximum")
    work = use(("run", {"command": "echo a"}))
    fake = server(work, work, work, too_long, too_long, text("Began."), text("Done."))
    assert drive(fake, tmp_path, monkeypatch) == "Done."
    assert [len(r["messages"]) for r in fake.requests] == [1, 3, 5, 7, 5, 3, 1]


def test_what_cannot_be_shortened_ends_with_the_turn_limit(server, tmp_path, monkeypatch):
    fake = server(choose=lambda _: failing(400, "prompt is too long"))
    assert drive(fake, tmp_path, monkeypatch, max_turns=3) == "out of turns"


@pytest.mark.parametrize("bad", [failing(529), failing(429), failing(408), failing(500), {"broken": CUT}])
def test_a_failed_call_is_repeated_byte_for_byte(server, tmp_path, monkeypatch, bad):
    sleeps: list[float] = []
    first = {**text("Lost."), **bad} if "broken" in bad else bad
    fake = server(first, first, text("Done."))
    assert drive(fake, tmp_path, monkeypatch, sleeps) == "Done."
    assert fake.requests[0] == fake.requests[1] == fake.requests[2]
    assert sleeps == [harness.FIRST_DELAY_S, 2 * harness.FIRST_DELAY_S]


def test_an_error_event_is_repeated_and_retry_after_is_obeyed(server, tmp_path, monkeypatch):
    sleeps: list[float] = []
    fake = server({**text(""), "broken": OVERLOADED_EVENT}, failing(503, Retry_After="3"), text("Done."))
    assert drive(fake, tmp_path, monkeypatch, sleeps) == "Done."
    assert sleeps == [harness.FIRST_DELAY_S, 3.0]


def test_a_refused_connection_is_repeated_to_the_end(server, tmp_path, monkeypatch):
    fake, sleeps = server(), []
    fake.close()
    with pytest.raises(harness.CallFailedError, match="ConnectionRefused"):
        drive(fake, tmp_path, monkeypatch, sleeps)
    assert len(sleeps) == harness.TRIES - 1 and max(sleeps) == harness.LONGEST_DELAY_S


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refusal_is_not_repeated_and_ends_the_process_with_a_message(server, tmp_path, status):
    fake = server(failing(status, "never"))
    done = run(fake, tmp_path)
    assert done.returncode == 1 and f"HTTP {status}" in done.stderr and len(fake.requests) == 1


def test_a_cut_or_empty_reply_is_sampled_again_from_the_same_history(server, tmp_path, monkeypatch):
    fake = server(text("<tool", stop="max_tokens"), {**text(""), "content": []}, text("Done."))
    assert drive(fake, tmp_path, monkeypatch) == "Done."
    assert fake.requests[0] == fake.requests[1] == fake.requests[2]


def test_a_failing_sub_agent_is_an_error_result_of_the_main_agent(server, tmp_path, monkeypatch):
    fake = server(use(("agent", {"task": "Help."})), failing(403), text("Done."))
    assert drive(fake, tmp_path, monkeypatch) == "Done."
    assert results(fake.requests[2])[0]["is_error"]


def test_it_imports_little_and_nothing_of_ours():
    """Its start is paid by every execution."""
    code = (
        f"import sys; sys.argv = ['harness.py']; exec(open({str(HARNESS_FILE)!r}).read(), {{'__name__': 'harness'}}); "
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "socket" in loaded
    assert not loaded & {"ssl", "asyncio", "email", "http", "urllib", "typing", "pathlib", "logging", "opengyre"}
    assert loaded <= set(sys.stdlib_module_names) | {"__main__"}
