// The datasets with their versions, and which nodes hold them; then each node's store: how much, and what is verified.

import { ago, bytes, el, keyed, names, pager, percent, put, say, whole } from "./dom.js";
import { changed } from "./route.js";
import { heardText } from "./tiles.js";

const ROWS = 100; // nodes on a page

function makeDatasets() {
  const head = el("tr");
  for (const [title, kind] of [["dataset", ""], ["version", ""], ["samples", "num"], ["size", "num"], ["shards", "num"], ["packed", "num"], ["on nodes, verified", ""], ["share", "num"], ["source", ""]]) {
    const cell = el("th", kind, title);
    cell.scope = "col";
    head.append(cell);
  }
  return el("table", "datasets", el("caption", "unseen", "Versions of datasets, their size, and where they are"), el("thead", "", head), el("tbody"));
}

function makeDataset() {
  const name = el("th");
  name.scope = "row";
  const row = el("tr", "", name, ...["", "num", "num", "num", "num", "", "num", "from"].map((kind) => el("td", kind)));
  row.children[1].append(el("span", "version"), el("span", "newest"));
  return row;
}

/** Where a version is, in words: by what was noted when somebody last looked; never a guess. */
function whereText(each) {
  const holding = (each.nodes || []).filter(([, held]) => held > 0).map(([node]) => node);
  const home = each.home ? "packed home" : "";
  if (each.nodes === null) return [home, "nodes unknown"].filter(Boolean).join("; ");
  return [home, holding.length ? names(holding) : "no node"].filter(Boolean).join("; ");
}

function fillDataset(row, each, now) {
  const [name, version, files, size, shards, packed, where, share, source] = row.children;
  say(name, each.name);
  say(version.children[0], each.version.slice(0, 12));
  put(version.children[0], "title", each.version);
  say(version.children[1], each.newest ? "newest" : "");
  say(files, whole(each.files));
  say(size, bytes(each.bytes));
  say(shards, whole(each.shards));
  say(packed, each.packed_unix ? ago(each.packed_unix, now) : "unknown");
  say(where, whereText(each));
  const most = Math.max(0, ...(each.nodes || []).map(([, held]) => held));
  say(share, each.nodes === null ? "unknown" : percent(most, each.total));
  put(share, "title", "of the node that holds the most of it; `deeplink warm NAME --dry-run` looks again");
  say(source, each.source || "unknown");
  put(source, "title", each.source || null);
}

function makeTable() {
  const head = el("tr");
  for (const title of ["node", "shards", "held", "verified", "SSD", "free", "heard"]) {
    const cell = el("th", ["node", "SSD"].includes(title) ? "" : "num", title);
    cell.scope = "col";
    head.append(cell);
  }
  return el("table", "", el("caption", "unseen", "Shards, bytes held, share of them verified, and bytes free per node"), el("thead", "", head), el("tbody"));
}

function makeRow() {
  const name = el("th");
  name.scope = "row";
  const bar = el("span", "bar", el("i", "held"), el("i"));
  const [shards, held, verified, free, heard] = Array.from({ length: 5 }, () => el("td", "num"));
  return el("tr", "", name, shards, held, verified, el("td", "bar-cell", bar), free, heard);
}

function drawShare(fill, share) {
  const width = `${Math.max(share ? 1 : 0, share).toFixed(1)}%`;
  if (fill.style.width !== width) fill.style.width = width;
}

export class Cache {
  constructor(datasets, shards, count, shardsCount) {
    Object.assign(this, { datasets, shards, count, shardsCount, sets: makeDatasets(), table: makeTable(), pages: el("nav", "pager") });
    put(this.pages, "aria-label", "Pages of nodes");
    shards.after(this.pages);
  }

  update(state, now, { asked }) {
    this.drawDatasets(state, now, asked.get("dataset"));
    this.drawShards(state, now, Number(asked.get("page")) || 1);
  }

  drawDatasets(state, now, chosen) {
    const all = Object.values(state.datasets).sort((a, b) => a.order - b.order);
    const source = state.sources.catalog;
    const none = source.state === "off" ? "The catalog is not read." : source.state === "ok" ? "The catalog has no dataset. `deeplink pack SOURCE NAME` makes one." : source.problem || "Not read yet.";
    put(this.datasets, "data-empty", all.length ? null : none);
    if (all.length && !this.sets.isConnected) this.datasets.replaceChildren(this.sets);
    if (!all.length) this.sets.remove();
    keyed(this.sets.tBodies[0], all, (each) => each.key, makeDataset, (row, each) => {
      fillDataset(row, each, now);
      put(row, "aria-current", each.name === chosen ? "true" : null);
      if (each.name === chosen && this.shown !== chosen) {
        this.shown = chosen;
        row.scrollIntoView({ block: "nearest" });
      }
    });
    const newest = all.filter((each) => each.newest);
    const sum = newest.reduce((total, each) => total + (each.bytes || 0), 0);
    say(this.count, all.length ? `${newest.length} dataset${newest.length === 1 ? "" : "s"}, ${bytes(sum)}` : "");
  }

  drawShards(state, now, page) {
    const nodes = Object.values(state.nodes).filter((node) => node.shards !== null).sort((a, b) => a.order - b.order);
    put(this.shards, "data-empty", nodes.length ? null : "No agent has reported. Shards are counted by the node agents.");
    if (!nodes.length) this.table.remove();
    else if (!this.table.isConnected) this.shards.replaceChildren(this.table);
    const pages = Math.max(1, Math.ceil(nodes.length / ROWS));
    const at = Math.min(Math.max(1, Math.floor(page)), pages);
    pager(this.pages, { page: at, pages }, (to) => changed({ page: to }));
    keyed(this.table.tBodies[0], nodes.slice((at - 1) * ROWS, at * ROWS), (node) => node.name, makeRow, (row, node) => fillShards(row, node, now));
    const sum = (name) => nodes.reduce((total, node) => total + node[name], 0);
    const verified = nodes.some((node) => node.verified_bytes === null) ? null : sum("verified_bytes");
    say(this.shardsCount, nodes.length ? `${bytes(sum("shard_bytes"))} on ${nodes.length} nodes, verified ${percent(verified, sum("shard_bytes"))}` : "");
  }
}

function fillShards(row, node, now) {
  const room = node.shard_bytes + node.free_bytes;
  const [name, shards, held, verified, bar, free, heard] = row.children;
  say(name, node.name);
  say(shards, whole(node.shards));
  say(held, bytes(node.shard_bytes));
  say(verified, percent(node.verified_bytes, node.shard_bytes));
  const shares = [node.shard_bytes, node.verified_bytes ?? 0].map((part) => (room ? (part / room) * 100 : 0));
  [...bar.firstElementChild.children].forEach((fill, number) => drawShare(fill, shares[number]));
  put(bar, "title", `${percent(node.shard_bytes, room)} of ${bytes(room)}, verified ${percent(node.verified_bytes, room)}`);
  put(row, "data-full", room && node.free_bytes / room < 0.05 ? "yes" : null);
  say(free, bytes(node.free_bytes));
  say(heard, heardText(node, now));
}
