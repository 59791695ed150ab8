"""The report of a run: one self-contained HTML file, made from ``events.jsonl`` (and ``trees/*.json``) alone.

    events.jsonl ──▶ figures ──┐
    trees/*.json ──────────────┴──▶ report.html.j2 ──▶ report.html     no network, no other file

Everything is shown to people who may mail the file around: text from tasks and notes is escaped, data sits in a JSON
block in which no ``<`` survives, and a content policy forbids the page to load anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from opengyre.watch import events, text
from opengyre.watch.figures import figures

_HERE = Path(__file__).parent
MAX_TREES = 8  # a reader looks at one or two
MAX_TREES_BYTES = 1_200_000  # of all of them: with the other figures' budgets the page stays under 3 MB


def write_report(run_dir: Path) -> Path:
    """Write ``run_dir/report.html`` and return its path; a run that is empty, aborted or still going has one too."""
    log = run_dir / "events.jsonl"
    data = figures(events.read(log) if log.exists() else ())
    data["trees"] = _trees(run_dir / "trees")
    path = run_dir / "report.html"
    part = path.with_suffix(".html.part")
    part.write_text(render(data), encoding="utf-8")
    part.replace(path)
    return path


def render(data: dict[str, Any]) -> str:
    """The page for ``figures`` plus ``trees``."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    env.filters |= {
        "duration": text.duration,
        "count": text.count,
        "figure": text.figure,
        "percent": text.percent,
        "words": lambda s: str(s).replace("_", " "),
        "arrow": lambda s: str(s).replace(">", " → "),
    }
    parts = {"css": (_HERE / "report.css").read_text("utf-8"), "js": (_HERE / "report.js").read_text("utf-8")}
    safe = {name: Markup(part) for name, part in parts.items()}
    return env.get_template("report.html.j2").render(d=data, data=Markup(_embed(data)), **safe)


def _embed(data: dict[str, Any]) -> str:
    """JSON that can stand inside a ``<script>`` element: no markup character survives."""
    raw = msgspec.json.encode(data).decode()
    for char in "<>&\u2028\u2029":
        raw = raw.replace(char, f"\\u{ord(char):04x}")
    return raw


def _trees(folder: Path) -> list[dict[str, Any]]:
    """The most branched trees that are readable, as many as the page has room for."""
    found = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            data = path.read_bytes()
            tree = msgspec.json.decode(data)
        except (OSError, msgspec.DecodeError):
            continue  # half written when the run died
        if isinstance(tree, dict) and tree.get("schema") == 1 and tree.get("nodes"):
            found.append((-len(tree.get("leaves", ())), len(data), path.name, tree))
    out: list[dict[str, Any]] = []
    room = MAX_TREES_BYTES
    for _, size, _, tree in sorted(found, key=lambda f: f[:3]):
        if size <= room and len(out) < MAX_TREES:
            out.append(tree)
            room -= size
    return out
