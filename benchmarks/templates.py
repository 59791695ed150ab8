"""Which chat templates of a folder the renderer can keep its promises with, and why not.

    python benchmarks/templates.py DIR [--json]

DIR holds ``*.jinja`` files as models ship them. Each is given a small tokenizer of its own with the special tokens that
stand in its source, and asked:

- append: does every prefix of a long conversation render to a prefix of the whole?
- tail: do recorded ids and the rendered tail make the whole, from every message on?
- sampled: does a turn sampled with its own stop token stay as it is, with one end, whatever follows?
- round trip: is a rendered turn read as what it was (reasoning, words, parallel calls)?
- stream: are deltas, token by token, prefixes of the turn, and equal to it in the end where no call follows?
- template: how much of the template's own rendering of the whole conversation is the same text (1.00: all of it)?
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from opengyre.errors import OpenGyreError
from opengyre.proxy.conversation import Conversation, Message, Part, Text, Thinking, Tool, ToolCall, ToolResult
from opengyre.proxy.render import Renderer
from opengyre.proxy.stream import TextStream
from opengyre.proxy.template import ChatTemplate

# The brackets that special tokens are written in: <|…|>, <｜…｜>, <start_of_turn>, [INST], … and the two sentence ends.
_SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜<>\s]+｜>|<\w+_of_\w+>|\[/?[A-Z_]{3,}\]|\[e~\[|\]~b\]|\]~!b\[|</?s>|\[gMASK\]|<sop>|\]<\]\w+\[>\[|</?assistant>|<\w+\|>|<\|\w+>|<seed:[be]os>|<SPECIAL_\d+>|<sep>"
)
_EOS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|return|>",
    "<end_of_turn>",
    "<|end|>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
    "<|end_of_text|>",
)
_TEXT = "international user assistant system the tool name arguments tokens of a turn and the next\n" * 4


def tokenizer(source: str, markers: tuple[str, ...]) -> Tokenizer:
    """Byte-level BPE that knows the special tokens of a template and the markers of a format."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator([_TEXT], trainer)
    special = sorted({*_SPECIAL.findall(source), *_EOS, "<s>", "</s>"} - set(markers))
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokens = [m for m in markers if m.startswith(("<", "[", "◁", "｜")) and not m.endswith('"')]
    made.add_tokens([AddedToken(t, special=False, normalized=False) for t in tokens])
    return made


BASH = Tool(
    "bash",
    "Run a command.",
    {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}},
)


def say(role: str, *parts: str | Part) -> Message:
    return Message(role, tuple(Text(p) if isinstance(p, str) else p for p in parts))


def result(call_id: str, text: str) -> Message:
    return Message("tool", (ToolResult(call_id, text),))


CALL = ToolCall("call00001", "bash", {"command": "ls -l 'a b'"})
MORE = ToolCall("call00002", "bash", {"command": 'echo "x" </b>', "n": 3})
LONG = (
    say("system", "You are an agent."),
    say("user", "fix it"),
    say("assistant", Thinking("look first"), "I look.", CALL),
    result("call00001", "a.py"),
    say("assistant", CALL),
    result("call00001", "b.py"),
    say("system", "<left>10</left>"),
    say("assistant", Thinking("hm"), "Done."),
    say("user", "and now?"),
    say("user", "please"),
    say("assistant", "Both.", CALL, MORE),
    result("call00001", "one"),
    result("call00002", "two"),
    say("user", "thanks"),
)
TURNS = {
    "words": (Text("It is done.\n\nReally."),),
    "thinking": (Thinking("think\nhard"), Text("Done.")),
    "call": (CALL,),
    "words+call": (Text("I look."), CALL),
    "thinking+call": (Thinking("look"), CALL),
    "parallel": (Thinking("look"), Text("Both."), CALL, MORE),
}


@dataclass
class Verdict:
    """What a template was found to do."""

    name: str
    format: str = "-"
    append: str = "-"
    tail: str = "-"
    sampled: str = "-"
    round_trip: str = "-"
    stream: str = "-"
    template: str = "-"
    notes: list[str] = field(default_factory=list)


def judge(path: Path) -> Verdict:
    """Try one template."""
    verdict, source = Verdict(path.stem), path.read_text(encoding="utf-8")
    try:
        from opengyre.proxy.formats.registry import choose

        form = choose(source)
        verdict.format = form.name
        tokens = tokenizer(source, form.markers)
        eos = next((t for t in _EOS if t in source), "</s>")
        template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": eos})
        stop = [i for i in [tokens.token_to_id(eos)] if i is not None]
        renderer = Renderer(tokens, template, context=1 << 20, stop_tokens=stop)
    except OpenGyreError as error:
        verdict.notes.append(f"load: {error}")
        return verdict
    for name, check in (
        ("append", _append),
        ("tail", _tail),
        ("sampled", _sampled),
        ("round_trip", _round_trip),
        ("stream", _stream),
        ("template", _whole),
    ):
        try:
            answer, notes = check(renderer)
        except OpenGyreError as error:
            answer, notes = "refused", [str(error)]
        setattr(verdict, name, answer)
        verdict.notes += [f"{name}: {note}" for note in notes]
    wording = renderer._wording
    lacks = [
        w
        for w, ok in (
            ("calls", wording._call_style),
            ("words beside calls", wording._can_write(True, 1)),
            ("parallel calls", wording._can_write(False, 2)),
            ("tool results", wording._writes_results),
            ("reasoning", wording._reasoning_key or form.name == "harmony"),
            ("system in the middle", wording._takes_system("user")),
            ("tools", wording._tools_place("system") != "nowhere"),
        )
        if not ok
    ]
    if lacks:
        verdict.notes.append(f"template cannot say: {', '.join(lacks)}")
    return verdict


Answer = tuple[str, list[str]]


def _verdict(failures: list[str]) -> Answer:
    return ("no" if failures else "yes"), failures[:2]


def _append(r: Renderer) -> Answer:
    failures = []
    whole = r.render(Conversation(LONG, (BASH,)))
    for n in range(2, len(LONG) + 1):
        part = r.render(Conversation(LONG[:n], (BASH,)))
        end = part.ends[-1]
        if whole.ends[n - 1] >= 0 and end >= 0 and part.ids[:end] != whole.ids[: whole.ends[n - 1]]:
            failures.append(f"first {n} messages: {_differ(r, part.ids[:end], whole.ids[: whole.ends[n - 1]])}")
    return _verdict(failures)


def _tail(r: Renderer) -> Answer:
    failures = []
    c = Conversation(LONG, (BASH,))
    whole = r.render(c)
    for start in range(1, len(LONG)):
        end = whole.ends[start - 1]
        if end < 0:
            continue
        head = whole.ids[:end]
        tail = r.render_tail(c, start, head[-1])
        if head + tail.ids != whole.ids:
            failures.append(f"from {start}: {_differ(r, head + tail.ids, whole.ids)}")
    return _verdict(failures)


def _sampled(r: Renderer) -> Answer:
    """After a sampled turn, with any of its stop tokens or cut, the tail begins as it should."""
    failures = []
    c = Conversation((say("user", "x"), say("assistant", "half"), say("user", "y")), (BASH,))
    whole = r.render(c)
    head = whole.ids[: whole.ends[1]]
    cut = r.render_tail(c, 2, r.encode("half")[-1]).ids
    for stop in r.stop_token_ids:
        tail = r.render_tail(c, 2, stop).ids
        if tail[:1] == [stop]:
            failures.append(f"{r._tokenizer.id_to_token(stop)} is said twice")
        if r._next_role_ends and [stop, *tail] != cut and tail != cut:
            failures.append(f"{r._tokenizer.id_to_token(stop)}: another tail than after a cut")
    if not r.stop_token_ids:
        failures.append("no stop token")
    if head[-1] not in r._ended and not r._next_role_ends:
        failures.append("a rendered turn has no end")
    return _verdict(failures)


def _parts(parts: tuple[Part, ...]) -> list[object]:
    return [
        (p.name, p.arguments) if isinstance(p, ToolCall) else p.text for p in parts if not isinstance(p, ToolResult)
    ]


def _body(r: Renderer, before: tuple[Message, ...], turn: tuple[Part, ...]) -> tuple[list[int], bool, bool | None]:
    """The ids of a turn after its generation prompt, whether that opens reasoning, and the thinking switch for it.

    A template that opens reasoning for the model and leaves it out of the history is met without the opening.
    """
    best: tuple[int, list[int], bool, bool | None] | None = None
    for thinking in (True, None, False) if any(isinstance(p, Thinking) for p in turn) else (None, False, True):
        asked = r.render(Conversation(before, (BASH,), thinking=thinking)).ids
        whole = r.render(Conversation((*before, Message("assistant", turn)), (BASH,), thinking=thinking))
        ids = whole.ids[: whole.ends[-1]]
        n = next((i for i, (a, b) in enumerate(zip(asked, ids, strict=False)) if a != b), min(len(asked), len(ids)))
        left = len(asked) - n
        if best is None or left < best[0]:
            best = left, ids[n:], r.opens_thinking(thinking) and not left, thinking
    assert best is not None
    return best[1:]


def _read(r: Renderer, ids: list[int], opened: bool) -> list[object]:
    said = r.format.read(r.decode(r.without_stop(ids)), opened=opened, complete=True, tools=(BASH,))
    return [*([said.thinking] if said.thinking else []), *([said.text] if said.text else []), *said.calls]


def _round_trip(r: Renderer) -> Answer:
    failures, done = [], 0
    before = (say("user", "fix it"),)
    for name, turn in TURNS.items():
        ids, opened, _ = _body(r, before, turn)
        back = _read(r, ids, opened)
        wanted = _parts(turn)
        if not r._wording._reasoning_key and r.format.name != "harmony":
            wanted = [p for p, part in zip(wanted, turn, strict=True) if not isinstance(part, Thinking)]
        if back != wanted:
            failures.append(f"{name}: {back} from {r._tokenizer.decode(ids, skip_special_tokens=False)!r}")
        else:
            done += 1
    return f"{done}/{len(TURNS)}", failures[:2]


def _stream(r: Renderer) -> Answer:
    failures = []
    for name, turn in TURNS.items():
        ids, opened, _ = _body(r, (say("user", "fix it"),), turn)
        said = r.format.read(r.decode(r.without_stop(ids)), opened=opened, complete=True, tools=(BASH,))
        stream, got = TextStream(r, (), None), {"thinking": "", "text": ""}
        stream._release = r.format.release(opened=opened)
        for token in ids:
            for kind, text in stream.feed([token]):
                got[kind] += text
        for kind, want in (("thinking", said.thinking), ("text", said.text)):
            if not want.startswith(got[kind]):
                failures.append(f"{name}: {kind} {got[kind]!r} of {want!r}")
    return _verdict(failures)


def _whole(r: Renderer) -> Answer:
    """The template's own text of a conversation without what it is known to change, against ours."""
    plain = [{"role": m.role, "content": m.text} for m in LONG[:2]] + [
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "and now?"},
    ]
    c = Conversation((*LONG[:2], say("assistant", "Hello."), say("user", "and now?")))
    ours = r._tokenizer.decode(r.render(c).ids, skip_special_tokens=False)
    try:
        theirs = r._wording._template.text(plain, generate=True)
    except OpenGyreError as error:
        return "refused", [str(error)[:80]]
    if ours == theirs:
        return "1.00", []
    matcher = difflib.SequenceMatcher(None, theirs, ours, autojunk=False)
    changes = [f"{theirs[a:b]!r} -> {ours[c:d]!r}" for tag, a, b, c, d in matcher.get_opcodes() if tag != "equal"]
    return f"{matcher.ratio():.2f}", changes[:2]


def _differ(r: Renderer, one: list[int], other: list[int]) -> str:
    n = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    texts = (r._tokenizer.decode(ids[max(0, n - 3) : n + 8], skip_special_tokens=False) for ids in (one, other))
    return " / ".join(map(repr, texts))


def main() -> None:
    """Print a line per template, then what was found wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--json", action="store_true", help="one object per template")
    parser.add_argument("--only", default="", help="part of a name")
    args = parser.parse_args()
    verdicts = [judge(path) for path in sorted(args.dir.glob("*.jinja")) if args.only in path.name]
    if args.json:
        sys.stdout.writelines(json.dumps(v.__dict__) + "\n" for v in verdicts)
        return
    print(f"{'template':52} {'format':14} append tail sampled round stream template")
    for v in verdicts:
        print(
            f"{v.name[:52]:52} {v.format:14} {v.append:6} {v.tail:4} {v.sampled:7} {v.round_trip:5} {v.stream:6} "
            f"{v.template}"
        )
        for note in v.notes:
            print(f"    {note[:230]}")


if __name__ == "__main__":
    main()
