"""The store: durable, whole, small, and the same tree afterwards."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from opengyre.errors import RecordError
from opengyre.record.call import CommittedCall
from opengyre.record.store import Store
from opengyre.record.tree import Tree
from record_making import Talk, chain, reply

HERE = Path(__file__).parent
WRITER = """
import sys
sys.path.insert(0, sys.argv[3])
from pathlib import Path
from record_making import Talk
from opengyre.record.store import Store
store, name, talk, history = Store.open(Path(sys.argv[1])), sys.argv[2], Talk(), [(7,)]
store.begin_execution(name, {})
for turn in range(int(sys.argv[4])):
    call = talk.prepare(history, (100 + turn, *range(50)))
    store.put(name, call)
    print(call.meta.call_id, flush=True)
    talk.tree.commit(call)
    history += [(100 + turn, *range(50)), (9, turn)]
"""


def writer(path: Path, name: str, turns: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(HERE), str(turns)], stdout=subprocess.PIPE, text=True
    )


def record(store: Store, name: str, turns: int, tokens: int) -> Talk:
    """A run of turns with ``tokens`` new tokens each, a quarter of them the harness's."""
    random = np.random.default_rng(0)
    talk, history = Talk(), [(7,)]
    store.begin_execution(name, {"task": "t"})
    for _ in range(turns):
        answer = tuple(random.integers(10, 150_000, tokens * 3 // 4 - 2).tolist())
        call = talk.prepare(history, answer, tool_names=("bash", "read"), system_head="x" * 200, asked="y" * 400)
        store.put(name, call)
        talk.tree.commit(call)
        history += [answer, tuple(random.integers(10, 150_000, tokens // 4).tolist())]
    return talk


def same(a: Tree, b: Tree) -> bool:
    def told(tree: Tree) -> list[object]:
        return [(leaf, *(x.tolist() for x in tree.rebuild(leaf)[:3])) for leaf in tree.leaves()]

    return told(a) == told(b) and [c.meta for c in a.calls()] == [c.meta for c in b.calls()]


def test_a_tree_comes_back_as_it_was(tmp_path: Path):
    talk = Talk()
    with Store.open(tmp_path / "calls.db") as store:
        store.begin_execution("e", {"task": "t"})
        for history, answer, about in (
            ([(1, 2)], (10,), {"headers": {"user-agent": "x"}, "asked": "lone \ud800"}),
            ([(1, 2), (10,), (3,)], (11, 12), {"versions": (3, 4)}),
            ([(1, 2), (10,), (3,)], (13,), {"delivered": False}),
            ([(1, 3)], (), {"usable": False}),
        ):
            call = talk.prepare(history, answer, **about)
            store.put("e", call, messages=[{"role": "user", "content": "hé"}])
            talk.tree.commit(call)
    with Store.open(tmp_path / "calls.db") as store:
        tree = store.load_tree("e")
        assert same(tree, talk.tree)
        assert tree.match(chain([(1, 2), (10,), (3,), (11, 12)])) == talk.tree.match(
            chain([(1, 2), (10,), (3,), (11, 12)])
        )
        assert store.messages("e", "call-0000") == [{"role": "user", "content": "hé"}]
        assert store.messages("e", "no such call") is None


def test_executions_begin_and_finish(tmp_path: Path):
    with Store.open(tmp_path / "calls.db") as store:
        store.begin_execution("a", {"task": "t"})
        record(store, "b", 2, 8)
        store.finish_execution("b", {"outcome": "finished"})
        assert [(e.execution_id, e.meta, e.outcome, e.calls) for e in store.executions()] == [
            ("a", {"task": "t"}, None, 0),
            ("b", {"task": "t"}, {"outcome": "finished"}, 2),
        ]
        assert store.execution("b").calls == 2
        for wrong in (
            lambda: store.begin_execution("a", {}),
            lambda: store.finish_execution("c", {}),
            lambda: store.load_tree("c"),
            lambda: store.put("c", Talk().prepare([(1,)], (2,))),
            lambda: store.put("b", Talk().prepare([(1,)], (2,))),  # call-0000 again
        ):
            with pytest.raises(RecordError):
                wrong()
        assert store.execution("b").calls == 2


def test_what_was_acknowledged_survives_a_kill(tmp_path: Path):
    with writer(tmp_path / "calls.db", "e", 100_000) as child:
        assert child.stdout is not None
        acknowledged = [child.stdout.readline().strip() for _ in range(40)]
        child.send_signal(signal.SIGKILL)
        acknowledged += child.stdout.read().split()
    with Store.open(tmp_path / "calls.db") as store:
        names = [c.meta.call_id for c in store.load_tree("e").calls()]  # digests of every call hold: none is half
    assert acknowledged[:40] == names[:40]
    assert set(acknowledged) - {acknowledged[-1]} <= set(names)  # the last line may be torn by the kill
    assert len(names) >= len(acknowledged) >= 40


def test_O05_many_processes_write_while_one_reads(tmp_path: Path):
    path = tmp_path / "calls.db"
    Store.open(path).close()
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    assert reader.execute("SELECT count(*) FROM calls").fetchone() == (0,)
    children = [writer(path, f"e{i}", 50) for i in range(4)]
    assert [child.wait() for child in children] == [0] * 4  # the read transaction is held all the while
    for child in children:
        assert child.stdout is not None
        child.stdout.close()
    assert reader.execute("SELECT count(*) FROM calls").fetchone() == (0,)
    reader.execute("ROLLBACK")
    assert reader.execute("SELECT count(*) FROM calls").fetchone() == (200,)
    reader.close()


def test_O05_threads_share_one_connection(tmp_path: Path):
    with Store.open(tmp_path / "calls.db") as store:
        threads = [threading.Thread(target=record, args=(store, f"e{i}", 20, 8)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [e.calls for e in store.executions()] == [20] * 6


def test_a_live_run_is_read_by_another_connection(tmp_path: Path):
    with Store.open(tmp_path / "calls.db") as store:
        talk = record(store, "e", 3, 8)
        with Store.open(tmp_path / "calls.db", readonly=True) as viewer:
            assert same(viewer.load_tree("e"), talk.tree)
            call = talk.prepare([(5,)], (6,))
            store.put("e", call)
            assert len(viewer.load_tree("e").calls()) == 4
            with pytest.raises(RecordError, match="readonly"):
                viewer.begin_execution("f", {})


def test_a_full_disk_is_an_error_and_nothing_half_written(tmp_path: Path):
    with Store.open(tmp_path / "calls.db") as store:
        talk = record(store, "e", 2, 8)
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages + 1}")
        big = talk.prepare([(7,)], tuple(np.random.default_rng(1).integers(10, 150_000, 20_000).tolist()))
        with pytest.raises(RecordError, match="full"):
            store.put("e", big)
        assert same(store.load_tree("e"), talk.tree)
        store._db.execute("PRAGMA max_page_count = 1000000")
        store.put("e", big)
        talk.tree.commit(big)
        assert same(store.load_tree("e"), talk.tree)


def test_T09_bytes_grow_with_new_tokens_only(tmp_path: Path):
    size = {}
    for turns in (50, 100, 200):
        path = tmp_path / f"{turns}.db"
        with Store.open(path) as store:
            talk = record(store, "e", turns, 500)
        size[turns] = path.stat().st_size
        assert abs(talk.tree.unique_tokens - turns * 500) <= 500 + 5 * turns
    assert size[200] <= 2.2 * size[100]
    assert size[100] <= 2.2 * size[50]
    assert size[200] <= 1_300_000, size


def test_calls_put_in_another_order_than_committed_load_the_same_paths(tmp_path: Path):
    talk = Talk()
    first, second = talk.prepare([(1, 2), (3,)], (10,)), talk.prepare([(1, 2), (4,)], (11,))
    with Store.open(tmp_path / "calls.db") as store:
        store.begin_execution("e", {})
        store.put("e", second)
        store.put("e", first)
        talk.tree.commit(first)
        talk.tree.commit(second)
        for history in ([(1, 2), (4,), (11,), (5,)], [(1, 2), (3,), (6,)], [(1, 2), (3,), (10,), (5,)]):
            call = talk.prepare(history, (12,))
            store.put("e", call)
            talk.tree.commit(call)
        tree = store.load_tree("e")
    paths = [sorted(t.rebuild(leaf).ids.tolist() for leaf in t.leaves()) for t in (tree, talk.tree)]
    assert paths[0] == paths[1] and tree.unique_tokens == talk.tree.unique_tokens


def test_rows_that_contradict_each_other_are_refused(tmp_path: Path):
    with Store.open(tmp_path / "calls.db") as store:
        record(store, "e", 3, 8)
        store._db.execute("UPDATE calls SET depth = depth - 1 WHERE seq = 3")
        with pytest.raises(RecordError, match="engine saw"):
            store.load_tree("e")
        store._db.execute("UPDATE calls SET ids = x'01ffff' WHERE seq = 2")
        with pytest.raises(RecordError, match="db: e"):
            store.load_tree("e")


def test_files_that_are_not_ours_are_refused(tmp_path: Path):
    (tmp_path / "text").write_text("not a database, " * 100)
    with pytest.raises(RecordError):
        Store.open(tmp_path / "text")
    with pytest.raises(RecordError, match="no such record"):
        Store.open(tmp_path / "absent", readonly=True)
    other = sqlite3.connect(tmp_path / "other")
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(RecordError, match="schema 99"):
        Store.open(tmp_path / "other")


def test_spans_without_logprobs_come_back_masked(tmp_path: Path):
    """A gap in the log-probabilities: kept as NaN, never trainable, never 0.0."""
    talk = Talk()
    call = talk.prepare([(1,)], (10,), usable=False)
    gap = reply((10, 1), trainable=False)
    gap.logprobs[:] = np.nan  # type: ignore[index]
    object.__setattr__(call, "sampled", (gap,))
    with Store.open(tmp_path / "calls.db") as store:
        store.begin_execution("e", {})
        store.put("e", call)
        tree = store.load_tree("e")
    path = tree.rebuild(tree.leaves()[0])
    assert path.sampled.sum() == 2 and not path.trainable.any()
    assert np.isnan(path.logprobs).all()


def submitted_together(store: Store, puts: list[tuple[str, CommittedCall]]) -> list[Future[None]]:
    """Submitted before a writer runs, so that one transaction takes them all."""
    if store._writer is not None:
        store._waiting.put(None)
        store._writer.join()
        store._writer = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: None)
        futures = [store.submit(name, call) for name, call in puts]
    assert store._writer is not None
    store._writer.start()
    return futures


def test_calls_that_wait_share_a_transaction_and_fail_alone(tmp_path: Path):
    with Store.open(tmp_path / "calls.db") as store:
        talks = [record(store, f"e{i}", 1, 8) for i in range(4)]
        calls = [talk.prepare([(5,)], (i,)) for i, talk in enumerate(talks)]
        statements: list[str] = []
        store._db.set_trace_callback(statements.append)
        puts = [(f"e{i}", call) for i, call in enumerate(calls)]
        puts[1:1] = [("unknown", calls[0]), ("e0", calls[0])]  # no such execution; stored already by the first
        futures = submitted_together(store, puts)
        failed = {i for i, future in enumerate(futures) if future.exception(timeout=30)}
        assert failed == {1, 2} and all(isinstance(futures[i].exception(), RecordError) for i in failed)
        assert sum(s.startswith("COMMIT") for s in statements) == 1
    with Store.open(tmp_path / "calls.db", readonly=True) as store:
        assert [e.calls for e in store.executions()] == [2] * 4


def test_a_transaction_that_fails_as_a_whole_costs_only_the_calls_that_do_not_fit(tmp_path: Path):
    with Store.open(tmp_path / "calls.db") as store:
        talks = [record(store, f"e{i}", 1, 8) for i in range(3)]
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages + 1}")
        huge = tuple(np.random.default_rng(1).integers(10, 150_000, 20_000).tolist())
        calls = [talk.prepare([(5,)], answer) for talk, answer in zip(talks, [(1,), huge, (2,)], strict=True)]
        futures = submitted_together(store, [(f"e{i}", call) for i, call in enumerate(calls)])
        assert [future.exception(timeout=30) is None for future in futures] == [True, False, True]
        assert [e.calls for e in store.executions()] == [2, 1, 2]


def test_closing_writes_what_was_submitted(tmp_path: Path):
    store = Store.open(tmp_path / "calls.db")
    talk = record(store, "e", 1, 8)
    futures = []
    for i in range(20):
        call = talk.prepare([(i, 5)], (i,))
        futures.append(store.submit("e", call))
        talk.tree.commit(call)
    store.close()
    store.close()
    assert all(future.done() and future.exception() is None for future in futures)
    with pytest.raises(RecordError, match="closed"):
        store.put("e", talk.prepare([(99,)], (1,)))
    with Store.open(tmp_path / "calls.db", readonly=True) as again:
        assert same(again.load_tree("e"), talk.tree)
