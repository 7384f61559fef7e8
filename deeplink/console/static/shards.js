// Which node holds how much, and how much of that it has verified: a row per node, the bar is the share of its SSD.

import { ago, bytes, el, keyed, percent, put, say, whole } from "./dom.js";

function makeTable() {
  const head = el("tr");
  for (const title of ["node", "shards", "held", "verified", "SSD", "free", "heard"]) {
    const cell = el("th", "", title);
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

export class Shards {
  constructor(root, count) {
    Object.assign(this, { root, count, table: makeTable() });
  }

  update(state, now) {
    const nodes = Object.values(state.nodes).filter((node) => node.shards !== null).sort((a, b) => a.order - b.order);
    put(this.root, "data-empty", nodes.length ? null : "No agent has reported. Shards are counted by the node agents of running jobs.");
    if (!nodes.length) {
      this.root.replaceChildren();
      say(this.count, "");
      return;
    }
    if (!this.table.isConnected) this.root.replaceChildren(this.table);
    keyed(this.table.tBodies[0], nodes, (node) => node.name, makeRow, (row, node) => {
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
      say(heard, ago(node.heard_unix, now));
    });
    const sum = (name) => nodes.reduce((total, node) => total + node[name], 0);
    const verified = nodes.some((node) => node.verified_bytes === null) ? null : sum("verified_bytes");
    say(this.count, `${bytes(sum("shard_bytes"))} on ${nodes.length} nodes, verified ${percent(verified, sum("shard_bytes"))}`);
  }
}
