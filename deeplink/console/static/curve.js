// The loss curve: one line per attempt on the axis of steps. Where a later attempt began again, what it repeated is
// hatched and the line it replaced is faint. NaN and infinity are marks at the top edge, never dropped.

import { figure, put, say, svg, whole } from "./dom.js";

const PAD = { left: 44, right: 10, top: 20, bottom: 20 };

export class Curve {
  constructor(box) {
    this.box = box;
    this.points = [];
    this.at = null;
    this.root = svg("svg", { class: "curve", tabindex: 0, role: "img" });
    this.read = document.createElement("output");
    this.read.className = "curve-read";
    box.append(this.root, this.read);
    new ResizeObserver(() => this.draw()).observe(box);
    this.root.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.root.addEventListener("pointerleave", () => this.mark(null));
    this.root.addEventListener("blur", () => this.mark(null));
    this.root.addEventListener("keydown", (event) => this.walk(event));
  }

  update(job, curve) {
    const print = `${job.id}/${curve.points.length}/${curve.points.at(-1)}/${job.attempts.length}`;
    if (print === this.print) return;
    Object.assign(this, { print, job, metric: curve.metric, points: curve.points });
    this.draw();
  }

  /** Step at which each attempt's line ends to count: the first step of any later attempt. */
  cuts() {
    const first = new Map();
    for (const [step, , attempt] of this.points) if (!first.has(attempt)) first.set(attempt, step);
    const cut = new Map();
    let least = Infinity;
    for (const attempt of [...first.keys()].sort((a, b) => b - a)) {
      cut.set(attempt, least);
      least = Math.min(least, first.get(attempt));
    }
    return { first, cut };
  }

  draw() {
    const width = this.box.clientWidth;
    const height = this.box.clientHeight;
    if (!width || !height || !this.job) return;
    put(this.root, "viewBox", `0 0 ${width} ${height}`);
    const finite = this.points.filter(([, value]) => value !== null);
    if (!this.points.length) {
      this.root.replaceChildren(svg("text", { x: width / 2, y: height / 2, class: "c-none", "text-anchor": "middle" }, "no reports yet: deeplink.report(step=…, loss=…)"));
      put(this.root, "aria-label", "No progress reported yet");
      return;
    }
    this.scale(width, height, finite);
    this.root.replaceChildren(...this.grid(width, height), ...this.attempts(height), ...this.lines(), ...this.strange());
    this.cursor = svg("g", { class: "c-cursor" });
    this.root.append(this.cursor);
    const last = this.points.at(-1);
    put(this.root, "aria-label", `${this.metric} from ${figure(this.points[0][1])} at step ${this.points[0][0]} to ${figure(last[1])} at step ${last[0]}; attempts: ${this.job.attempts.length}; steps repeated: ${this.job.repeated_steps}. Arrow keys read it point by point.`);
    if (this.at !== null) this.mark(Math.min(this.at, this.points.length - 1));
  }

  scale(width, height, finite) {
    const steps = this.points.map(([step]) => step);
    const values = finite.map(([, value]) => value);
    let [low, high] = [Math.min(...values), Math.max(...values)];
    if (!finite.length) [low, high] = [0, 1];
    if (low > 0 && low < high * 0.35) low = 0;
    if (high === low) [low, high] = [low - 0.5, high + 0.5];
    const [from, to] = [Math.min(...steps), Math.max(...steps)];
    const inner = { w: width - PAD.left - PAD.right, h: height - PAD.top - PAD.bottom };
    this.range = { low, high, from, to };
    this.x = (step) => PAD.left + (to === from ? 0.5 : (step - from) / (to - from)) * inner.w;
    this.y = (value) => PAD.top + (1 - (value - low) / (high - low)) * inner.h;
  }

  grid(width, height) {
    const made = [];
    for (const value of ticks(this.range.low, this.range.high, 3)) {
      made.push(svg("line", { class: "c-grid", x1: PAD.left, x2: width - PAD.right, y1: this.y(value), y2: this.y(value) }));
      made.push(svg("text", { class: "c-tick", x: PAD.left - 6, y: this.y(value) + 3.5, "text-anchor": "end" }, figure(value)));
    }
    const bottom = height - 5;
    const wide = ticks(this.range.from, this.range.to, Math.max(2, Math.floor(width / 110)));
    for (const step of wide.filter((each) => Number.isInteger(each))) {
      made.push(svg("text", { class: "c-tick", x: this.x(step), y: bottom, "text-anchor": "middle" }, whole(step)));
    }
    return made;
  }

  /** A boundary where each later attempt began, and the hatched stretch that it repeated. */
  attempts(height) {
    const { first } = this.cuts();
    const made = [svg("defs", {}, svg("pattern", { id: `hatch-${this.job.id}`, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, svg("line", { x1: 0, y1: 0, x2: 0, y2: 5, class: "c-hatch" })))];
    let reached = -Infinity;
    for (const attempt of [...first.keys()].sort((a, b) => a - b)) {
      const start = first.get(attempt);
      if (reached > -Infinity) {
        const x = this.x(start);
        const repeated = Math.max(0, reached - start + 1);
        if (repeated) made.push(svg("rect", { class: "c-repeat", x, y: PAD.top, width: Math.max(2, this.x(reached) - x), height: height - PAD.top - PAD.bottom, fill: `url(#hatch-${this.job.id})` }));
        made.push(svg("line", { class: "c-bound", x1: x, x2: x, y1: PAD.top - 6, y2: height - PAD.bottom }));
        const name = this.job.attempts[attempt]?.name || "";
        const label = svg("text", { class: "c-label", x: x + 4, y: PAD.top - 6 }, repeated ? `${name} · ${whole(repeated)} repeated` : name);
        if (x > this.box.clientWidth - 130) {
          put(label, "text-anchor", "end");
          put(label, "x", x - 4);
        }
        made.push(label);
      }
      for (const [step, , of] of this.points) if (of === attempt) reached = Math.max(reached, step);
    }
    return made;
  }

  lines() {
    const { first, cut } = this.cuts();
    const kept = [];
    const lost = [];
    for (const attempt of first.keys()) {
      const mine = this.points.filter(([, value, of]) => of === attempt && value !== null);
      kept.push(this.path(mine.filter(([step]) => step <= cut.get(attempt)), "c-line"));
      lost.push(this.path(mine.filter(([step]) => step >= cut.get(attempt) - 1), "c-lost"));
    }
    return [...lost, ...kept].filter(Boolean);
  }

  path(points, className) {
    if (!points.length) return null;
    if (points.length === 1) return svg("circle", { class: `${className} dot`, cx: this.x(points[0][0]), cy: this.y(points[0][1]), r: 2 });
    const d = points.map(([step, value], i) => `${i ? "L" : "M"}${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`).join("");
    return svg("path", { class: className, d });
  }

  strange() {
    return this.points
      .filter(([, value]) => value === null)
      .map(([step]) => svg("path", { class: "c-nan", d: `M${this.x(step) - 4} ${PAD.top}h8l-4 7z` }, svg("title", {}, `step ${step}: not a number`)));
  }

  point(x) {
    if (!this.x || !this.points.length) return;
    let best = 0;
    this.points.forEach(([step], i) => {
      if (Math.abs(this.x(step) - x) <= Math.abs(this.x(this.points[best][0]) - x)) best = i;
    });
    this.mark(best);
  }

  walk(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || !this.points.length) return;
    event.preventDefault();
    const from = this.at === null ? this.points.length - 1 - step : this.at;
    this.mark(Math.max(0, Math.min(this.points.length - 1, from + step)));
  }

  mark(index) {
    this.at = index;
    if (!this.cursor) return;
    if (index === null || !this.points[index]) {
      this.cursor.replaceChildren();
      say(this.read, "");
      return;
    }
    const [step, value, attempt] = this.points[index];
    const x = this.x(step);
    this.cursor.replaceChildren(svg("line", { x1: x, x2: x, y1: PAD.top, y2: this.box.clientHeight - PAD.bottom }));
    if (value !== null) this.cursor.append(svg("circle", { cx: x, cy: this.y(value), r: 3 }));
    say(this.read, `step ${whole(step)} · ${this.metric} ${value === null ? "not a number" : figure(value)} · ${this.job.attempts[attempt]?.name || ""}`);
  }
}

function ticks(low, high, wanted) {
  const raw = (high - low) / wanted;
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
  const made = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) made.push(Number(at.toPrecision(12)));
  return made;
}
