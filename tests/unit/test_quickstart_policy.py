"""The shipped policy: a folder that loads, a vocabulary that makes calls short, demonstrations that read back."""

import json
from itertools import islice
from random import Random

import pytest

from opengyre import config
from opengyre.proxy.conversation import Conversation, Text, ToolCall
from opengyre.proxy.render import Renderer
from opengyre.quickstart import CONFIG_FILE, POLICY_DIR, harness
from opengyre.quickstart.demonstrations import demonstrate, said, sequence
from opengyre.quickstart.demonstrator import Habits
from opengyre.quickstart.tasks import QuickstartTasks, draw, functions_of


@pytest.fixture(scope="module")
def renderer():
    return Renderer.load(POLICY_DIR)


@pytest.fixture(scope="module")
def shown(renderer):
    """Demonstrations of big tasks with the harness's own compaction, counted in real tokens."""
    functions = functions_of("held_out")
    rngs = [Random(f"test/{i}") for i in range(12)]
    return [
        demonstrate(draw(r, functions, big=True), r, Habits(), lambda c: len(sequence(c, renderer)[0])) for r in rngs
    ]


def meaning(parts) -> list:
    return [p.text if isinstance(p, Text) else (p.name, p.arguments) for p in parts]


def test_the_folder_is_small_and_complete():
    files = {p.name for p in POLICY_DIR.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= files
    assert {"chat_template.jinja", "model.safetensors"} <= files
    assert (POLICY_DIR / "model.safetensors").stat().st_size < 3_000_000
    shape = json.loads((POLICY_DIR / "config.json").read_text())
    assert shape["model_type"] == "qwen3" and shape["vocab_size"] <= 512


def test_bytes_outside_the_vocabulary_survive(renderer):
    text = "naïve 漢字 \t\x00 <tool_call>"
    assert renderer.decode(renderer.encode(text)) == text


def test_digits_and_called_names_are_tokens_of_their_own(renderer):
    for name in ("tax", "fee"):
        lone = renderer.encode(name + "(")[:-1]
        for around in (f"def {name}(x, n=3)", f"{name}(s) FAIL", f'"content": "def {name}(s): '):
            ids = renderer.encode(around)
            assert any(ids[i : i + len(lone)] == lone for i in range(len(ids)))
    assert len({renderer.encode(f"(x, n={n}): ")[-2] for n in range(2, 10)}) == 8


def test_a_demonstration_reads_back_as_what_was_shown(renderer, shown):
    (stop,) = renderer.stop_token_ids
    for history in (h for d in shown for h in d.histories):
        for message in (m for m in history.messages if m.role == "assistant"):
            turn = renderer.parse([*renderer.encode(said(message)), stop], "stop")
            assert turn.complete and not turn.malformed
            assert meaning(turn.parts) == meaning(message.parts)


def test_training_text_is_the_text_seen_at_run_time(renderer, shown):
    """The ids before any reply equal the prompt of its call, and re-encoding the history gives the same ids."""
    for history in (h for d in shown[:4] for h in d.histories):
        ids, sampled = sequence(history, renderer)
        starts = [i for i in range(1, len(ids)) if sampled[i] and not sampled[i - 1]]
        turns = [i for i, m in enumerate(history.messages) if m.role == "assistant"]
        assert len(starts) == len(turns)
        for start, turn in zip(starts, turns, strict=True):
            prompt = renderer.render(Conversation(history.messages[:turn], history.tools))
            assert ids[:start] == prompt.ids


def test_demonstrations_show_every_kind_of_call(shown):
    histories = [h for d in shown for h in d.histories]
    systems = {h.messages[0].text for h in histories}
    assert systems == {harness.MAIN_SYSTEM, harness.SUB_SYSTEM}
    texts = [m.text for h in histories for m in h.messages]
    assert harness.ASK_SUMMARY in texts and any(harness.SUMMARY_HEAD in t for t in texts)
    turns = [m for h in histories for m in h.messages if m.role == "assistant"]
    assert any(sum(isinstance(p, ToolCall) for p in t.parts) > 1 for t in turns)  # parallel calls
    assert any(d.reward == 1.0 for d in shown) and any(d.reward < 1.0 for d in shown)


def test_a_flawless_author_passes_and_never_needs_a_second_try():
    habits = Habits(right=dict.fromkeys(Habits().right, 1.0), checks=1.0, rereads=0.0)
    functions = functions_of("train")
    for i in range(20):
        rng = Random(i)
        one = demonstrate(draw(rng, functions, big=bool(i % 2)), rng, habits, lambda _: 0)
        assert one.reward == 1.0 and one.calls <= 9


def test_the_config_loads_and_fits_the_tasks_and_the_policy(renderer):
    run = config.load(CONFIG_FILE, [])
    assert run.model.context <= renderer.context and run.steps >= 12
    tasks = QuickstartTasks(run.tasks.train, run.tasks.held_out, run.tasks.seed, run.tasks.options)
    assert len(tasks.tasks("train")) == run.tasks.train >= run.samples.queries_per_step
    assert len(list(islice(tasks.tasks("held_out"), 24))) == run.tasks.held_out
