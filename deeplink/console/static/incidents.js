// What went wrong, newest first: one line with the seconds to detection, action and recovery; the evidence on demand.

import { ago, chips, el, keyed, moment, pager, put, say, span, whole } from "./dom.js";
import { changed, choose, link } from "./route.js";
import { Asker } from "./stream.js";
import { Weeks } from "./weeks.js";

export const KINDS = {
  "node-silent": "node fell silent",
  "node-dead": "node died",
  "rank-failed": "rank failed",
  "ranks-hung": "ranks hung",
  "launcher-lost": "launcher lost",
  "launcher-restarted": "launcher was restarted",
  "job-stranded": "job stranded",
  "requeue-held": "requeue held",
  "switch-suspect": "switch suspected",
  "self-in-doubt": "watchdog in doubt of itself",
  "node-back": "node came back",
  "node-sick": "node is sick",
  "node-cut-off": "node was cut off",
  "node-rebooted": "node was rebooted",
  "slurmd-lost": "slurmd lost",
  "straggler": "rank lags behind",
  "launch-failed": "ranks were not started",
  "application-failed": "application failed",
  "out-of-memory": "out of memory",
  "preempted": "preempted",
  "time-limit": "time limit reached",
  "storage-frozen": "storage frozen",
  "agents-silent": "agents silent",
  "watchdog-away": "nobody watched",
};

function makeIncident() {
  const box = el("details", "incident");
  const bar = el("span", "i-bar", el("i", "b-detect"), el("i", "b-act"), el("i", "b-recover"));
  bar.setAttribute("aria-hidden", "true");
  const line = el("summary", "", el("span", "i-what"), el("span", "badge"), el("span", "i-when"), el("span", "i-times"), bar);
  box.append(line, el("dl", "i-more"), el("ol", "i-course"), el("div", "i-stacks"));
  return box;
}

/** The course and the stacks, which are not part of the stream: asked for when somebody looks, and when there is more. */
async function recall(box, each) {
  const version = `${each.moments} ${each.outcome}`;
  if (!box.open || box.dataset.version === version) return;
  box.dataset.version = version;
  try {
    const answer = await fetch(`api/v1/incidents/${each.number}`);
    if (!answer.ok) throw new Error(answer.statusText);
    const { incident } = await answer.json();
    fillCourse(box.children[2], incident);
    fillStacks(box.children[3], incident.stacks);
  } catch {
    delete box.dataset.version; // asked again with the next news
  }
}

function fillCourse(list, incident) {
  const make = () => el("li", "", el("span", "i-after"), el("span"));
  keyed(list, incident.timeline, ({ unix, what }) => `${unix} ${what}`, make, (made, { unix, what }) => {
    say(made.children[0], `+${span(unix - incident.began_unix)}`);
    put(made.children[0], "title", moment(unix));
    say(made.children[1], what);
  });
}

function fillStacks(root, stacks) {
  const make = () => el("details", "", el("summary"), el("pre"));
  keyed(root, stacks, (stack) => stack.rank, make, (made, stack) => {
    const process = stack.pid ? `process ${stack.pid} ${stack.state || "gone"}` : "no process";
    say(made.children[0], `rank ${stack.rank}: ${process}${stack.source ? `, by ${stack.source}` : ""}`);
    say(made.children[1], stack.flight ? `${stack.text}\n\ncollectives:\n${stack.flight}` : stack.text);
  });
}

function since(each, unix) {
  return unix ? span(unix - each.began_unix) : null;
}

function times(each, now) {
  const parts = [["b-detect", each.detected_unix ? `detected ${since(each, each.detected_unix)}` : "not yet detected"]];
  if (each.acted_unix) parts.push(["b-act", `acted ${since(each, each.acted_unix)}`]);
  if (each.recovered_unix) parts.push(["b-recover", `training again ${since(each, each.recovered_unix)}`]);
  else if (each.outcome === "open") parts.push(["open", `open for ${span(now - each.began_unix)}`]);
  return parts;
}

function fillBar(bar, each, now) {
  const end = each.recovered_unix || (each.outcome === "open" ? now : Math.max(each.acted_unix, each.detected_unix, each.began_unix));
  const total = Math.max(0.001, end - each.began_unix);
  const detected = each.detected_unix || end;
  const acted = each.acted_unix || (each.detected_unix ? end : detected);
  const shares = [detected - each.began_unix, acted - detected, end - acted].map((part) => Math.max(0, (part / total) * 100));
  shares.forEach((share, i) => {
    const wanted = `${share.toFixed(1)}%`;
    if (bar.children[i].style.width !== wanted) bar.children[i].style.width = wanted;
  });
}

function fillIncident(box, each, now) {
  const [line, more] = box.children;
  const [what, badge, when, seconds, bar] = line.children;
  const kind = KINDS[each.kind] || each.kind;
  box.dataset.incident = each.id;
  put(box, "data-outcome", each.outcome);
  say(what, `${kind}${each.node ? ` · ${each.node}` : ""}${each.job === null ? "" : ` · job ${each.job_label}`}`);
  say(badge, each.outcome);
  put(badge, "data-mood", { recovered: "good", failed: "bad", open: "warn" }[each.outcome] || "unknown");
  say(when, ago(each.began_unix, now));
  put(when, "title", moment(each.began_unix));
  keyed(seconds, times(each, now), ([name]) => name, ([name]) => el("span", name), (made, [, text]) => say(made, text));
  fillBar(bar, each, now);
  const rows = [
    ["evidence", each.evidence || "none recorded"],
    ["action", each.action || "none"],
    ["attempt it ended", each.attempt || "none"],
    ["steps repeated", whole(each.steps_repeated)],
    ["cost", each.rank_hours === null ? "unknown" : `${each.rank_hours.toFixed(2)} rank-hours`],
    ["first evidence", moment(each.began_unix)],
    ["detected", moment(each.detected_unix)],
    ["acted", moment(each.acted_unix)],
    ["training again", moment(each.recovered_unix)],
    ["id", each.id],
    ["user", each.user || "unknown"],
  ];
  keyed(more, rows, (row) => row[0], (row) => el("div", "row", el("dt", "", row[0]), el("dd")), (made, row) => say(made.children[1], row[1]));
  recall(box, each);
}

const SPANS = [["an hour", 3600], ["a day", 86400], ["a week", 604800], ["a month", 2592000]];

export class Incidents {
  constructor(root, count, filters, pages, sums) {
    Object.assign(this, { root, count, pages, found: null, problem: "" });
    this.field = el("input", "filter-text");
    Object.assign(this.field, { type: "search", placeholder: "kind, node, job or evidence", maxLength: 200 });
    put(this.field, "aria-label", "Incidents with this in their kind, node, job or evidence");
    this.field.addEventListener("input", () => choose({ text: this.field.value }, true));
    this.parts = Object.fromEntries(["chosen", "states", "spans", "kinds", "again"].map((name) => [name, el("div", "chips")]));
    filters.append(this.field, ...Object.values(this.parts));
    this.weeks = new Weeks(sums);
    this.asker = new Asker((found, problem) => {
      Object.assign(this, { found: found || (problem ? null : this.found), problem });
      this.draw();
    });
  }

  /** An incident that is opened tells its course at once, not with the next tick. */
  made() {
    const box = makeIncident();
    box.addEventListener("toggle", () => {
      const each = this.known?.[box.dataset.incident];
      if (each) recall(box, each);
    });
    return box;
  }

  update(state, now, { name, asked }) {
    Object.assign(this, { state, now, asked, name });
    if (document.activeElement !== this.field) this.field.value = asked.get("text") || "";
    const question = new URLSearchParams(asked);
    const within = Number(question.get("within"));
    question.delete("within");
    // To the minute, so that the same question is not another one each second.
    if (within) question.set("since", Math.floor((now - within) / 60) * 60);
    if (name === "") this.asker.ask(`incidents?${question}`, state.seq);
    else this.asker.ask(`incidents/${encodeURIComponent(name)}`, state.seq);
    this.draw();
  }

  rows() {
    if (!this.found) return [];
    if (this.name === "") return this.found.incidents || [];
    // One that is named is told whole; as a row it is like those of the list.
    const one = this.found.incident;
    const inList = one && Object.values(this.state.incidents).find((each) => each.id === one.id);
    return one ? [inList || { ...one, moments: one.timeline.length, rank_hours: one.cost?.total_h ?? null, job_label: one.job }] : [];
  }

  draw() {
    const { asked, state, now } = this;
    const on = (key) => asked.get(key) || "";
    const back = this.name === "" ? [] : [{ text: "‹ all incidents", on: true, href: link("incidents") }];
    const chosen = ["node", "job", "user"].filter(on).map((key) => ({ text: `${key} ${on(key)} ✕`, on: true, href: changed({ [key]: "" }) }));
    if (on("since")) chosen.push({ text: `from ${moment(Number(on("since"))).slice(0, 10)}, ${whole((Number(on("until")) - Number(on("since"))) / 86400)} days ✕`, on: true, href: changed({ since: "", until: "" }) });
    chips(this.parts.chosen, "What is chosen; follow a link to take it back", [...back, ...chosen]);
    const toggle = (key, value, text, count) => ({ text, count, on: on(key) === String(value), href: changed({ [key]: on(key) === String(value) ? "" : value }) });
    const single = this.name !== "";
    chips(this.parts.states, "Incidents that ended so", single ? [] : ["open", "recovered", "failed"].map((each) => toggle("state", each, each)));
    chips(this.parts.spans, "Incidents of the last", single ? [] : SPANS.map(([text, seconds]) => toggle("within", seconds, text)));
    const kinds = Object.entries((!single && this.found?.kinds) || {});
    if (on("kind") && !kinds.some(([kind]) => kind === on("kind"))) kinds.push([on("kind"), 0]);
    chips(this.parts.kinds, "Incidents of this kind", kinds.map(([kind, count]) => toggle("kind", kind, KINDS[kind] || kind, count)));
    chips(this.parts.again, "Nodes that failed again and again", single ? [] : (this.found?.again || []).map(([node, count]) => toggle("node", node, `${node} again and again`, count)));
    for (const part of Object.values(this.parts)) part.hidden = !part.childElementCount;
    this.field.hidden = single;
    this.weeks.draw(single ? null : this.found, on("since"));
    const rows = this.rows();
    this.known = Object.fromEntries(rows.map((each) => [each.id, each]));
    keyed(this.root, rows, (each) => each.id, () => this.made(), (box, each) => {
      fillIncident(box, each, now);
      if (single && !box.dataset.shown) box.open = box.dataset.shown = true;
    });
    const narrowed = single || [...asked.keys()].some((key) => key !== "page");
    put(this.root, "data-empty", rows.length ? null : this.problem || (!this.found ? "Asking …" : narrowed ? "No incident fits." : "None on record. May it stay so."));
    pager(this.pages, single ? null : this.found, (page) => changed({ page }));
    const open = Object.values(state.incidents).filter((each) => each.outcome === "open").length;
    say(this.count, this.found && !single ? `${whole(this.found.found)} found, ${open || "none"} open` : "");
  }
}
