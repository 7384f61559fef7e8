// The page: one stream of events in, one state, one of five places drawn at each event and once a second for the ages.

import { Actions } from "./actions.js";
import { Cache } from "./cache.js";
import { ago, el, keyed, old, put, say, setGlyph } from "./dom.js";
import { Fabric } from "./fabric.js";
import { Incidents } from "./incidents.js";
import { Jobs } from "./jobs.js";
import { Now } from "./now.js";
import { PLACES, read } from "./route.js";
import { Search } from "./search.js";
import { Stream } from "./stream.js";

const $ = (id) => document.getElementById(id);

const places = {
  now: new Now($("concerns"), $("n-now")),
  fabric: new Fabric($("tree"), $("leaves"), $("inspector"), $("n-fabric"), $("fabric-filters")),
  jobs: new Jobs($("job-list"), $("job-page"), $("n-jobs")),
  cache: new Cache($("datasets"), $("shards"), $("n-cache"), $("n-shards")),
  incidents: new Incidents($("incident-list"), $("n-incidents"), $("incident-filters"), $("incident-pager"), $("incident-sums")),
};
const stream = new Stream(() => soon());
new Search($("search"), $("hits"));
const actions = new Actions(document.querySelector(".top"));

const SOURCE_WORDS = { ok: "", stale: "stale", failing: "no answer", off: "not asked", waiting: "nothing yet" };

function stateOf(each, at) {
  return each.state === "ok" && at - each.at_unix > 3 * each.period_s + 2 ? "stale" : each.state;
}

function ageText(chip, at) {
  if (chip.state === "off" || (chip.state === "waiting" && !chip.since)) return "";
  return chip.state === "failing" ? `last ${old(chip.since, at)}` : ago(chip.since, at);
}

/** Sources with one title are one chip: the worst state, the greatest age. */
function drawSources(state, at) {
  const chips = new Map();
  const worst = ["off", "ok", "waiting", "stale", "failing"];
  for (const each of Object.values(state.sources).sort((a, b) => a.order - b.order)) {
    const word = stateOf(each, at);
    const chip = chips.get(each.title) || { title: each.title, state: "off", since: Infinity, says: [] };
    if (worst.indexOf(word) > worst.indexOf(chip.state)) chip.state = word;
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

/** The age beside a place's title, with the reason where it shows old facts. */
function drawAges(state, at) {
  const from = { "a-fabric": "nodes", "a-jobs": "journal", "a-incidents": "journal", "a-cache": "catalog" };
  for (const [id, source] of Object.entries(from)) {
    const each = state.sources[source];
    if (!each) continue;
    const word = stateOf(each, at);
    put($(id), "data-old", word === "stale" || word === "failing" ? "yes" : null);
    if (each.state === "off") say($(id), "not asked");
    else if (each.state === "failing") say($(id), each.at_unix ? `as of ${old(each.at_unix, at)} – no answer since` : "no answer yet");
    else say($(id), each.at_unix ? `as of ${ago(each.at_unix, at)}` : "");
  }
}

function drawHeadline({ headline, cluster, concerns, incidents }) {
  const lost = stream.lostAt > 0;
  if (!$("headline").childElementCount) $("headline").append(el("span", "h-glyph"), el("span"));
  setGlyph($("headline").children[0], lost ? "unknown" : { good: "busy", warn: "silent", bad: "down" }[headline.mood] || "unknown");
  put($("headline"), "data-mood", lost ? "unknown" : headline.mood);
  say($("headline").children[1], headline.text);
  say($("cluster"), cluster || "");
  const title = `${{ good: "", warn: "▲ ", bad: "✕ " }[headline.mood] ?? "? "}${cluster || "DeepLink"} · ${headline.text}`;
  if (document.title !== title) document.title = title;
  const open = Object.values(incidents).filter((each) => each.outcome === "open").length;
  for (const [id, count] of [["t-now", Object.keys(concerns).length], ["t-incidents", open]]) say($(id), count || "");
  put($("t-now"), "data-mood", headline.mood);
}

/** What the nodes' own checks find wrong, and what helps. */
function drawFindings({ nodes }) {
  const found = Object.values(nodes).filter((node) => node.findings.length).sort((a, b) => a.order - b.order).slice(0, 50);
  keyed($("findings"), found, (node) => node.name, () => el("li"), (line, node) => say(line, `${node.name}: ${[...node.findings, node.remedy].filter(Boolean).join("; ")}`));
  $("findings").hidden = !found.length;
}

function drawNotice(state, at) {
  const notice = $("notice");
  const problems = state ? Object.values(state.sources).filter((each) => each.state === "failing") : [];
  let text = "";
  if (stream.lostAt && Date.now() / 1000 - stream.lostAt > 1.5) {
    text = `Lost the console; trying again. ${state ? `What you see was true ${old(state.unix, at)}.` : ""}`;
  } else if (problems.length) {
    const { title, problem, remedy, at_unix: since } = problems[0];
    text = `${title}: ${problem}. ${since ? `Showing what was known ${old(since, at)}.` : "Nothing known yet."} ${remedy || ""}`;
  }
  // Ages tick in the text; only another cause is announced anew.
  const cause = stream.lostAt ? "lost" : problems[0]?.name || "";
  put(notice, "role", text && notice.dataset.cause === cause ? null : "alert");
  notice.dataset.cause = cause;
  notice.hidden = !text;
  say(notice, text);
}

function draw() {
  const { state } = stream;
  const at = stream.now();
  const where = read();
  drawNotice(state, at);
  for (const link of $("places").children) put(link, "aria-current", link.hash === `#/${where.place}` ? "page" : null);
  for (const name of PLACES) $(name).hidden = name !== where.place;
  put(document.body, "data-live", stream.lostAt ? "no" : "yes");
  if (!state) return;
  $("demo").hidden = !state.demo;
  put(document.body, "data-demo", state.demo ? "yes" : null);
  drawHeadline(state);
  drawSources(state, at);
  drawAges(state, at);
  if (where.place === "fabric") drawFindings(state);
  places[where.place].update(state, at, where);
  actions.draw(where, state, at);
  document.body.dataset.seq = state.seq;
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

let shown = read();
addEventListener("hashchange", () => {
  const where = read();
  // Another place is another page to whoever hears it: it begins at its top.
  if (where.place !== shown.place || where.name !== shown.name) scrollTo(0, 0);
  shown = where;
  soon();
});
setInterval(() => document.hidden || soon(), 1000);
document.addEventListener("visibilitychange", soon);
soon();
