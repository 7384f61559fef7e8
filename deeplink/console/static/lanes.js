// The lanes of a job's course: what each shows, how tall it is, how it is drawn on a canvas, and its value at a moment.

import { figure, moment, whole } from "./dom.js";

export const PARTS = ["data", "compute", "others", "checkpoint", "rest"];
export const PLACES = ["local", "peer", "home", "source"];
const PART_HUES = { data: "--warn", compute: "--hue-1", others: "--hue-2", checkpoint: "--hue-3", rest: "--hue-0" };
const PLACE_HUES = { local: "--hue-3", peer: "--hue-1", home: "--hue-5", source: "--warn" };
const SLOW = 1.1; // times the middle of all ranks
const PLACE_WORDS = { local: "this node", peer: "peers", home: "home", source: "source" };

/** The lanes for which there is data, top to bottom. `seconds` of a row are made shares of a step. */
export function lanesOf(course, job) {
  const measured = course.measured || { rows: [], ranks: [] };
  const lanes = [{ key: "attempts", title: "attempts", height: 22, kind: "bands", bands: attemptBands(course) }];
  if (course.incidents.length) lanes.push({ key: "incidents", title: "incidents", height: 22, kind: "bands", bands: incidentBands(course) });
  for (const [name, series] of Object.entries(course.metrics)) lanes.push({ key: name, title: name, height: lanes.length < 3 ? 104 : 54, kind: "line", series, hue: `--hue-${job.hue || 0}` });
  const rows = measured.rows.filter((row) => row.steps > 0);
  if (rows.length) {
    const parts = PARTS.map((part) => ({ name: part, hue: PART_HUES[part], of: (row) => (row[`${part}_s`] ?? 0) / row.steps }));
    lanes.push({ key: "step", title: "step time", unit: "s", height: 84, kind: "stack", rows, parts });
  } else if (course.steps_per_s.length) lanes.push({ key: "steps", title: "steps/s", height: 54, kind: "line", series: course.steps_per_s, hue: "--calm", zero: true });
  const reads = measured.rows.filter((row) => row.reads && PLACES.some((place) => row.reads[place]));
  if (reads.length) {
    const parts = PLACES.map((place) => ({ name: PLACE_WORDS[place], hue: PLACE_HUES[place], of: (row) => (row.reads[place] ?? 0) / row.span_s }));
    lanes.push({ key: "reads", title: "reads", unit: "samples/s", height: 64, kind: "stack", rows: reads, parts });
  }
  const samples = course.samples_per_s.length ? course.samples_per_s : measured.rows.filter((row) => row.samples_per_s !== null).map((row) => [row.t, row.samples_per_s, attemptIndex(course, row.attempt)]);
  if (samples.length) lanes.push({ key: "samples", title: "samples/s", height: 54, kind: "line", series: samples, hue: "--calm", zero: true });
  if (measured.ranks.length) lanes.push(heatLane(measured.ranks));
  if (course.checkpoints.length) lanes.push({ key: "checkpoints", title: "checkpoints", height: 18, kind: "ticks", ticks: course.checkpoints.map(([t, step]) => ({ t, text: `step ${whole(step)} saved` })), hue: "--good" });
  if (course.events.length) lanes.push({ key: "events", title: "node events", height: 18, kind: "ticks", ticks: course.events.map((each) => ({ t: each.unix, text: `${each.node}: ${each.what}` })), hue: "--bad" });
  return lanes;
}

function attemptIndex(course, name) {
  return Math.max(0, course.attempts.findIndex((each) => each.name === name));
}

function attemptBands(course) {
  return course.attempts.map((each, i) => ({ from: each.began_unix, to: each.ended_unix || Infinity, text: each.name, hue: i % 2 ? "--hue-6" : "--hue-1", long: `attempt ${each.name}${each.detail ? `: ${each.detail}` : ""}` }));
}

function incidentBands(course) {
  return course.incidents.map((each) => ({
    from: each.began_unix,
    to: each.recovered_unix || (each.outcome === "open" ? Infinity : each.acted_unix || each.detected_unix),
    text: each.kind,
    hue: each.outcome === "recovered" ? "--warn" : "--bad",
    long: `${each.kind}${each.node ? ` on ${each.node}` : ""}, ${each.outcome}`,
  }));
}

function median(values) {
  const known = values.filter((value) => value !== null).sort((a, b) => a - b);
  return known[Math.floor(known.length / 2)] ?? 0;
}

function slowestOf(values) {
  return values.reduce((best, value, i) => (value !== null && (best < 0 || value > values[best]) ? i : best), -1);
}

/** Of many ranks a row stands for several, and shows the slowest of them. */
function heatLane(rows) {
  const count = Math.max(...rows.map((row) => row.own_s.length));
  // Beside the middle of its own time: a rank is slow beside others, whatever all of them do then.
  const most = rows.map((row) => Math.max(...row.own_s.filter((value) => value !== null)) / (median(row.own_s) || 1)).sort((a, b) => a - b);
  const high = Math.max(most[Math.ceil(most.length * 0.95) - 1] || 1, 1.3);
  const newest = rows.at(-1).own_s;
  const slowest = slowestOf(newest);
  const worst = slowest >= 0 && newest[slowest] > SLOW * median(newest) ? slowest : -1; // else none stands out
  const each = rows.at(-1).ranks_each || 1;
  return { key: "ranks", title: "ranks", unit: "s per step", height: Math.min(150, Math.max(48, count * 3)), kind: "heat", rows, count, low: 1, high, worst, each };
}

/** What stands beside a lane, from top to bottom, with the colour it is drawn in. */
export function legendOf(lane) {
  return lane.parts ? lane.parts.filter((part) => lane.rows.some((row) => part.of(row) > 0)) : [];
}

export class Painter {
  /** `pen`: a 2D context; `x(unix)`: pixels; `ink(name)`: the colour of a variable of the page's. */
  constructor(pen, x, ink, width, left) {
    Object.assign(this, { pen, x, ink, width, left });
  }

  draw(lane, top) {
    this.pen.save();
    this.pen.beginPath();
    this.pen.rect(this.left, top - 1, this.width - this.left, lane.height + 2);
    this.pen.clip();
    this[lane.kind](lane, top);
    this.pen.restore();
  }

  bands(lane, top) {
    for (const band of lane.bands) {
      const from = Math.max(this.left, this.x(band.from));
      const to = Math.min(this.width, band.to === Infinity ? this.width : this.x(band.to));
      if (to < this.left || from > this.width) continue;
      const wide = Math.max(3, to - from - 1);
      this.pen.globalAlpha = 0.22;
      this.pen.fillStyle = this.ink(band.hue);
      this.pen.fillRect(from, top + 2, wide, lane.height - 4);
      this.pen.globalAlpha = 1;
      this.pen.fillRect(from, top + 2, 2.5, lane.height - 4);
      this.text(band.text, from + 7, top + lane.height / 2 + 4, "--ink", wide - 9);
    }
  }

  text(text, x, y, hue, room = Infinity, align = "left") {
    if (room < 18) return;
    this.pen.textAlign = align;
    this.pen.fillStyle = this.ink(hue);
    let said = text;
    while (said.length > 1 && this.pen.measureText(said).width > room) said = `${said.slice(0, -2)}…`;
    this.pen.fillText(said, x, y);
  }

  axis(lane, top, low, high) {
    this.pen.strokeStyle = this.ink("--line");
    this.pen.lineWidth = 1;
    for (const y of [top, top + lane.height]) {
      this.pen.beginPath();
      this.pen.moveTo(this.left, Math.round(y) + 0.5);
      this.pen.lineTo(this.width, Math.round(y) + 0.5);
      this.pen.stroke();
    }
    Object.assign(lane, { low, high });
  }

  line(lane, top) {
    const visible = lane.series.filter(([t]) => this.x(t) >= this.left - 40 && this.x(t) <= this.width + 40);
    const values = visible.map(([, value]) => value).filter((value) => value !== null);
    let [low, high] = values.length ? [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))] : [0, 1];
    if (lane.zero || (low > 0 && low < high * 0.35)) low = 0;
    if (high === low) [low, high] = [low - 0.5, high + 0.5];
    this.axis(lane, top, low, high);
    const y = (value) => top + 3 + (1 - (value - low) / (high - low)) * (lane.height - 6);
    this.pen.strokeStyle = this.ink(lane.hue);
    this.pen.lineWidth = 1.6;
    this.pen.lineJoin = "round";
    this.pen.beginPath();
    let before = null;
    for (const [t, value, attempt] of visible) {
      if (value === null) {
        this.strange(this.x(t), top);
        before = null;
        continue;
      }
      if (before === attempt) this.pen.lineTo(this.x(t), y(value));
      else this.pen.moveTo(this.x(t), y(value));
      before = attempt;
    }
    this.pen.stroke();
    if (values.length === 1) this.pen.fillRect(this.x(visible.find(([, value]) => value !== null)[0]) - 2, y(values[0]) - 2, 4, 4);
  }

  /** Where a row is from left to right, in whole pixels: no seams between two. */
  column(row) {
    const from = Math.round(this.x(row.t - row.span_s));
    return [from, Math.max(1, Math.round(this.x(row.t)) - from)];
  }

  /** No number: a mark at the top edge, never dropped. */
  strange(x, top) {
    this.pen.fillStyle = this.ink("--bad");
    const mark = new Path2D(`M${x - 4} ${top}h8l-4 7z`);
    this.pen.fill(mark);
  }

  stack(lane, top) {
    const rows = lane.rows.filter((row) => this.x(row.t) >= this.left - 40 && this.x(row.t - row.span_s) <= this.width + 40);
    const sums = rows.map((row) => lane.parts.reduce((sum, part) => sum + part.of(row), 0)).sort((a, b) => a - b);
    const high = (sums[Math.ceil(sums.length * 0.99) - 1] || 1) * 1.05; // one long step does not flatten all others
    this.axis(lane, top, 0, high);
    for (const row of rows) {
      const [from, wide] = this.column(row);
      let sum = 0;
      for (const part of lane.parts) {
        const tall = (part.of(row) / high) * lane.height;
        if (tall <= 0) continue;
        this.pen.fillStyle = this.ink(part.hue);
        this.pen.fillRect(from, top + lane.height - sum - tall, wide, tall);
        sum += tall;
      }
    }
  }

  ticks(lane, top) {
    this.pen.fillStyle = this.ink(lane.hue);
    for (const { t } of lane.ticks) this.pen.fillRect(this.x(t) - 1, top + 3, 2, lane.height - 6);
  }

  heat(lane, top) {
    const tall = lane.height / lane.count;
    const hues = ["--hue-1", "--warn", "--bad"].map((name) => this.ink(name));
    for (const row of lane.rows) {
      const [from, wide] = this.column(row);
      if (from > this.width || from + wide < this.left) continue;
      const middle = median(row.own_s) || 1;
      row.own_s.forEach((value, i) => {
        if (value === null) return;
        const share = Math.min(1, Math.max(0, (value / middle - 1) / (lane.high - 1)));
        this.pen.globalAlpha = 0.16 + 0.84 * share;
        this.pen.fillStyle = hues[share > 0.6 ? 2 : share > 0.25 ? 1 : 0];
        const y = Math.round(top + i * tall);
        this.pen.fillRect(from, y, wide, Math.max(1, Math.round(top + (i + 1) * tall) - y));
      });
    }
    this.pen.globalAlpha = 1;
    this.axis(lane, top, lane.low, lane.high);
    if (lane.worst < 0) return;
    this.pen.strokeStyle = this.ink("--ink");
    this.pen.strokeRect(this.left + 0.5, top + lane.worst * tall - 1, this.width - this.left - 1, tall + 2);
  }
}

function nearest(list, t, time) {
  let best = null;
  for (const each of list) if (best === null || Math.abs(time(each) - t) < Math.abs(time(best) - t)) best = each;
  return best;
}

/** What a lane says at a moment; empty where it says nothing. `near`: seconds that a finger's width stands for. */
export function valueAt(lane, t, near) {
  if (lane.kind === "bands") return lane.bands.filter((band) => band.from <= t + near / 4 && t - near / 4 <= band.to).map((band) => band.long).join("; ");
  if (lane.kind === "ticks") {
    const tick = nearest(lane.ticks, t, (each) => each.t);
    return tick && Math.abs(tick.t - t) <= near ? tick.text : "";
  }
  if (lane.kind === "line") {
    const point = nearest(lane.series, t, ([unix]) => unix);
    return point && Math.abs(point[0] - t) <= 6 * near ? (point[1] === null ? "not a number" : figure(point[1])) : "";
  }
  const row = lane.rows.find((each) => each.t - each.span_s <= t && t <= each.t);
  if (!row) return "";
  if (lane.kind === "stack") return lane.parts.filter((part) => part.of(row) > 0).map((part) => `${part.name} ${figure(part.of(row))}`).join(" · ");
  const worst = slowestOf(row.own_s);
  return worst < 0 ? "" : `slowest: rank ${worst * lane.each} ${figure(row.own_s[worst])} s`;
}

/** The lanes as CSV, a line for each moment of any of them. */
export function csvOf(course, from, to) {
  const names = Object.keys(course.metrics);
  const rows = new Map();
  const at = (t) => rows.get(t) || rows.set(t, {}).get(t);
  for (const name of names) for (const [t, value] of course.metrics[name]) at(t)[name] = value ?? "NaN";
  for (const [t, step] of course.steps) at(t).step = step;
  for (const row of course.measured?.rows || []) {
    for (const part of PARTS) at(row.t)[`${part}_s`] = row[`${part}_s`];
    for (const place of PLACES) at(row.t)[`${place}_samples`] = row.reads?.[place];
    Object.assign(at(row.t), { steps: row.steps, span_s: row.span_s });
  }
  for (const [t, step] of course.checkpoints) at(t).checkpoint_step = step;
  const columns = ["step", ...names, "steps", "span_s", ...PARTS.map((part) => `${part}_s`), ...PLACES.map((place) => `${place}_samples`), "checkpoint_step"];
  const plain = (text) => (/^[=+@\t\r-]/.test(text) ? `'${text}` : text); // a table would take a name for a formula
  const quoted = (text) => (/[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = [...rows].filter(([t]) => t >= from && t <= to).sort(([a], [b]) => a - b);
  return [["unix", "time", ...columns].map(plain).map(quoted), ...lines.map(([t, row]) => [t, moment(t), ...columns.map((name) => row[name] ?? "")])].map((line) => line.join(",")).join("\n");
}
