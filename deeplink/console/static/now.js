// What needs a hand, the most urgent first, with the evidence and the command to copy; else that all is well.

import { ago, command, el, fillCommand, keyed, put, say, setGlyph, whole } from "./dom.js";

const GLYPHS = { bad: "down", warn: "silent" };

function makeConcern() {
  return el("li", "concern", el("span", "c-glyph"), el("div", "c-what", el("a", "c-title"), el("p", "c-evidence")), el("span", "c-since"), el("div", "c-help", el("span", "c-for"), command()));
}

function fillConcern(line, each, now) {
  const [mark, what, since, help] = line.children;
  put(line, "data-mood", each.mood);
  put(line, "data-kind", each.kind);
  setGlyph(mark, GLYPHS[each.mood] || "unknown");
  say(what.children[0], each.title.startsWith("job ") ? `J${each.title.slice(1)}` : each.title); // a node's name stays as it is
  put(what.children[0], "href", each.place ? `#/${each.place}` : null);
  say(what.children[1], each.evidence);
  say(since, each.since_unix ? ago(each.since_unix, now) : "");
  help.hidden = !each.command;
  say(help.children[0], each.help);
  fillCommand(help.children[1], each.command);
}

export class Now {
  constructor(root, count) {
    Object.assign(this, { root, count });
  }

  update(state, now) {
    const found = Object.values(state.concerns).sort((a, b) => a.order - b.order);
    keyed(this.root, found, (each) => each.key, makeConcern, (line, each) => fillConcern(line, each, now));
    const answered = Object.values(state.sources).filter((each) => each.state === "ok");
    const checked = answered.length ? Math.min(...answered.filter((each) => each.period_s < 30).map((each) => each.at_unix)) : 0;
    const looked = Number.isFinite(checked) && checked ? `checked ${ago(checked, now)}` : "nothing checked yet";
    const nodes = Object.keys(state.nodes).length;
    const well = `${nodes ? `All well: ${whole(nodes)} nodes, ${whole(state.running)} job${state.running === 1 ? "" : "s"} running` : "Nothing needs a hand"}; ${looked}.`;
    put(this.root, "data-empty", found.length ? null : answered.length ? well : "Nothing is known yet: no source has answered.");
    put(this.root, "data-well", found.length || !answered.length ? null : "yes");
    say(this.count, found.length ? `${found.length} thing${found.length === 1 ? "" : "s"}, the most urgent first; ${looked}` : looked);
  }
}
