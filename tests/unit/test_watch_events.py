"""The event log: whole lines only, one clock across resumes."""

from pathlib import Path

from opengyre.watch.events import EventLog, read


def test_a_torn_last_line_is_cut_and_time_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    now = [100.0]
    log = EventLog(path, clock=lambda: now[0])
    log.emit("note", text="a")
    now[0] = 107.5
    log.emit("note", text="b")
    log.close()
    path.write_bytes(path.read_bytes() + b'{"t": 9, "kin')
    now[0] = 3.0  # a new process, another monotonic clock
    again = EventLog(path, clock=lambda: now[0])
    now[0] = 4.0
    heard: list[dict] = []
    again.listen(heard.append)
    again.emit("note", text="c")
    assert [(e["t"], e["text"]) for e in read(path)] == [(0.0, "a"), (7.5, "b"), (8.5, "c")]
    assert [e["text"] for e in heard] == ["c"]
