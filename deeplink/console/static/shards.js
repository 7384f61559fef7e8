// Which node holds how much: a row per node, the bar is the share of its SSD that shards take.

import { ago, bytes, el, keyed, put, say, whole } from "./dom.js";

function makeTable() {
  const head = el("tr");
  for (const title of ["node", "shards", "held", "SSD", "free", "heard"]) {
    const cell = el("th", "", title);
    cell.scope = "col";
    head.append(cell);
  }
  return el("table", "", el("caption", "unseen", "Shards, bytes held and bytes free per node"), el("thead", "", head), el("tbody"));
}

function makeRow() {
  const name = el("th");
  name.scope = "row";
  const bar = el("span", "bar", el("i"));
  return el("tr", "", name, el("td", "num"), el("td", "num"), el("td", "bar-cell", bar), el("td", "num"), el("td", "num"));
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
      const [name, shards, held, bar, free, heard] = row.children;
      say(name, node.name);
      say(shards, whole(node.shards));
      say(held, bytes(node.shard_bytes));
      const share = room ? (node.shard_bytes / room) * 100 : 0;
      const fill = bar.firstElementChild.firstElementChild;
      const width = `${Math.max(share ? 1 : 0, share).toFixed(1)}%`;
      if (fill.style.width !== width) fill.style.width = width;
      put(bar, "title", `${share.toFixed(1)} % of ${bytes(room)}`);
      put(row, "data-full", room && node.free_bytes / room < 0.05 ? "yes" : null);
      say(free, bytes(node.free_bytes));
      say(heard, ago(node.heard_unix, now));
    });
    const sum = nodes.reduce((total, node) => total + node.shard_bytes, 0);
    const shards = nodes.reduce((total, node) => total + node.shards, 0);
    say(this.count, `${whole(shards)} on ${nodes.length} nodes, ${bytes(sum)}`);
  }
}
