"use strict";
// Pictures of a run on canvas. All time charts share one view [a, b]; each chart knows how to draw itself and what lies
// under the pointer. Text goes into the page as text nodes only.
const D = JSON.parse(document.getElementById("data").textContent);
const T = Math.max(D.run.wall_s || 0, 1e-3);
const view = { a: 0, b: T };
const charts = [];
const EMPTY = 66; // px of a chart that has nothing to show but a sentence
const tip = document.getElementById("tip");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const clamp = (x, lo, hi) => Math.max(lo, Math.min(hi, x));
const words = (s) => String(s).replaceAll("_", " ").replace(">", " → ");
const pct = (x) => (x == null ? "-" : (100 * x).toFixed(1) + " %");
const num = (x) => (x == null ? "-" : Number(x.toPrecision(3)).toString());
const many = (x) => (x >= 1e6 ? (x / 1e6).toFixed(2) + "M" : x >= 1e4 ? (x / 1e3).toFixed(1) + "k" : String(Math.round(x)));

function dur(s) {
  if (s == null) return "-";
  if (s < 59.95) return s.toFixed(s < 10 ? 2 : 1) + " s";
  s = Math.round(s);
  const two = (x) => String(x).padStart(2, "0");
  if (s < 3600) return Math.floor(s / 60) + "m " + two(s % 60) + "s";
  if (s < 86400) return Math.floor(s / 3600) + "h " + two(Math.floor((s % 3600) / 60)) + "m";
  return Math.floor(s / 86400) + "d " + two(Math.floor((s % 86400) / 3600)) + "h";
}

function clock(s, step) { // an axis label no finer than the axis
  if (step < 1) return s.toFixed(step < 0.1 ? 2 : 1) + "s";
  s = Math.round(s);
  const h = Math.floor(s / 3600), m = Math.floor((s % 3600) / 60), parts = [];
  if (s >= 86400 && step >= 3600) return Math.floor(s / 86400) + "d" + (h % 24 ? " " + (h % 24) + "h" : "");
  if (h) parts.push(h + "h");
  if (m) parts.push(m + "m");
  if (s % 60 || !parts.length) parts.push((s % 60) + "s");
  return parts.join(" ");
}

const TIMES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600,
  43200, 86400, 172800, 432000, 864000];
function timeStep(span, n) { return TIMES.find((s) => span / s <= n) || TIMES[TIMES.length - 1]; }
function niceStep(span, n) {
  const raw = Math.max(span, 1e-12) / n, p = 10 ** Math.floor(Math.log10(raw));
  return p * [1, 2, 5, 10].find((k) => k * p >= raw);
}
function firstAfter(rows, t, at = 0) { // index of the first row with row[at] >= t; rows are sorted by it
  let lo = 0, hi = rows.length;
  while (lo < hi) { const mid = (lo + hi) >> 1; if (rows[mid][at] < t) lo = mid + 1; else hi = mid; }
  return lo;
}

class Chart {
  constructor(host, height, linked = true) {
    this.host = host; this.height = height; this.linked = linked; this.hover = null; this.over = 1; // px drawn past the right end
    this.canvas = host.appendChild(document.createElement("canvas"));
    this.g = this.canvas.getContext("2d");
    charts.push(this);
    this.canvas.addEventListener("pointermove", (e) => this.move(e));
    this.canvas.addEventListener("pointerleave", () => { hideTip(); setHover(null); });
    if (linked) zoomable(this);
  }
  domain() { return view; }
  x(t) { const v = this.domain(); return this.l + (t - v.a) / (v.b - v.a) * (this.w - this.l - this.r); }
  t(x) { const v = this.domain(); return v.a + (x - this.l) / (this.w - this.l - this.r) * (v.b - v.a); }
  size() {
    this.w = this.host.clientWidth; this.h = typeof this.height === "function" ? this.height() : this.height;
    this.l = this.w < 560 ? 46 : 76; this.r = 12; this.top = this.linked ? 16 : 6; this.bottom = 22;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.w * ratio); this.canvas.height = Math.round(this.h * ratio);
    this.canvas.style.height = this.h + "px";
    this.g.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.g.font = '11.5px ui-sans-serif, system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif';
  }
  paint() {
    this.size();
    const g = this.g;
    g.clearRect(0, 0, this.w, this.h);
    this.axis();
    this.clip();
    if (this.linked) this.boundaries();
    this.draw(g);
    if (this.linked && this.hover != null) this.line(this.x(this.hover), color("faint"), 1, [3, 3]);
    if (this.drag) {
      g.globalAlpha = 0.15; g.fillStyle = color("rollout");
      g.fillRect(Math.min(...this.drag), 0, Math.abs(this.drag[1] - this.drag[0]), this.h - this.bottom); g.globalAlpha = 1;
    }
    g.restore();
  }
  clip() {
    const g = this.g;
    g.save(); g.beginPath(); g.rect(this.l, 0, this.w - this.l - this.r + this.over, this.h - this.bottom + 1); g.clip();
  }
  line(x, stroke, width, dash = []) {
    const g = this.g;
    g.strokeStyle = stroke; g.lineWidth = width; g.setLineDash(dash);
    g.beginPath(); g.moveTo(Math.round(x) + 0.5, this.top); g.lineTo(Math.round(x) + 0.5, this.h - this.bottom); g.stroke(); g.setLineDash([]);
  }
  axis() {
    const g = this.g, v = this.domain(), room = Math.max(2, (this.w - this.l) / 92);
    const step = this.linked ? timeStep(v.b - v.a, room) : niceStep(v.b - v.a, room);
    g.fillStyle = color("faint"); g.textAlign = "center"; g.textBaseline = "alphabetic";
    for (let t = Math.ceil(v.a / step) * step; t <= v.b + step * 1e-6; t += step) {
      const x = this.x(t);
      if (x > this.w - 18) break;
      g.fillText(this.linked ? clock(t, step) : many(t), Math.max(x, this.l), this.h - 6);
    }
    g.strokeStyle = color("rule"); g.lineWidth = 1;
    g.beginPath(); g.moveTo(this.l, this.h - this.bottom + 0.5); g.lineTo(this.w - this.r, this.h - this.bottom + 0.5); g.stroke();
  }
  boundaries() {
    const g = this.g;
    let last = -99;
    g.textAlign = "center"; g.textBaseline = "alphabetic";
    for (const s of D.steps) {
      const x = this.x(s.t);
      if (x < this.l || x > this.w - this.r || x - last < 3) continue;
      this.line(x, color("rule"), 1);
      if (x - last > 22 || last < 0) { g.fillStyle = color("faint"); g.fillText(s.step, Math.min(x, this.w - this.r - 3 * String(s.step).length), 11); last = x; }
    }
    for (const t of D.run.resumes) this.line(this.x(t), color("bad"), 1, [2, 3]);
  }
  yAxis(lo, hi, format, n = 4) {
    const g = this.g, step = niceStep(hi - lo, n);
    this.y = (v) => this.h - this.bottom - (v - lo) / (hi - lo || 1) * (this.h - this.bottom - this.top);
    g.restore(); g.textAlign = "right"; g.textBaseline = "middle";
    for (let v = Math.ceil(lo / step) * step; v <= hi + step * 1e-6; v += step) {
      const y = Math.round(this.y(v)) + 0.5;
      g.strokeStyle = color("grid"); g.lineWidth = 1; g.beginPath(); g.moveTo(this.l, y); g.lineTo(this.w - this.r, y); g.stroke();
      g.fillStyle = color("faint"); g.fillText(format(v), this.l - 8, y);
    }
    this.clip();
  }
  empty(text) {
    const g = this.g; g.fillStyle = color("faint"); g.textAlign = "left"; g.textBaseline = "middle";
    g.fillText(text, this.l + 8, (this.top + this.h - this.bottom) / 2);
  }
  move(e) {
    const box = this.canvas.getBoundingClientRect(), x = e.clientX - box.left, y = e.clientY - box.top;
    if (this.linked) setHover(x >= this.l ? this.t(x) : null);
    const found = this.drag ? null : this.at(x, y);
    if (found) showTip(e, found); else hideTip();
  }
}

// -- pointer, tooltip, zoom ---------------------------------------------------------------------------------------------

let queued = false;
function repaint() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; for (const c of charts) c.paint(); labelRange(); });
}
function setHover(t) { for (const c of charts) c.hover = t; repaint(); }
function hideTip() { tip.style.display = "none"; }
function showTip(e, { title, rows = [], text }) {
  tip.replaceChildren();
  tip.appendChild(document.createElement("b")).textContent = title;
  for (const [k, v] of rows) {
    const row = tip.appendChild(document.createElement("div"));
    row.appendChild(document.createElement("span")).textContent = k;
    row.appendChild(document.createElement("span")).textContent = v;
  }
  if (text) tip.appendChild(document.createElement("p")).textContent = text;
  tip.style.display = "block";
  const w = tip.offsetWidth, h = tip.offsetHeight;
  tip.style.left = clamp(e.clientX + 14 + w > innerWidth ? e.clientX - w - 14 : e.clientX + 14, 4, innerWidth - w - 4) + "px";
  tip.style.top = clamp(e.clientY + 16 + h > innerHeight ? e.clientY - h - 12 : e.clientY + 16, 4, innerHeight - h - 4) + "px";
}
function look(a, b) {
  const least = Math.max(T / 5000, 0.02), mid = (a + b) / 2;
  if (b - a < least) { a = mid - least / 2; b = mid + least / 2; }
  const span = Math.min(b - a, T);
  view.a = clamp(a, 0, T - span); view.b = view.a + span;
  repaint();
}
function scale(k, at = (view.a + view.b) / 2) { look(at - (at - view.a) * k, at + (view.b - at) * k); }
function labelRange() {
  const whole = view.b - view.a >= T * 0.9999;
  document.getElementById("range").textContent = whole ? "" : clock(view.a, 1) + " to " + clock(view.b, 1);
  document.getElementById("all").disabled = document.getElementById("out").disabled = whole;
}
function zoomable(chart) {
  const c = chart.canvas, at = (e) => clamp(e.clientX - c.getBoundingClientRect().left, chart.l, chart.w - chart.r);
  c.addEventListener("pointerdown", (e) => {
    if (e.button || e.pointerType === "touch") return;
    chart.drag = [at(e), at(e)]; c.setPointerCapture(e.pointerId); hideTip();
  });
  c.addEventListener("pointermove", (e) => { if (chart.drag) { chart.drag[1] = at(e); repaint(); } });
  c.addEventListener("pointerup", () => {
    const d = chart.drag; chart.drag = null;
    if (d && Math.abs(d[1] - d[0]) > 5) look(chart.t(Math.min(...d)), chart.t(Math.max(...d))); else repaint();
  });
  c.addEventListener("dblclick", () => look(0, T));
  c.addEventListener("wheel", (e) => {
    if (!e.ctrlKey && !e.metaKey) return; // a plain wheel scrolls the page
    e.preventDefault(); scale(e.deltaY > 0 ? 1.25 : 0.8, chart.t(at(e)));
  }, { passive: false });
  chart.host.addEventListener("keydown", (e) => {
    const by = (view.b - view.a) / 5;
    const act = { ArrowLeft: () => look(view.a - by, view.b - by), ArrowRight: () => look(view.a + by, view.b + by),
      "+": () => scale(0.6), "-": () => scale(1 / 0.6), 0: () => look(0, T) }[e.key];
    if (act) { e.preventDefault(); act(); }
  });
}

// -- charts -------------------------------------------------------------------------------------------------------------

class Cells extends Chart {
  constructor(host) {
    const n = D.cells.length, lane = n > 40 ? 9 : n > 16 ? 15 : 26;
    super(host, n ? n * lane + 16 + 22 : EMPTY); this.lane = lane;
  }
  draw(g) {
    if (!D.cells.length) return this.empty("No cell was started.");
    g.restore(); g.textAlign = "right"; g.textBaseline = "middle";
    D.cells.forEach((c, i) => {
      if (this.lane < 11 && i % 2) return;
      g.fillStyle = color(c.core ? "ink" : "soft");
      let name = c.cell;
      while (name.length > 2 && g.measureText(name).width > this.l - 10) name = name.slice(0, -2) + "…".slice(0, name.endsWith("…") ? 0 : 1);
      g.fillText(name, this.l - 8, this.top + (i + 0.5) * this.lane);
    });
    this.clip();
    const fill = { rollout: color("rollout"), train: color("train-tint"), switching: color("switching"), off: color("off") };
    const train = color("train"), gap = this.lane > 12 ? 3 : 1;
    D.cells.forEach((c, i) => {
      const y = this.top + i * this.lane + gap, h = this.lane - 2 * gap;
      for (const [a, b, phase] of c.segments) {
        if (b < view.a || a > view.b) continue;
        g.fillStyle = fill[phase];
        const x = this.x(a);
        g.fillRect(x, y, Math.max(this.x(b) - x, phase === "switching" ? 1.5 : 0.5), h);
      }
      g.fillStyle = train;
      for (const [a, b] of c.micros) {
        if (b < view.a || a > view.b) continue;
        const x = this.x(a), w = this.x(b) - x;
        g.fillRect(x, y, Math.max(w > 3 ? w - 1 : w * 0.8, 0.6), h); // the gap makes each micro-step a tick
      }
    });
  }
  at(x, y) {
    const c = D.cells[Math.floor((y - this.top) / this.lane)], t = this.t(x);
    if (!c || x < this.l) return null;
    const s = c.segments.find(([a, b]) => a <= t && t < b);
    if (!s) return null;
    const m = c.micros.find(([a, b]) => a <= t && t < b);
    const rows = [["since", dur(s[0])], ["for", dur(s[1] - s[0])]];
    if (s[4]) rows.push(["reason", s[4]]);
    if (m) rows.push(["micro-step", `${m[3]} of step ${m[2]}`], ["took", dur(m[1] - m[0])], ["tokens", many(m[4])]);
    return { title: `${c.cell}: ${words(s[3])}${m ? "" : s[2] === "train" ? ", waiting" : ""}`, rows };
  }
}

class Waterlevel extends Chart {
  constructor(host) { super(host, D.waterlevel.length ? 168 : EMPTY); }
  draw(g) {
    const rows = D.waterlevel;
    if (!rows.length) return this.empty("The waterlevel was not measured.");
    const seen = rows.slice(Math.max(0, firstAfter(rows, view.a) - 1), firstAfter(rows, view.b) + 1); // the scale fits what is seen
    this.yAxis(0, Math.max(1, ...seen.map((w) => Math.max(w[1] + w[2], w[3]))) * 1.06, many);
    this.boundaries();
    const area = (value, fill) => {
      g.fillStyle = fill; g.beginPath(); g.moveTo(this.x(rows[0][0]), this.y(0));
      rows.forEach((w, i) => { const y = this.y(value(w)); g.lineTo(this.x(w[0]), y); g.lineTo(this.x(i + 1 < rows.length ? rows[i + 1][0] : T), y); });
      g.lineTo(this.x(T), this.y(0)); g.closePath(); g.fill();
    };
    area((w) => w[1] + w[2], color("idle"));
    area((w) => w[2], color("rollout"));
    g.strokeStyle = color("ink"); g.lineWidth = 1.5; g.beginPath();
    rows.forEach((w, i) => { const y = this.y(w[3]); g[i ? "lineTo" : "moveTo"](this.x(w[0]), y); g.lineTo(this.x(i + 1 < rows.length ? rows[i + 1][0] : T), y); });
    g.stroke();
  }
  at(x) {
    const t = this.t(x), w = D.waterlevel[Math.max(0, firstAfter(D.waterlevel, t + 1e-9) - 1)];
    if (!w || x < this.l) return null;
    const cells = D.run.slots ? ` (${Math.round(w[3] / D.run.slots)} cells)` : "";
    return { title: dur(t), rows: [["running", w[2]], ["queued", w[1]], ["waterlevel", w[1] + w[2]], ["slots", w[3] + cells]] };
  }
}

class Learning extends Chart {
  constructor(host) { super(host, D.steps.length || D.evals.length ? 196 : EMPTY); }
  draw(g) {
    if (!D.steps.length && !D.evals.length) return this.empty("No step and no evaluation yet.");
    const rewards = D.steps.map((s) => s.reward_mean).filter((v) => v != null);
    const pad = 0.05; // marks at 0 and 100 % are whole
    this.yAxis(Math.min(0, ...rewards) - pad, Math.max(1, ...rewards) + pad, (v) => Math.round(100 * v) + " %", 4);
    this.boundaries();
    const curve = (key, stroke, dash, dots) => {
      const pts = D.steps.filter((s) => s[key] != null);
      g.strokeStyle = g.fillStyle = stroke; g.lineWidth = dots ? 2 : 1.5; g.lineJoin = "round"; g.setLineDash(dash); g.beginPath();
      pts.forEach((s, i) => g[i ? "lineTo" : "moveTo"](this.x(s.t), this.y(s[key]))); g.stroke(); g.setLineDash([]);
      if (dots && pts.length < 150) for (const s of pts) { g.beginPath(); g.arc(this.x(s.t), this.y(s[key]), 2.6, 0, 7); g.fill(); }
    };
    curve("reward_mean", color("train"), [5, 4], false);
    curve("pass_rate", color("rollout"), [], true);
    g.strokeStyle = g.fillStyle = color("held"); g.lineWidth = 1.2; g.setLineDash([2, 4]); g.beginPath();
    D.evals.forEach((e, i) => g[i ? "lineTo" : "moveTo"](this.ex(e), this.y(e.rate))); g.stroke(); g.setLineDash([]);
    for (const e of D.evals) {
      const x = this.ex(e), y = this.y(e.rate), lo = this.y(e.low), hi = this.y(e.high);
      g.lineWidth = 2; g.beginPath(); g.moveTo(x, lo); g.lineTo(x, hi);
      for (const end of [lo, hi]) { g.moveTo(x - 4, end); g.lineTo(x + 4, end); } g.stroke();
      g.fillStyle = color("paper"); g.beginPath(); g.moveTo(x, y - 7); g.lineTo(x + 7, y); g.lineTo(x, y + 7); g.lineTo(x - 7, y); g.closePath(); g.fill();
      g.fillStyle = color("held"); g.beginPath(); g.moveTo(x, y - 5); g.lineTo(x + 5, y); g.lineTo(x, y + 5); g.lineTo(x - 5, y); g.closePath(); g.fill();
    }
  }
  ex(e) { // a mark at the rim is shown whole
    const x = this.x(e.t);
    return e.t < view.a || e.t > view.b ? x : clamp(x, this.l + 8, this.w - this.r - 8);
  }
  at(x) {
    if (x < this.l) return null;
    const near = (rows, pos) => rows.reduce((best, r) => (Math.abs(pos(r) - x) < Math.abs((best ? pos(best) : 1e9) - x) ? r : best), null);
    const e = near(D.evals, (r) => this.ex(r)), s = near(D.steps, (r) => this.x(r.t));
    const de = e ? Math.abs(this.ex(e) - x) : 1e9, ds = s ? Math.abs(this.x(s.t) - x) : 1e9;
    if (Math.min(de, ds) > 24) return null;
    if (de <= ds || de < 7) return { title: `Held out, version ${e.version}`, rows: [["passed", `${e.passes} of ${e.n}`], ["pass rate", pct(e.rate)],
      ["95 %", `${pct(e.low)} to ${pct(e.high)}`], ["mean reward", num(e.reward_mean)]] };
    return { title: `Step ${s.step}`, rows: [["pass rate", pct(s.pass_rate)], ["mean reward", num(s.reward_mean)], ["executions", s.executions ?? "-"],
      ["took", dur(s.step_s)]] };
  }
}

const OUTCOMES = ["finished", "timed_out", "harness_failed", "infra_abort", "evaluator_failed", "cancelled"];
class Executions extends Chart {
  constructor(host) { super(host, D.executions.length ? 210 : EMPTY); this.top_s = Math.max(1e-3, ...D.executions.map((e) => e[1])); }
  draw(g) {
    if (!D.executions.length) return this.empty("No execution finished.");
    const step = timeStep(this.top_s, 4), top = Math.ceil(this.top_s / step) * step;
    this.yAxisTime(top, step);
    this.boundaries();
    const fills = OUTCOMES.map(color), r = D.executions.length > 1500 ? 1.8 : 2.8;
    const order = [...D.executions].sort((p, q) => (p[2] === 0 ? 0 : 1) - (q[2] === 0 ? 0 : 1)); // the rare ones on top
    for (const e of order) {
      const x = this.x(e[0]), y = this.y(e[1]);
      if (x < this.l - 5 || x > this.w) continue;
      g.fillStyle = g.strokeStyle = fills[e[2]] || color("faint"); g.lineWidth = 1.3;
      g.beginPath(); g.arc(x, y, r, 0, 7);
      if (e[8]) g.stroke(); else { g.globalAlpha = 0.72; g.fill(); g.globalAlpha = 1; }
    }
  }
  yAxisTime(top, step) {
    const g = this.g;
    this.y = (v) => this.h - this.bottom - v / top * (this.h - this.bottom - this.top);
    g.restore(); g.textAlign = "right"; g.textBaseline = "middle";
    for (let v = 0; v <= top + 1e-6; v += step) {
      const y = Math.round(this.y(v)) + 0.5;
      g.strokeStyle = color("grid"); g.lineWidth = 1; g.beginPath(); g.moveTo(this.l, y); g.lineTo(this.w - this.r, y); g.stroke();
      g.fillStyle = color("faint"); g.fillText(clock(v, step), this.l - 8, y);
    }
    this.clip();
  }
  at(x, y) {
    let best = null, far = 100;
    for (const e of D.executions) {
      const d = (this.x(e[0]) - x) ** 2 + (this.y(e[1]) - y) ** 2;
      if (d < far) { far = d; best = e; }
    }
    if (!best) return null;
    return { title: best[6], rows: [["task", best[7] + (best[8] ? " (held out)" : "")], ["outcome", words(OUTCOMES[best[2]] || "?")],
      ["reward", best[3] == null ? "none" : num(best[3])], ["duration", dur(best[1])], ["model calls", best[4] ?? "-"], ["tokens sampled", many(best[5])]] };
  }
}

// A tree as rows: a child at its parent's very end goes on in the parent's row, every other child opens one below.
class TreePicture extends Chart {
  constructor(host) { super(host, () => 20 + this.rows.length * this.pitch + 22, false); this.pitch = 22; this.show(0); }
  domain() { return this.range; }
  show(i) {
    const tree = this.tree = D.trees[i], byId = new Map(tree.nodes.map((n) => [n.id, n])), kids = new Map();
    for (const n of tree.nodes) { n.n = n.spans.reduce((s, p) => s + p.n, 0); kids.set(n.parent, [...(kids.get(n.parent) || []), n]); }
    this.rows = []; this.place = new Map(); this.forks = [];
    const open = [];
    const branch = (node, from) => {
      const row = this.rows.push([]) - 1;
      if (from) this.forks.push([from, row, node.start]);
      for (let n = node; n;) {
        this.rows[row].push(n); this.place.set(n.id, row);
        const below = kids.get(n.id) || [], next = below.find((k) => k.offset === n.n);
        open.push(...below.filter((k) => k !== next).reverse().map((k) => [k, n.id]));
        n = next;
      }
    };
    for (const n of (kids.get(0) || []).filter((n) => !byId.has(0)).reverse()) open.push([n, null]);
    while (open.length) branch(...open.pop());
    this.range = { a: 0, b: Math.max(1, ...tree.nodes.map((n) => n.start + n.n)) * 1.0 };
    this.pitch = this.rows.length > 60 ? 13 : 22;
    document.getElementById("treename").textContent = [tree.execution, tree.task, words(tree.outcome || ""),
      tree.reward == null ? "" : "reward " + num(tree.reward), `${many(tree.unique_tokens || 0)} unique tokens`].filter(Boolean).join(" · ");
  }
  label(nodes) { // of a row: the role of its leaf, and how much of the row is trained
    const trained = nodes.reduce((s, n) => s + n.spans.reduce((k, p) => k + p.trained, 0), 0);
    const role = (this.tree.leaves || {})[nodes[nodes.length - 1].id];
    return [role ? words(role) : "no reply", trained && this.w >= 560 ? many(trained) + " trained" : ""];
  }
  size() {
    super.size(); this.l = 8; this.r = 96;
    const room = this.w - this.l, end = (nodes) => { const n = nodes[nodes.length - 1]; return (n.start + n.n) / this.range.b; };
    for (const nodes of this.rows) { // the longest row and its label share the width
      const text = this.g.measureText(this.label(nodes).join("  ")).width + 18;
      this.r = Math.max(this.r, room - (room - text) / Math.max(end(nodes), 0.05));
    }
    this.r = Math.min(this.r, room * 0.6);
  }
  draw(g) {
    const mid = (row) => this.top + 8 + row * this.pitch + this.pitch / 2, h = this.pitch > 15 ? 12 : 8;
    g.strokeStyle = color("faint"); g.lineWidth = 1.2;
    for (const [from, row, start] of this.forks) {
      const x = this.x(start), y = mid(this.place.get(from));
      g.beginPath(); g.moveTo(x, y); g.lineTo(x, mid(row) - 4); g.quadraticCurveTo(x, mid(row), x + 4, mid(row)); g.stroke();
    }
    const fill = { prompt: color("prompt"), sampled: color("sampled"), trained: color("trained"), mute: color("cancelled") };
    this.rows.forEach((nodes, row) => {
      const y = mid(row) - h / 2;
      for (const n of nodes) {
        let at = n.start;
        for (const s of n.spans) {
          const x = this.x(at), w = Math.max(this.x(at + s.n) - x - 0.75, 0.8);
          g.fillStyle = s.kind === "prompt" ? fill.prompt : s.trainable ? fill.sampled : fill.mute; g.fillRect(x, y, w, h);
          if (s.trained) { g.fillStyle = fill.trained; g.fillRect(x, y, w * s.trained / s.n, h); }
          at += s.n;
        }
      }
    });
    g.restore(); g.textAlign = "left"; g.textBaseline = "middle";
    this.rows.forEach((nodes, row) => {
      const last = nodes[nodes.length - 1], x = this.x(last.start + last.n) + 7, [name, trained] = this.label(nodes);
      g.fillStyle = color("ink"); g.fillText(name, x, mid(row));
      g.fillStyle = color("faint"); g.fillText(trained, x + g.measureText(name).width + 7, mid(row));
    });
    g.save();
  }
  at(x, y) {
    const row = this.rows[Math.floor((y - this.top - 8) / this.pitch)], t = this.t(x);
    const n = row && row.find((m) => m.start <= t && t < m.start + m.n);
    if (!n) return null;
    let at = n.start, s = null;
    for (const p of n.spans) { if (t < at + p.n) { s = p; break; } at += p.n; }
    if (!s) return null;
    const call = (this.tree.calls || [])[n.call], rows = [["tokens", `${s.n} at ${at}`]];
    if (s.kind === "sampled") rows.push(["trained", s.trainable ? s.trained : "never"], ["weights version", s.version], ["cell", s.cell]);
    if (call) {
      rows.push(["model call", call.id], ["answered in", dur(call.ended_s - call.started_s)]);
      if (call.fork) rows.push(["left the path", words(call.fork)]);
      if (call.moves) rows.push(["moved", call.moves + "×"]);
      if (!call.delivered) rows.push(["delivered", "no"]);
    }
    return { title: s.kind === "prompt" ? "Prompt" : "Sampled", rows, text: s.text };
  }
}

class Mini extends Chart { // a figure per step
  constructor(host, key, format) { super(host, 64, false); this.key = key; this.format = format; }
  domain() { const s = D.steps; return { a: s[0].step, b: Math.max(s[s.length - 1].step, s[0].step + 1) }; }
  size() { super.size(); this.l = 3; this.r = this.over = 4; this.top = 6; this.bottom = 6; }
  axis() {}
  draw(g) {
    const pts = D.steps.filter((s) => s[this.key] != null), values = pts.map((s) => s[this.key]);
    if (!pts.length) return this.empty("not reported");
    const lo = Math.min(...values), hi = Math.max(...values);
    this.y = (v) => this.h - this.bottom - (hi > lo ? (v - lo) / (hi - lo) : 0.5) * (this.h - this.bottom - this.top);
    g.strokeStyle = color("rule"); g.lineWidth = 1; g.beginPath(); g.moveTo(0, this.h - 2.5); g.lineTo(this.w, this.h - 2.5); g.stroke();
    g.strokeStyle = g.fillStyle = color("rollout"); g.lineWidth = 1.6; g.lineJoin = "round"; g.beginPath();
    pts.forEach((s, i) => g[i ? "lineTo" : "moveTo"](this.x(s.step), this.y(s[this.key]))); g.stroke();
    const end = pts[pts.length - 1]; g.beginPath(); g.arc(this.x(end.step), this.y(end[this.key]), 2.6, 0, 7); g.fill();
  }
  at(x) {
    const step = Math.round(this.t(x)), s = D.steps.reduce((p, q) => (Math.abs(q.step - step) < Math.abs(p.step - step) ? q : p));
    return { title: `Step ${s.step}`, rows: [[words(this.key), s[this.key] == null ? "-" : this.format(s[this.key])]] };
  }
}

const minis = document.getElementById("minis");
if (minis) for (const [key, label, format] of [["loss", "loss", num], ["grad_norm", "gradient norm", num], ["ratio_max", "largest ratio", (v) => v.toPrecision(5)],
  ["clip_fraction", "tokens clipped", pct], ["staleness_max", "staleness", num], ["tokens_per_s", "tokens a second", many]]) {
  const box = minis.appendChild(document.createElement("div")), head = box.appendChild(document.createElement("div"));
  const last = D.steps[D.steps.length - 1][key];
  head.className = "l"; head.append(label); head.appendChild(document.createElement("b")).textContent = last == null ? "-" : format(last);
  const host = box.appendChild(document.createElement("div")); host.className = "chart still"; host.setAttribute("role", "img");
  host.setAttribute("aria-label", label + " per step; the figures are in the table below");
  new Mini(host, key, format);
}
const KINDS = { cells: Cells, waterlevel: Waterlevel, learning: Learning, executions: Executions, tree: TreePicture };
for (const host of document.querySelectorAll("[data-chart]")) {
  const chart = new KINDS[host.dataset.chart](host), pick = document.getElementById("pick");
  if (host.dataset.chart === "tree" && pick) pick.addEventListener("change", () => { chart.show(Number(pick.value)); repaint(); });
}
document.getElementById("in").addEventListener("click", () => scale(0.5));
document.getElementById("out").addEventListener("click", () => scale(2));
document.getElementById("all").addEventListener("click", () => look(0, T));
window.addEventListener("resize", repaint);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
for (const c of charts) c.paint();
labelRange();
