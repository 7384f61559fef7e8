// The page: one stream of events in, one state, drawn at each event and once a second for the ages.

import { ago, el, keyed, old, put, say, setGlyph } from "./dom.js";
import { Fabric } from "./fabric.js";
import { Incidents } from "./incidents.js";
import { Jobs } from "./jobs.js";
import { Shards } from "./shards.js";

const $ = (id) => document.getElementById(id);

const TABLES = ["switches", "nodes", "jobs", "incidents", "sources"];

const page = { state: null, offset: 0, heard: 0, stream: null, wait: 1, lostAt: 0 };
const fabric = new Fabric($("fabric"), $("inspector"), $("n-fabric"));
const jobs = new Jobs($("jobs"), $("n-jobs"), $("fabric"));
const incidents = new Incidents($("incidents"), $("n-incidents"));
const shards = new Shards($("shards"), $("n-shards"));

/** Folds a change into the state: changed fields of changed things, names of things gone, new points of curves. */
function apply(state, change) {
  Object.assign(state, change.meta);
  for (const table of TABLES) {
    for (const [key, fields] of Object.entries(change.set[table] || {})) state[table][key] = { ...state[table][key], ...fields };
    for (const key of change.gone[table] || []) delete state[table][key];
  }
  for (const [job, curve] of Object.entries(change.curves)) {
    const had = state.curves[job];
    const points = (had?.points.slice(0, curve.keep) || []).concat(curve.points);
    state.curves[job] = { metric: curve.metric, points, version: (had?.version || 0) + 1 };
  }
  for (const job of change.curves_gone) delete state.curves[job];
}

function whole(snapshot) {
  for (const curve of Object.values(snapshot.curves)) curve.version = (page.version = (page.version || 0) + 1) * 1e6;
  return snapshot;
}

function now() {
  return Date.now() / 1000 + page.offset;
}

const SOURCE_WORDS = { ok: "", stale: "stale", failing: "no answer", off: "not asked", waiting: "nothing yet" };

function stateOf(each, at) {
  return each.state === "ok" && at - each.at_unix > 3 * each.period_s + 2 ? "stale" : each.state;
}

function ageText(chip, at) {
  if (chip.state === "off" || (chip.state === "waiting" && !chip.since)) return "";
  return chip.state === "failing" ? `last ${old(chip.since, at)}` : ago(chip.since, at);
}

/** Sources with one title are one chip: the worst state, the greatest age. */
function drawSources(at) {
  const chips = new Map();
  const worst = ["off", "ok", "waiting", "stale", "failing"];
  for (const each of Object.values(page.state.sources).sort((a, b) => a.order - b.order)) {
    const state = stateOf(each, at);
    const chip = chips.get(each.title) || { title: each.title, state: "off", since: Infinity, says: [] };
    if (worst.indexOf(state) > worst.indexOf(chip.state)) chip.state = state;
    chip.since = Math.min(chip.since, each.at_unix);
    if (each.problem) chip.says.push(`${each.name}: ${each.problem} – ${each.remedy}`);
    chips.set(each.title, chip);
  }
  keyed($("sources"), chips.values(), (each) => each.title, () => el("li", "source", el("span", "dot"), el("span"), el("span", "source-age")), (made, chip) => {
    put(made, "data-state", chip.state);
    say(made.children[1], [chip.title, SOURCE_WORDS[chip.state]].filter(Boolean).join(": "));
    say(made.children[2], ageText(chip, at));
    put(made, "title", chip.says.join("; ") || null);
  });
}

/** The age beside each panel's title, with the reason where the panel shows old facts. */
function drawAges(at) {
  const from = { "a-fabric": "nodes", "a-jobs": "journal", "a-incidents": "journal", "a-shards": "journal" };
  for (const [id, source] of Object.entries(from)) {
    const each = page.state.sources[source];
    if (!each) continue;
    const state = stateOf(each, at);
    put($(id), "data-old", state === "stale" || state === "failing" ? "yes" : null);
    if (each.state === "off") say($(id), "not asked");
    else if (each.state === "failing") say($(id), each.at_unix ? `as of ${old(each.at_unix, at)} – no answer since` : "no answer yet");
    else say($(id), each.at_unix ? `as of ${ago(each.at_unix, at)}` : "");
  }
}

function drawHeadline() {
  const { headline } = page.state;
  const lost = page.lostAt > 0;
  if (!$("headline").childElementCount) $("headline").append(el("span", "h-glyph"), el("span"));
  setGlyph($("headline").children[0], lost ? "unknown" : { good: "busy", warn: "silent", bad: "down" }[headline.mood] || "unknown");
  put($("headline"), "data-mood", lost ? "unknown" : headline.mood);
  say($("headline").children[1], headline.text);
  say($("cluster"), page.state.cluster || "");
  const title = `${{ good: "", warn: "▲ ", bad: "✕ " }[headline.mood] ?? "? "}${page.state.cluster || "DeepLink"} · ${headline.text}`;
  if (document.title !== title) document.title = title;
}

/** What the nodes' own checks find wrong, and what helps. */
function drawFindings() {
  const found = Object.values(page.state.nodes).filter((node) => node.findings.length).sort((a, b) => a.order - b.order);
  keyed($("findings"), found, (node) => node.name, () => el("li"), (line, node) => say(line, `${node.name}: ${[...node.findings, node.remedy].filter(Boolean).join("; ")}`));
  $("findings").hidden = !found.length;
}

function drawNotice(at) {
  const notice = $("notice");
  const problems = page.state ? Object.values(page.state.sources).filter((each) => each.state === "failing") : [];
  let text = "";
  if (page.lostAt && Date.now() / 1000 - page.lostAt > 1.5) {
    text = `Lost the console; trying again. ${page.state ? `What you see was true ${old(page.state.unix, at)}.` : ""}`;
  } else if (problems.length) {
    const { title, problem, remedy, at_unix: since } = problems[0];
    text = `${title}: ${problem}. ${since ? `Showing what was known ${old(since, at)}.` : "Nothing known yet."} ${remedy || ""}`;
  }
  // Ages tick in the text; only another cause is announced anew.
  put(notice, "role", text && notice.dataset.cause === (page.lostAt ? "lost" : problems[0]?.name) ? null : "alert");
  notice.dataset.cause = page.lostAt ? "lost" : problems[0]?.name || "";
  notice.hidden = !text;
  say(notice, text);
}

function draw() {
  const at = now();
  drawNotice(at);
  if (!page.state) return;
  drawHeadline();
  drawSources(at);
  drawAges(at);
  fabric.update(page.state, at);
  drawFindings();
  jobs.update(page.state, at);
  incidents.update(page.state, at);
  shards.update(page.state, at);
  document.body.dataset.seq = page.state.seq;
}

let drawing = false;
function soon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    draw();
  });
}

function heard(unix) {
  Object.assign(page, { heard: Date.now(), lostAt: 0, wait: 1, offset: unix - Date.now() / 1000 });
  put(document.body, "data-live", "yes");
  soon();
}

function connect() {
  const stream = new EventSource("api/v1/events");
  page.stream = stream;
  stream.addEventListener("snapshot", (event) => {
    page.state = whole(JSON.parse(event.data));
    heard(page.state.unix);
  });
  stream.addEventListener("change", (event) => {
    const change = JSON.parse(event.data);
    if (!page.state || change.after !== page.state.seq) return again(0); // a gap: ask for the whole
    apply(page.state, change);
    return heard(page.state.unix);
  });
  stream.onerror = () => {
    page.lostAt ||= Date.now() / 1000;
    put(document.body, "data-live", "no");
    // The browser tries again by itself after a lost connection, but not after a refusal.
    if (stream.readyState === EventSource.CLOSED) again(page.wait);
  };
}

function again(seconds) {
  page.stream.close();
  page.wait = Math.min(10, page.wait * 2);
  page.heard = Date.now();
  clearTimeout(page.timer);
  page.timer = setTimeout(connect, seconds * 1000 * (0.5 + Math.random()));
}

setInterval(() => {
  if (!document.hidden) soon();
  // A half-open connection (a laptop that slept) says nothing: after a while without a word, begin anew.
  const patience = 3 * (page.state?.interval_s || 2) + 15;
  if (page.heard && Date.now() - page.heard > patience * 1000) {
    page.lostAt ||= Date.now() / 1000;
    again(0);
  }
}, 1000);
document.addEventListener("visibilitychange", soon);
connect();
