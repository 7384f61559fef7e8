// The fabric: the switch tree with a tile per node; beyond a hundred nodes a row of cells per leaf, and one leaf's tiles.

import { bytes, chips, el, glyph, keyed, put, say, setGlyph, whole } from "./dom.js";
import { changed, choose, link } from "./route.js";
import { WORDS, drawSwitches, explain, jobHue, sick, stateWord, treeOf } from "./tiles.js";

const TILES_UPTO = 128; // nodes that are shown as tiles at once
const ROW = 40; // cells of a row; a leaf with more has several
const COLOURS = ["health", "job", "cache"];

function legend() {
  const list = el("span", "legend");
  for (const health of Object.keys(WORDS)) list.append(el("span", "legend-item", glyph(health), WORDS[health]));
  return list;
}

/** How much of its room a node's shards take, in tenths; null where nobody said. */
function fullness(node) {
  return node.shards === null ? null : Math.round((10 * node.shard_bytes) / Math.max(1, node.shard_bytes + node.free_bytes));
}

export class Fabric {
  constructor(tree, leaves, inspector, count, filters) {
    Object.assign(this, { tree, leaves, inspector, count, filters, looking: null });
    for (const root of [tree, leaves]) {
      for (const event of ["pointerover", "focusin"]) root.addEventListener(event, (at) => this.look(at.target.closest("[data-node]")));
      for (const event of ["pointerleave", "focusout"]) root.addEventListener(event, () => this.look(null));
    }
    tree.addEventListener("keydown", (at) => this.walk(at));
    tree.addEventListener("click", (at) => {
      const tile = at.target.closest(".tile");
      if (tile) choose({ node: tile.dataset.node });
    });
    this.legend = legend();
    inspector.append(this.legend);
    this.bar = el("div", "chips");
    this.colours = el("div", "chips");
    this.crumb = el("div", "chips");
    filters.append(this.crumb, this.bar, this.colours);
  }

  look(part) {
    this.looking = part ? part.dataset.node : null;
    this.explain();
  }

  /** Arrow keys go from tile to tile; Tab leaves the tree after one stop. */
  walk(event) {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step || !event.target.closest(".tile")) return;
    event.preventDefault();
    const tiles = [...this.tree.querySelectorAll(".tile")];
    const next = tiles[(tiles.indexOf(event.target) + step + tiles.length) % tiles.length];
    this.rove(next);
    next.focus();
  }

  rove(chosen) {
    for (const tile of this.tree.querySelectorAll(".tile")) put(tile, "tabindex", tile === chosen ? 0 : -1);
  }

  explain() {
    const node = this.state?.nodes[this.looking ?? this.asked.get("node")];
    if (!node) {
      if (this.inspector.firstChild !== this.legend) this.inspector.replaceChildren(this.legend);
      return;
    }
    if (this.inspector.firstChild === this.legend) this.inspector.replaceChildren(el("span", "i-glyph"), el("span"));
    setGlyph(this.inspector.children[0], node.health);
    say(this.inspector.children[1], explain(this.state, node, this.now).join(" · "));
  }

  update(state, now, { asked }) {
    Object.assign(this, { state, now, asked });
    const nodes = Object.values(state.nodes);
    const many = nodes.length > TILES_UPTO;
    const tree = treeOf(state);
    const leaf = many ? state.switches[asked.get("leaf") ?? ""] : null;
    this.drawFilters(nodes, many, leaf);
    this.tree.hidden = many && !leaf;
    this.leaves.hidden = !this.tree.hidden;
    if (this.tree.hidden) this.drawLeaves(tree);
    else drawSwitches(this.tree, leaf ? [leaf] : tree.kids(""), tree, state, now, (node) => this.aside(node));
    say(this.count, nodes.length ? `${whole(nodes.length)} nodes, ${whole(nodes.filter(sick).length)} not well` : "no nodes known");
    const focused = this.tree.querySelector(".tile[tabindex='0']");
    const first = focused || this.tree.querySelector(".tile");
    if (first) this.rove(first);
    this.mark();
    this.explain();
  }

  /** Whether a node is not one of those that are asked for. */
  aside(node) {
    const job = this.asked.get("job");
    const health = this.asked.get("health");
    const leaf = this.asked.get("leaf");
    if (job && String(node.job) !== job) return true;
    if (leaf && this.leaves.hidden && node.switch !== leaf) return true;
    return Boolean(health) && (health === "findings" ? !node.findings.length : node.health !== health);
  }

  /** The node that the URL names stands out, and is in view once. */
  mark() {
    const name = this.asked.get("node");
    for (const part of this.tree.querySelectorAll("[data-node]")) {
      const on = part.dataset.node === name;
      put(part, "aria-pressed", on ? "true" : null);
      if (on && this.shown !== name) part.scrollIntoView({ block: "nearest" });
    }
    this.shown = name;
  }

  drawFilters(nodes, many, leaf) {
    const tally = new Map();
    for (const node of nodes) tally.set(node.health, (tally.get(node.health) || 0) + 1);
    const on = this.asked.get("health") || "";
    const found = nodes.filter((node) => node.findings.length).length;
    const items = Object.keys(WORDS).filter((health) => tally.has(health)).map((health) => [health, WORDS[health], tally.get(health)]);
    if (found) items.push(["findings", "findings", found]);
    chips(this.bar, "Nodes in this state stand out", items.map(([key, text, count]) => ({ text, count: whole(count), on: key === on, href: changed({ health: key === on ? "" : key }) })));
    this.colours.hidden = !many || Boolean(leaf);
    const by = this.asked.get("colour") || "health";
    chips(this.colours, "What the colour of a cell means", COLOURS.map((colour) => ({ text: `by ${colour}`, on: colour === by, href: changed({ colour: colour === "health" ? "" : colour }) })));
    const crumbs = [];
    if (leaf) crumbs.push({ text: `‹ all leaves`, href: changed({ leaf: "", node: "" }) });
    for (const key of ["leaf", "job", "node"]) {
      const value = this.asked.get(key);
      if (value) crumbs.push({ text: `${key} ${key === "job" ? this.state.jobs[value]?.label || value : value} ✕`, on: true, href: changed({ [key]: "" }) });
    }
    chips(this.crumb, "What is chosen; follow a link to take it back", crumbs);
    this.crumb.hidden = !crumbs.length;
  }

  drawLeaves(tree) {
    const by = this.asked.get("colour") || "health";
    const leaves = Object.values(this.state.switches).filter((each) => tree.nodes(each.name).length).sort((a, b) => a.order - b.order);
    keyed(this.leaves, leaves, (each) => each.name, () => el("a", "leaf", el("span", "leaf-name"), el("span", "cells"), el("span", "leaf-sum")), (row, each) => {
      const nodes = tree.nodes(each.name);
      const bad = nodes.filter(sick).length;
      const chosen = { ...Object.fromEntries(this.asked), leaf: each.name };
      put(row, "href", link("fabric", "", chosen));
      put(row, "data-sick", bad === nodes.length ? "all" : bad ? "some" : null);
      put(row, "aria-label", `${each.title}: ${nodes.length} nodes${bad ? `, ${bad} not well: ${nodes.filter(sick).slice(0, 8).map((node) => `${node.name} ${node.unfit ? node.findings[0] : stateWord(node.health)}`).join(", ")}` : ", all well"}`);
      say(row.children[0], each.title);
      say(row.children[2], bad ? `${bad} of ${nodes.length}` : nodes.length);
      this.drawCells(row.children[1], nodes, by);
    });
  }

  /** Cells are made again only where one of them changed: there may be ten thousand. */
  drawCells(box, nodes, by) {
    const shade = { health: () => "", job: (node) => (node.job === null ? "none" : jobHue(this.state, node.job)), cache: (node) => fullness(node) ?? "none" }[by] || (() => "");
    const print = nodes.map((node) => `${node.name}${node.health}${node.unfit}${shade(node)}${this.aside(node)}`).join();
    if (box.dataset.print === print) return;
    box.dataset.print = print;
    box.style.gridTemplateColumns = `repeat(${Math.min(nodes.length, ROW)}, minmax(0, 9px))`;
    box.replaceChildren(...nodes.map((node) => {
      const cell = el("i", this.aside(node) ? "cell aside" : "cell");
      cell.dataset.node = node.name;
      cell.dataset.health = node.health;
      if (node.unfit) cell.dataset.unfit = "yes";
      if (by === "job") cell.dataset.hue = shade(node) === "none" ? "0" : shade(node);
      if (by === "cache") cell.dataset.full = shade(node);
      cell.title = by === "cache" && node.shards !== null ? `${node.name}: ${bytes(node.shard_bytes)}, ${bytes(node.free_bytes)} free` : `${node.name}: ${stateWord(node.health)}`;
      return cell;
    }));
  }
}
