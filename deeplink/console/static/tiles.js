// Nodes as tiles below the switches they hang on, and what there is to say of one.

import { ago, bytes, el, keyed, names, percent, put, say, setGlyph, whole } from "./dom.js";

export const WORDS = {
  busy: "running",
  idle: "idle",
  draining: "draining",
  drained: "drained",
  silent: "not answering",
  down: "down",
  maint: "reserved",
  unknown: "unknown",
};
const WELL = new Set(["busy", "idle", "maint"]);

export function stateWord(health) {
  return WORDS[health] || WORDS.unknown;
}

export function sick(node) {
  return !WELL.has(node.health) || node.unfit;
}

/** "0–1", "0, 4–5": a node's ranks, in ring order. */
function ranks(list) {
  const runs = [];
  for (const rank of list) {
    const last = runs.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  return runs.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}

export function jobHue(state, id) {
  return state.jobs[id]?.hue || 0;
}

function jobName(state, id) {
  return state.jobs[id]?.label || id;
}

function roleText(node) {
  if (node.ranks.length) return `rank${node.ranks.length > 1 ? "s" : ""} ${ranks(node.ranks)}`;
  if (node.spare) return "spare";
  return node.job === null ? "" : "allocated";
}

export function explain(state, node, now) {
  const parts = [`${node.name}, ${stateWord(node.health)}`];
  if (node.state) parts.push(`Slurm says ${node.state}`);
  if (node.reason) parts.push(`reason: ${node.reason}`);
  if (node.gpus !== null) parts.push(`${node.gpus} GPUs`);
  if (node.job !== null) parts.push(`job ${jobName(state, node.job)} ${roleText(node)}`);
  if (node.shards !== null) parts.push(`${whole(node.shards)} shards, ${bytes(node.shard_bytes)} held, of it verified ${percent(node.verified_bytes, node.shard_bytes)}, ${bytes(node.free_bytes)} free`);
  parts.push(...node.findings);
  if (node.remedy) parts.push(node.remedy);
  parts.push(node.live ? "agent live" : node.heard_unix ? `agent heard ${ago(node.heard_unix, now)}` : "no agent heard");
  return parts;
}

/** When a node's agent was heard: live is within 15 s. */
export function heardText(node, now) {
  return node.live ? "live" : node.heard_unix ? ago(node.heard_unix, now) : "";
}

function makeTile() {
  const tile = el("button", "tile", ...["glyph", "name", "gpus", "state", "job", "shards", "heard"].map((part) => el("span", `t-${part}`)));
  tile.type = "button";
  return tile;
}

function fillTile(tile, node, state, now, aside) {
  const [mark, name, gpus, word, job, shards, heard] = tile.children;
  tile.dataset.node = node.name;
  tile.classList.toggle("aside", aside(node));
  put(tile, "data-health", node.health);
  put(tile, "data-job", node.job);
  put(tile, "data-hue", node.job === null ? null : jobHue(state, node.job));
  setGlyph(mark, node.health);
  say(name, node.name);
  say(gpus, node.gpus === null ? "" : `${node.gpus} GPU`);
  const why = [!WELL.has(node.health) && node.reason, node.findings[0]].filter(Boolean).join("; ");
  say(word, why ? `${stateWord(node.health)} – ${why}` : stateWord(node.health));
  put(tile, "data-unfit", node.unfit);
  say(job, node.job === null ? "" : `${jobName(state, node.job)} · ${roleText(node)}`);
  say(shards, node.shards === null ? "" : `${bytes(node.shard_bytes)} held`);
  say(heard, heardText(node, now));
  put(tile, "title", [node.reason, ...node.findings, node.remedy].filter(Boolean).join("; ") || null);
  put(tile, "aria-label", explain(state, node, now).join("; "));
}

/** The nodes and the switches by what they hang on: made once for a look at the whole tree. */
export function treeOf(state) {
  const kids = Object.groupBy(Object.values(state.switches).sort((a, b) => a.order - b.order), (each) => each.parent ?? "");
  const nodes = Object.groupBy(Object.values(state.nodes).sort((a, b) => a.order - b.order), (node) => node.switch);
  return { kids: (name) => kids[name] || [], nodes: (name) => nodes[name] || [] };
}

function makeSwitch() {
  const box = el("div", "switch");
  box.setAttribute("role", "group");
  box.append(el("div", "switch-bar", el("span", "switch-name"), el("span", "switch-sum")), el("div", "switch-kids"), el("div", "tiles"));
  return box;
}

function under(tree, name) {
  return [...tree.nodes(name), ...tree.kids(name).flatMap((child) => under(tree, child.name))];
}

/** Draws a switch, and all that hangs below it. `aside(node)`: whether a tile steps back. */
function fillSwitch(box, each, tree, state, now, aside) {
  const [bar, kids, tiles] = box.children;
  const all = under(tree, each.name);
  const bad = all.filter(sick).length;
  put(box, "data-sick", all.length > 0 && bad === all.length ? "all" : bad ? "some" : null);
  put(box, "aria-label", `${each.title}: ${all.length} nodes${bad ? `, ${bad} not well` : ""}`);
  say(bar.children[0], each.title);
  say(bar.children[1], bad ? `${bad} of ${all.length} not well` : `${all.length}`);
  keyed(kids, tree.kids(each.name), (child) => child.name, makeSwitch, (child, item) => fillSwitch(child, item, tree, state, now, aside));
  keyed(tiles, tree.nodes(each.name), (node) => node.name, makeTile, (tile, node) => fillTile(tile, node, state, now, aside));
  kids.hidden = !kids.childElementCount;
  tiles.hidden = !tiles.childElementCount;
  const grow = String(Math.max(1, Math.min(all.length, 32)));
  if (box.style.flexGrow !== grow) box.style.flexGrow = grow;
}

export function drawSwitches(root, tops, tree, state, now, aside) {
  keyed(root, tops, (each) => each.name, makeSwitch, (box, each) => fillSwitch(box, each, tree, state, now, aside));
}

export function ring(job, state) {
  const line = el("span", "ring");
  let before = null;
  for (const name of job.nodes) {
    const leaf = state.nodes[name]?.switch ?? null;
    if (before !== null && before.leaf !== leaf) line.append(el("span", "hop", "→"));
    const node = el("a", "ring-node", name);
    node.href = `#/fabric?node=${encodeURIComponent(name)}${leaf === null ? "" : `&leaf=${encodeURIComponent(leaf)}`}`;
    line.append(node);
    before = { leaf };
  }
  put(line, "role", "group");
  line.setAttribute("aria-label", `ring of ranks over ${names(job.nodes)}`);
  return line;
}
