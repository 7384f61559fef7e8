// One field for everything that has a name: / focuses it, arrows go through what was found, Enter goes there.

import { el, keyed, put, say } from "./dom.js";

const PAUSE_MS = 120; // after the last letter

export class Search {
  constructor(field, list) {
    Object.assign(this, { field, list, chosen: -1, hits: [], asked: "" });
    addEventListener("keydown", (event) => this.anywhere(event));
    field.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.ask(), PAUSE_MS);
    });
    field.addEventListener("keydown", (event) => this.key(event));
    field.addEventListener("focus", () => this.draw(Boolean(this.hits.length && field.value)));
    field.addEventListener("blur", () => setTimeout(() => this.draw(false), 150)); // a click on a hit comes first
  }

  anywhere(event) {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    event.preventDefault();
    this.field.focus();
    this.field.select();
  }

  async ask() {
    const text = this.field.value.trim();
    this.asked = text;
    let hits = [];
    try {
      if (text) hits = (await (await fetch(`api/v1/search?text=${encodeURIComponent(text)}`)).json()).hits || [];
    } catch {
      return; // the page says itself that the console is lost
    }
    if (text !== this.asked) return; // another letter since
    Object.assign(this, { hits, chosen: hits.length ? 0 : -1 });
    this.draw(Boolean(text));
  }

  key(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && this.hits.length) {
      event.preventDefault();
      this.chosen = (this.chosen + step + this.hits.length) % this.hits.length;
      this.draw(true);
    } else if (event.key === "Enter") {
      clearTimeout(this.timer);
      if (this.field.value.trim() === this.asked) this.go(this.hits[this.chosen]);
      else this.ask().then(() => this.go(this.hits[this.chosen]));
    } else if (event.key === "Escape") {
      this.field.value = "";
      Object.assign(this, { hits: [], chosen: -1 });
      this.draw(false);
    }
  }

  go(hit) {
    if (!hit) return;
    location.hash = `#/${hit.place}`;
    this.draw(false);
    this.field.blur();
  }

  draw(open) {
    keyed(this.list, this.hits, (hit) => `${hit.what}/${hit.name}/${hit.place}`, (hit) => this.made(hit), (line, hit) => {
      const [what, name, about] = line.children;
      [[what, hit.what], [name, hit.name], [about, hit.about]].forEach(([part, text]) => say(part, text));
      put(line, "aria-selected", this.hits.indexOf(hit) === this.chosen ? "true" : "false");
      line.id = `hit-${this.hits.indexOf(hit)}`;
    });
    put(this.list, "data-empty", open && !this.hits.length ? "Nothing goes by that name" : null);
    this.list.hidden = !open;
    put(this.field, "aria-expanded", open ? "true" : "false");
    put(this.field, "aria-activedescendant", open && this.chosen >= 0 ? `hit-${this.chosen}` : null);
  }

  made(hit) {
    const line = el("li", "hit", el("span", "hit-what"), el("span", "hit-name"), el("span", "hit-about"));
    line.setAttribute("role", "option");
    line.addEventListener("mousedown", () => this.go(hit));
    return line;
  }
}
