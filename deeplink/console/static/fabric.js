// The switch tree: a bar per switch over what hangs below it, a tile per node, and one line that explains a node.

import { ago, bytes, el, glyph, keyed, names, percent, put, say, setGlyph, whole } from "./dom.js";

const DENSE_FROM = 65; // nodes; from here on a tile is a glyph and a name
const TINY_FROM = 257; // and from here on the glyph alone: names are a key press or a pointer away

const WORDS = {
  busy: "running",
  idle: "idle",
  draining: "draining",
  drained: "drained",
  silent: "not answering",
  down: "down",
  maint: "reserved",
  unknown: "unknown",
};

export function stateWord(health) {
  return WORDS[health] || WORDS.unknown;
}

/** "0–1", "0, 4–5": a node's ranks, in ring order. */
export function ranks(list) {
  const runs = [];
  for (const rank of list) {
    const last = runs.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  return runs.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}

export function jobHue(state, id) {
  const job = state.jobs[id];
  return job ? job.hue : 0;
}

function jobName(state, id) {
  return state.jobs[id]?.label || id;
}

function roleText(node) {
  if (node.ranks.length) return `rank${node.ranks.length > 1 ? "s" : ""} ${ranks(node.ranks)}`;
  if (node.spare) return "spare";
  return node.job === null ? "" : "allocated";
}

function explain(state, node, now) {
  const parts = [`${node.name}, ${stateWord(node.health)}`];
  if (node.state) parts.push(`Slurm says ${node.state}`);
  if (node.reason) parts.push(`reason: ${node.reason}`);
  if (node.gpus !== null) parts.push(`${node.gpus} GPUs`);
  if (node.job !== null) parts.push(`job ${jobName(state, node.job)} ${roleText(node)}`);
  if (node.shards !== null) parts.push(`${whole(node.shards)} shards, ${bytes(node.shard_bytes)} held, of it verified ${percent(node.verified_bytes, node.shard_bytes)}, ${bytes(node.free_bytes)} free`);
  parts.push(...node.findings);
  if (node.remedy) parts.push(node.remedy);
  parts.push(node.heard_unix ? `agent heard ${ago(node.heard_unix, now)}` : "no agent heard");
  return parts;
}

function makeTile() {
  const tile = el("button", "tile");
  tile.type = "button";
  tile.append(
    el("span", "t-glyph"),
    el("span", "t-name"),
    el("span", "t-gpus"),
    el("span", "t-state"),
    el("span", "t-job"),
    el("span", "t-shards"),
    el("span", "t-heard"),
  );
  return tile;
}

function fillTile(tile, node, state, now) {
  const [mark, name, gpus, word, job, shards, heard] = tile.children;
  tile.dataset.node = node.name;
  put(tile, "data-health", node.health);
  put(tile, "data-job", node.job);
  put(tile, "data-hue", node.job === null ? null : jobHue(state, node.job));
  setGlyph(mark, node.health);
  say(name, node.name);
  say(gpus, node.gpus === null ? "" : `${node.gpus} GPU`);
  const troubled = !["busy", "idle"].includes(node.health);
  const why = [troubled && node.reason, node.findings[0]].filter(Boolean).join("; ");
  say(word, why ? `${stateWord(node.health)} – ${why}` : stateWord(node.health));
  put(tile, "data-unfit", node.unfit);
  say(job, node.job === null ? "" : `${jobName(state, node.job)} · ${roleText(node)}`);
  say(shards, node.shards === null ? "" : `${whole(node.shards)} shards · ${bytes(node.shard_bytes)}`);
  say(heard, node.heard_unix ? ago(node.heard_unix, now) : "");
  put(tile, "title", [node.reason, ...node.findings, node.remedy].filter(Boolean).join("; ") || null);
  put(tile, "aria-label", explain(state, node, now).join("; "));
}

function childrenOf(state, parent) {
  return Object.values(state.switches)
    .filter((each) => each.parent === parent)
    .sort((a, b) => a.order - b.order);
}

function nodesOf(state, name) {
  return Object.values(state.nodes)
    .filter((node) => node.switch === name)
    .sort((a, b) => a.order - b.order);
}

function makeSwitch() {
  const box = el("div", "switch");
  box.setAttribute("role", "group");
  box.append(el("div", "switch-bar", el("span", "switch-name"), el("span", "switch-sum")), el("div", "switch-kids"), el("div", "tiles"));
  return box;
}

function under(state, name) {
  const found = nodesOf(state, name);
  for (const child of childrenOf(state, name)) found.push(...under(state, child.name));
  return found;
}

function fillSwitch(box, each, state, now) {
  const [bar, kids, tiles] = box.children;
  const all = under(state, each.name);
  const sick = all.filter((node) => !["busy", "idle", "maint"].includes(node.health)).length;
  put(box, "data-level", each.level);
  put(box, "data-sick", all.length > 0 && sick === all.length ? "all" : sick ? "some" : null);
  put(box, "aria-label", `${each.title}: ${all.length} nodes${sick ? `, ${sick} not well` : ""}`);
  say(bar.children[0], each.title);
  say(bar.children[1], sick ? `${sick} of ${all.length} not well` : `${all.length}`);
  keyed(kids, childrenOf(state, each.name), (child) => child.name, makeSwitch, (child, item) => fillSwitch(child, item, state, now));
  keyed(tiles, nodesOf(state, each.name), (node) => node.name, makeTile, (tile, node) => fillTile(tile, node, state, now));
  kids.hidden = !kids.childElementCount;
  tiles.hidden = !tiles.childElementCount;
  box.style.flexGrow = String(Math.max(1, Math.min(all.length, 32)));
}

function legend() {
  const list = el("span", "legend");
  for (const health of Object.keys(WORDS)) list.append(el("span", "legend-item", glyph(health), WORDS[health]));
  return list;
}

export class Fabric {
  constructor(root, inspector, count) {
    Object.assign(this, { root, inspector, count, looking: null });
    for (const event of ["pointerover", "focusin"]) root.addEventListener(event, (at) => this.look(at.target.closest(".tile")));
    for (const event of ["pointerleave", "focusout"]) root.addEventListener(event, () => this.look(null));
    root.addEventListener("keydown", (at) => this.walk(at));
    this.legend = legend();
    inspector.append(this.legend);
  }

  look(tile) {
    this.looking = tile ? tile.dataset.node : null;
    this.explain();
  }

  /** Arrow keys go from tile to tile; Tab leaves the tree after one stop. */
  walk(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !event.target.closest(".tile")) return;
    event.preventDefault();
    const tiles = [...this.root.querySelectorAll(".tile")];
    const next = tiles[(tiles.indexOf(event.target) + step + tiles.length) % tiles.length];
    this.rove(next);
    next.focus();
  }

  rove(chosen) {
    for (const tile of this.root.querySelectorAll(".tile")) put(tile, "tabindex", tile === chosen ? 0 : -1);
  }

  explain() {
    const node = this.looking && this.state && this.state.nodes[this.looking];
    if (!node) {
      if (this.inspector.firstChild !== this.legend) this.inspector.replaceChildren(this.legend);
      return;
    }
    if (this.inspector.firstChild === this.legend) this.inspector.replaceChildren(el("span", "i-glyph"), el("span"));
    setGlyph(this.inspector.children[0], node.health);
    say(this.inspector.children[1], explain(this.state, node, this.now).join(" · "));
  }

  update(state, now) {
    Object.assign(this, { state, now });
    const nodes = Object.values(state.nodes);
    put(this.root, "data-dense", nodes.length >= TINY_FROM ? "tiny" : nodes.length >= DENSE_FROM ? "yes" : null);
    keyed(this.root, childrenOf(state, null), (each) => each.name, makeSwitch, (box, each) => fillSwitch(box, each, state, now));
    const tally = new Map();
    for (const node of nodes) tally.set(node.health, (tally.get(node.health) || 0) + 1);
    const text = Object.keys(WORDS).filter((health) => tally.has(health)).map((health) => `${tally.get(health)} ${WORDS[health]}`);
    say(this.count, nodes.length ? `${nodes.length} nodes: ${text.join(", ")}` : "no nodes known");
    const focused = this.root.querySelector(".tile[tabindex='0']");
    const first = this.root.querySelector(".tile");
    if (first) this.rove(focused || first);
    this.explain();
  }
}

export function ring(job, state) {
  const line = el("span", "ring");
  let before = null;
  for (const name of job.nodes) {
    const node = state.nodes[name];
    const leaf = node ? node.switch : null;
    if (before !== null && before.leaf !== leaf) line.append(el("span", "hop", "→"));
    line.append(el("span", "ring-node", name));
    before = { leaf };
  }
  line.setAttribute("aria-label", `ring of ranks over ${names(job.nodes)}`);
  return line;
}
