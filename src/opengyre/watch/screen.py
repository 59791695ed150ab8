"""One picture of a run's present state, as wide and as high as the terminal. Pure: state and time in, picture out."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from opengyre.watch import text
from opengyre.watch.state import CellView, Phase, RunState
from opengyre.watch.verdict import rate_of

STYLES = {Phase.ROLLOUT: "blue", Phase.TRAIN: "yellow", Phase.SWITCHING: "magenta", Phase.OFF: "bright_black"}
LABEL = 12  # columns of the names on the left
OTHER_LINES = 14  # lines of the picture that are not cells
MIN_CELL_LINES = 3  # shown even on a terminal that is too low
BAR_WIDTH = 16
LONGEST_STATE = len("joining training")  # columns stand still while cells switch


def screen(s: RunState, now: float, width: int, height: int) -> RenderableType:
    """The picture at ``now`` (seconds on the run's clock), at most ``width`` columns and about ``height`` lines."""
    room = max(20, width - LABEL - 1)
    lines: list[RenderableType] = [_header(s, now), Text()]
    if s.cells:
        lines += [_cells(s, now, max(MIN_CELL_LINES, height - OTHER_LINES), width), Text()]
    rows = Table.grid(padding=(0, 1))
    rows.add_column(width=LABEL, style="bright_black", no_wrap=True)
    rows.add_column(no_wrap=True, overflow="ellipsis", max_width=room)
    rows.add_row("step", _progress(s, room))
    rows.add_row("waterlevel", _waterlevel(s, room))
    rows.add_row("executions", _executions(s))
    excluded, degenerate = s.total("excluded"), s.total("degenerate")
    rows.add_row(
        "left out", f"{text.plural(excluded, 'execution')}, {text.plural(degenerate, 'group')} without variance"
    )
    rows.add_row("pass rate", _trend(s, "pass_rate", room))
    rows.add_row("reward", _trend(s, "reward_mean", room))
    rows.add_row("held out", _held_out(s))
    rows.add_row("tokens", _tokens(s, now))
    rows.add_row("switches", _switches(s))
    lines.append(rows)
    lines += [_note(*note) for note in list(s.notes)[-2:]]
    return Group(*lines)


def _header(s: RunState, now: float) -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(text.plain(s.name), style="bold")
    line.append(f"  {text.plain(s.policy)}  " if s.policy else "  ", style="cyan")
    line.append(f"step {s.step}/{s.planned_steps}  version {s.version}  {text.duration(now)}")
    eta = s.eta_s(now)
    if eta is not None:
        line.append(f"  ETA {text.duration(eta)}", style="bold")
    if s.lives > 1:
        line.append(f"  resumed {s.lives - 1}x", style="bright_black")
    if s.status == "ended":
        line.append(f"  ended {text.plain(s.reason)}", style="bold green")
    return line


def _cells(s: RunState, now: float, most: int, width: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    wide = width >= 72  # narrower terminals keep name, role and time
    for name in ["cell", "role", *(["load", "version"] if wide else []), "for", "micro-steps"]:
        right = name in ("version", "for", "micro-steps")
        least = {"cell": LABEL, "role": LONGEST_STATE if wide else 0}.get(name, 0)
        table.add_column(name, justify="right" if right else "left", no_wrap=True, min_width=least)
    done = s.micro_by_cell()
    cells = sorted(s.cells.values(), key=lambda c: (not c.core,))
    shown = cells if len(cells) <= most else cells[: most - 1]
    for cell in shown:
        role = cell.phase.value if cell.phase is not Phase.SWITCHING else text.plain(cell.state).replace("_", " ")
        name = text.plain(cell.name) + (" *" if cell.core else "")
        row: list[RenderableType] = [name, Text(role, STYLES[cell.phase])]
        if wide:
            row += [_load(s, cell), "-" if cell.version is None else str(cell.version)]
        table.add_row(*row, text.duration(now - cell.since), str(done[cell.name] or ""))
    if len(shown) < len(cells):
        rest = [c.phase for c in cells[len(shown) :]]
        counts = ", ".join(f"{n} {p.value}" for p in Phase if (n := rest.count(p)))
        table.add_row(f"{len(rest)} more", Text(counts, style="bright_black"))
    return table


def _load(s: RunState, cell: CellView) -> Text:
    """Slots in use. What is not measured per cell is the mean over the rollout cells."""
    if cell.phase is not Phase.ROLLOUT:
        return Text()
    slots = s.rollout_cells * s.slots
    share = cell.load if cell.load is not None else s.running / slots if slots else 0.0
    return _bar(share, BAR_WIDTH, STYLES[Phase.ROLLOUT]).append(f" {100 * share:3.0f} %")


def _bar(share: float, width: int, style: str) -> Text:
    full, empty = text.bar(share, width)
    return Text().append(full, style=style).append(empty, style="bright_black")


def _progress(s: RunState, room: int) -> Text:
    share = s.step / s.planned_steps if s.planned_steps else 0.0
    line = _bar(share, min(28, room // 2), "green").append(f" {s.step}/{s.planned_steps}")
    if s.micro_total:
        line.append(f"  micro-steps {s.micro_done} of {s.micro_total} so far", style="yellow")
    return line


def _waterlevel(s: RunState, room: int) -> Text:
    spark = text.sparkline(list(s.waterlevels), min(28, room // 2), low=0)
    slots = s.rollout_cells * s.slots
    line = Text().append(spark, style="blue")
    return line.append(f" {s.waterlevel}", "bold").append(f"  {s.queued} queued, {s.running} running, {slots} slots")


def _executions(s: RunState) -> Text:
    styles = {"finished": "green", "timed_out": "yellow", "running": "blue", "queued": "", "scoring": "cyan"}
    line = Text()
    for state, n in sorted(s.executions.items(), key=lambda item: -item[1]):
        line.append("  " if line else "").append(f"{n} ", "bold")
        line.append(text.plain(state).replace("_", " "), style=styles.get(state, "red"))
    return line or Text("none yet", style="bright_black")


def _trend(s: RunState, key: str, room: int) -> Text:
    values = s.trend(key)
    if not values:
        return Text("after the first step", style="bright_black")
    spark = text.sparkline(values, min(28, room // 2), low=min(0.0, *values), high=max(1.0, *values))
    last = text.percent(values[-1]) if key == "pass_rate" else text.figure(values[-1])
    return Text().append(spark, style="green").append(f" {last}", style="bold")


def _held_out(s: RunState) -> Text:
    rates = [rate for rate in map(rate_of, s.evals) if rate is not None]
    if not rates:
        return Text("not measured yet", style="bright_black")
    first, last = rates[0], rates[-1]
    line = Text()
    if last is not first:
        line.append(f"{text.percent(first.rate)} → ")
    line.append(text.percent(last.rate), style="bold")
    spread = f"95 %: {100 * last.low:.0f} to {100 * last.high:.0f} %"
    return line.append(f"  {spread}, version {last.version}", style="bright_black")


def _tokens(s: RunState, now: float) -> Text:
    line = Text().append(text.count(s.sampled_per_s(now)), style="bold").append("/s sampled  ")
    return line.append(text.count(s.trained_per_s(now)), style="bold").append("/s trained")


def _switches(s: RunState) -> Text:
    line = Text()
    for direction, stats in sorted(s.switches.items()):
        line.append("  " if line else "").append(f"{len(stats.seconds)} ", "bold")
        line.append(f"{direction.replace('>', ' → ')} {text.duration(stats.median_s)}")
        if stats.failed:
            line.append(f" {stats.failed} failed", style="red")
    return line or Text("none yet", style="bright_black")


def _note(t: float, level: str, words: str) -> Text:
    style = {"warning": "yellow", "error": "bold red"}.get(level, "bright_black")
    line = Text(no_wrap=True, overflow="ellipsis").append(f"{text.duration(t):>{LABEL}} ", style="bright_black")
    return line.append(text.plain(words), style=style)
