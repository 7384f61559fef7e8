// A job's course on one axis of time. Drag to look closer, move over it to read all lanes at one moment; keys do both.

import { el, figure, moment, put, say, span } from "./dom.js";
import { Painter, csvOf, lanesOf, legendOf, valueAt } from "./lanes.js";
import { choose } from "./route.js";
import { Asker } from "./stream.js";

const GAP = 9;
const AXIS = 22; // height of the axis of time
const FRESH_S = 15; // a course is asked for again after so long
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

export class Timeline {
  constructor(root) {
    Object.assign(this, { root, course: null, at: null, dragged: null, span: null, cursor: 0 });
    this.base = el("canvas", "course-base");
    this.over = el("canvas", "course-over");
    this.legend = el("p", "course-legend");
    this.read = el("output", "course-read");
    this.box = el("div", "course-box", this.base, this.over);
    const button = (text, act) => {
      const made = el("button", "chip", text);
      made.type = "button";
      made.addEventListener("click", act);
      return made;
    };
    this.whole = button("whole course", () => choose({ from: "", to: "" }));
    this.tools = el("div", "course-tools", el("h4", "", "Course"), this.whole, button("PNG", () => this.png()), button("CSV", () => this.csv()));
    this.binds = el("p", "course-binds");
    root.append(this.tools, this.binds, this.box, this.legend, this.read);
    Object.assign(this.over, { tabIndex: 0 });
    put(this.over, "role", "img");
    put(this.over, "aria-label", "The job's course, not drawn yet");
    put(this.read, "aria-live", "polite");
    new ResizeObserver(() => this.draw()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.listen();
    this.asker = new Asker((found, problem) => {
      if (found) this.course = found.timeline;
      put(this.root, "data-empty", this.course ? null : problem);
      const binds = this.course?.measured?.binds;
      say(this.binds, binds ? `What binds it: ${binds.text}.` : "");
      put(this.binds, "data-cause", binds?.cause);
      this.draw();
    });
  }

  listen() {
    const time = (event) => this.unix(event.offsetX);
    this.over.addEventListener("pointerdown", (event) => {
      this.over.setPointerCapture(event.pointerId);
      this.dragged = { from: time(event), x: event.offsetX };
    });
    this.over.addEventListener("pointermove", (event) => this.mark(time(event)));
    this.over.addEventListener("pointerup", (event) => {
      const { from, x } = this.dragged || {};
      this.dragged = null;
      if (from !== undefined && Math.abs(event.offsetX - x) > 6) this.look(from, time(event));
      else this.mark(time(event));
    });
    this.over.addEventListener("pointerleave", () => this.dragged || this.mark(null));
    this.over.addEventListener("dblclick", () => choose({ from: "", to: "" }));
    this.over.addEventListener("keydown", (event) => this.key(event));
  }

  /** Arrows move the reading line, + and - look closer and from further, Home and End go to the ends. */
  key(event) {
    if (!this.span) return;
    const [from, to] = this.span;
    const wide = to - from;
    const t = this.at ?? to;
    const moves = { ArrowRight: t + wide / 100, ArrowLeft: t - wide / 100, Home: from, End: to };
    if (event.key in moves) this.mark(Math.min(to, Math.max(from, moves[event.key])), true);
    else if (event.key === "+") this.look(t - wide / 4, t + wide / 4);
    else if (event.key === "-") this.look(t - wide, t + wide);
    else if (event.key === "Escape") choose({ from: "", to: "" });
    else return;
    event.preventDefault();
  }

  look(a, b) {
    const [least, most] = this.ends();
    const from = Math.max(least, Math.min(a, b));
    const to = Math.min(most, Math.max(a, b));
    if (to - from >= 2) choose({ from: from <= least ? "" : Math.floor(from), to: to >= most ? "" : Math.ceil(to) });
  }

  update(job, now, asked) {
    Object.assign(this, { job, now, from: Number(asked.get("from")) || 0, to: Number(asked.get("to")) || 0 });
    const near = new URLSearchParams();
    if (this.from) near.set("since", this.from);
    if (this.to) near.set("until", this.to);
    this.whole.hidden = !this.from && !this.to;
    this.asker.ask(`jobs/${job.id}/timeline?${near}`, Math.floor(now / FRESH_S));
    if (this.base.dataset.print !== this.print()) this.draw();
  }

  print() {
    return `${this.job.id}/${this.from}/${this.to}`;
  }

  ends() {
    const attempts = this.course.attempts;
    const end = attempts.at(-1).ended_unix || (this.job.over ? this.job.heard_unix : this.now);
    return [attempts[0].began_unix, Math.max(end, attempts[0].began_unix + 1)];
  }

  x(unix) {
    const [from, to] = this.span;
    return this.left + ((unix - from) / (to - from)) * (this.width - this.left - 8);
  }

  unix(x) {
    const [from, to] = this.span || [0, 0];
    return from + (Math.max(0, Math.min(x - this.left, this.width - this.left - 8)) / (this.width - this.left - 8)) * (to - from);
  }

  draw() {
    const width = this.box.clientWidth;
    if (!width || !this.course || !this.job) return;
    const [least, most] = this.ends();
    this.span = [this.from || least, this.to || most];
    Object.assign(this, { width, left: width < 500 ? 66 : 96, lanes: lanesOf(this.course, this.job) });
    let top = AXIS;
    for (const lane of this.lanes) [lane.top, top] = [top, top + lane.height + GAP];
    this.height = top;
    this.box.style.height = `${top}px`;
    const pen = this.sized(this.base);
    const style = getComputedStyle(this.root);
    this.ink = (name) => style.getPropertyValue(name).trim();
    this.family = style.fontFamily;
    pen.font = `11px ${this.family}`;
    this.axis(pen);
    const painter = new Painter(pen, (unix) => this.x(unix), this.ink, width - 8, this.left);
    for (const lane of this.lanes) {
      painter.draw(lane, lane.top);
      this.label(painter, lane);
    }
    this.base.dataset.print = this.print();
    this.base.dataset.lanes = this.lanes.map((lane) => lane.key).join(" ");
    this.keys();
    this.mark(this.at);
  }

  sized(canvas) {
    const dots = devicePixelRatio || 1;
    Object.assign(canvas, { width: this.width * dots, height: this.height * dots });
    const pen = canvas.getContext("2d");
    pen.scale(dots, dots);
    return pen;
  }

  label(painter, lane) {
    const room = this.left - 10;
    const small = lane.height < 40;
    const narrow = this.left < 80; // a phone: the figures stand below the title, not beside it
    painter.text(lane.title, 0, lane.top + (small ? lane.height / 2 + 4 : 11), "--ink", room);
    if (small) return;
    if (lane.unit && !narrow) painter.text(lane.unit, 0, lane.top + 25, "--muted", room);
    if (lane.kind === "heat") {
      if (!narrow) painter.text("rank 0", room + 4, lane.top + 9, "--muted", 60, "right");
      if (lane.worst >= 0) painter.text(`${narrow ? "worst" : "slowest"} ${lane.worst * lane.each}`, 0, lane.top + (narrow ? 25 : 39), "--bad", room);
      return;
    }
    painter.text(figure(lane.high), room + 4, lane.top + (narrow ? 24 : 9), "--muted", 48, "right");
    painter.text(figure(lane.low), room + 4, lane.top + lane.height, "--muted", 48, "right");
  }

  axis(pen) {
    const [from, to] = this.span;
    const wanted = (to - from) / Math.max(2, (this.width - this.left) / 96);
    const step = STEPS.find((each) => each >= wanted) || Math.ceil(wanted / 86400) * 86400;
    pen.fillStyle = this.ink("--muted");
    pen.strokeStyle = this.ink("--line");
    pen.textAlign = "center";
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      const x = Math.round(this.x(t)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS - 4);
      pen.lineTo(x, this.height);
      pen.stroke();
      const text = new Date(t * 1000).toISOString();
      if (x > this.left + 16 && x < this.width - 20) pen.fillText(step >= 86400 ? text.slice(5, 10) : step < 60 ? text.slice(11, 19) : text.slice(11, 16), x, 11);
    }
    pen.textAlign = "left";
    pen.fillText("UTC", 0, 11);
  }

  /** What the colours of the lanes mean. */
  keys() {
    const items = this.lanes.flatMap((lane) => legendOf(lane).map((part) => [`${lane.title}: ${part.name}`, part.hue]));
    const print = JSON.stringify(items);
    if (this.legend.dataset.print === print) return;
    this.legend.dataset.print = print;
    this.legend.replaceChildren(...items.map(([text, hue]) => {
      const dot = el("i", "course-dot");
      dot.style.background = `var(${hue})`;
      return el("span", "course-key", dot, text);
    }));
  }

  said(t) {
    const near = ((this.span[1] - this.span[0]) / (this.width - this.left)) * 12;
    return this.lanes.map((lane) => [lane, valueAt(lane, t, near)]).filter(([, text]) => text);
  }

  /** Draws the reading line, and what each lane says there; `aloud`: also for a screen reader. */
  mark(t, aloud = false) {
    this.at = t;
    if (!this.span) return;
    const pen = this.sized(this.over);
    const ends = `${moment(this.span[0])} to ${moment(this.span[1])}`;
    put(this.over, "aria-label", `The job's course from ${ends}: ${this.lanes.map((lane) => lane.title).join(", ")}. Arrow keys read it, plus and minus zoom.`);
    if (t === null || t < this.span[0] || t > this.span[1]) {
      say(this.read, `${ends} (${span(this.span[1] - this.span[0])}). Drag to look closer; point at it to read all lanes.`);
      return;
    }
    const x = this.x(t);
    if (this.dragged) {
      pen.globalAlpha = 0.18;
      pen.fillStyle = this.ink("--accent");
      const from = this.x(this.dragged.from);
      pen.fillRect(Math.min(from, x), AXIS, Math.abs(x - from), this.height - AXIS);
      pen.globalAlpha = 1;
    }
    pen.strokeStyle = this.ink("--ink");
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(x, AXIS - 4);
    pen.lineTo(x, this.height);
    pen.stroke();
    pen.setLineDash([]);
    pen.font = `600 11px ${this.family}`;
    const found = this.said(t);
    this.tag(pen, moment(t), x, 11);
    for (const [lane, text] of found) this.tag(pen, text, x, lane.top + Math.min(lane.height / 2 + 4, 15));
    const text = [moment(t), ...found.map(([lane, value]) => `${lane.title} ${value}`)].join(" · ");
    if (aloud || !this.read.textContent.startsWith(moment(t))) say(this.read, text);
  }

  tag(pen, text, x, y) {
    const right = x < (this.left + this.width) / 2;
    const room = right ? this.width - x - 18 : x - this.left - 18;
    let said = text;
    while (said.length > 2 && pen.measureText(said).width > room) said = `${said.slice(0, -2)}…`;
    const wide = pen.measureText(said).width + 8;
    const from = right ? x + 5 : x - 5 - wide;
    pen.fillStyle = this.ink("--panel");
    pen.globalAlpha = 0.92;
    pen.fillRect(from, y - 11, wide, 15);
    pen.globalAlpha = 1;
    pen.fillStyle = this.ink("--ink");
    pen.fillText(said, from + 4, y);
  }

  save(blob, ending) {
    const leads = el("a");
    leads.href = URL.createObjectURL(blob);
    leads.download = `job-${this.job.label}.${ending}`;
    leads.click();
    setTimeout(() => URL.revokeObjectURL(leads.href), 1000);
  }

  png() {
    const whole = el("canvas");
    Object.assign(whole, { width: this.base.width, height: this.base.height + 30 });
    const pen = whole.getContext("2d");
    pen.fillStyle = this.ink("--panel");
    pen.fillRect(0, 0, whole.width, whole.height);
    pen.drawImage(this.base, 0, 30);
    pen.fillStyle = this.ink("--ink");
    pen.font = `600 13px ${this.family}`;
    pen.fillText(`job ${this.job.label} ${this.job.name} · ${moment(this.span[0])} to ${moment(this.span[1])}`, 6, 19);
    whole.toBlob((blob) => this.save(blob, "png"), "image/png");
  }

  csv() {
    this.save(new Blob([`${csvOf(this.course, ...this.span)}\n`], { type: "text/csv" }), "csv");
  }
}
