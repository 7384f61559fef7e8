// Small hands for the page: make elements, change only what changed, say numbers and ages the same way everywhere.

const SVG = "http://www.w3.org/2000/svg";

export function el(tag, className = "", ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Sets the text only when it differs, so that a selection or a screen reader is not disturbed. */
export function say(target, text) {
  const wanted = String(text);
  if (target.textContent !== wanted) target.textContent = wanted;
  return target;
}

export function put(target, name, value) {
  if (value === null || value === undefined || value === false) target.removeAttribute(name);
  else if (target.getAttribute(name) !== String(value)) target.setAttribute(name, value);
  return target;
}

/** Makes `parent`'s children match `items` by key, keeping every element that stays (no flicker, focus kept). */
export function keyed(parent, items, key, make, update) {
  const have = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = have.get(name);
    if (!child) {
      child = make(item);
      child.dataset.key = name;
    }
    have.delete(name);
    if (child === at) at = at.nextElementSibling;
    else parent.insertBefore(child, at);
    update(child, item);
  }
  for (const left of have.values()) left.remove();
}

/** One shape per state, so that colour is never the only sign. */
const SHAPES = {
  busy: [["circle", { cx: 8, cy: 8, r: 5, class: "fill" }]],
  idle: [["circle", { cx: 8, cy: 8, r: 4.5 }]],
  draining: [["circle", { cx: 8, cy: 8, r: 4.5 }], ["path", { d: "M8 3.5a4.5 4.5 0 0 1 0 9z", class: "fill" }]],
  drained: [["rect", { x: 3.5, y: 3.5, width: 9, height: 9 }], ["path", { d: "M8 3.5h4.5v9H8z", class: "fill" }]],
  silent: [["path", { d: "M8 2.5 14 13.5H2z" }], ["path", { d: "M8 6.5v3.2M8 11.4v.6" }]],
  down: [["path", { d: "M3.5 3.5l9 9M12.5 3.5l-9 9", class: "heavy" }]],
  maint: [["rect", { x: 3.5, y: 3.5, width: 9, height: 9 }], ["path", { d: "M6.5 6v4M9.5 6v4" }]],
  unknown: [["circle", { cx: 8, cy: 8, r: 5, "stroke-dasharray": "2 2" }]],
};

export function glyph(state) {
  const parts = (SHAPES[state] || SHAPES.unknown).map(([tag, attributes]) => svg(tag, attributes));
  return svg("svg", { class: `glyph s-${state}`, viewBox: "0 0 16 16", "aria-hidden": "true" }, ...parts);
}

export function setGlyph(holder, state) {
  if (holder.dataset.glyph === state) return;
  holder.dataset.glyph = state;
  holder.replaceChildren(glyph(state));
}

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function whole(value) {
  return value === null || value === undefined ? "unknown" : WHOLE.format(value);
}

export function bytes(value) {
  if (value === null || value === undefined) return "unknown";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit && size < 10 ? size.toFixed(1) : Math.round(size)} ${units[unit]}`;
}

/** A share in per cent, never rounded up to 100: what lacks a byte is not whole. */
export function percent(part, all) {
  if (part === null || part === undefined) return "unknown";
  if (!all) return "–";
  return part >= all ? "100 %" : `${Math.min((part / all) * 100, 99.9).toFixed(1)} %`;
}

export function figure(value) {
  if (value === null || value === undefined) return "unknown";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10000 || size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/** Seconds as people say them: 0.4 s, 12 s, 3 min, 5 h, 2 d. */
export function span(seconds) {
  const s = Math.max(0, seconds);
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 99.5) return `${Math.round(s)} s`;
  if (s < 5940) return `${Math.round(s / 60)} min`;
  if (s < 172800) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86400)} d`;
}

export function ago(unix, now) {
  if (!unix) return "never";
  const s = now - unix;
  return s < 1.5 ? "now" : `${span(Math.max(1, s)).replace(/\.\d/, "")} ago`;
}

/** The same for a fact that is no longer refreshed: always a length of time, never "now". */
export function old(unix, now) {
  return unix ? `${span(Math.max(1, now - unix)).replace(/\.\d/, "")} ago` : "never";
}

export function moment(unix) {
  if (!unix) return "–";
  return new Date(unix * 1000).toISOString().replace("T", " ").replace(/\.\d+Z$/, " UTC");
}

/** n[0-3,7] for long lists of names; short ones as they are. */
export function names(list) {
  if (list.length <= 4) return list.join(" ");
  const groups = new Map();
  for (const name of list) {
    const [, stem, digits] = /^(.*?)(\d*)$/.exec(name);
    if (!groups.has(stem)) groups.set(stem, []);
    groups.get(stem).push(digits);
  }
  return [...groups].map(([stem, digits]) => fold(stem, digits)).join(" ");
}

function fold(stem, digits) {
  const numbered = digits.filter(Boolean).sort((a, b) => a - b || a.length - b.length);
  if (numbered.length < 2) return stem + (numbered[0] || "");
  const runs = [];
  for (const text of numbered) {
    const last = runs.at(-1);
    if (last && Number(text) === Number(last[1]) + 1 && text.length >= last[1].length) last[1] = text;
    else runs.push([text, text]);
  }
  return `${stem}[${runs.map(([from, to]) => (from === to ? from : `${from}-${to}`)).join(",")}]`;
}

/** A command to copy: its text, and the button that puts it into the clipboard. */
export function command() {
  const text = el("code", "command-text");
  const copy = el("button", "copy", "Copy");
  copy.type = "button";
  copy.addEventListener("click", async () => {
    let good = true;
    try {
      await navigator.clipboard.writeText(text.textContent);
    } catch {
      getSelection().selectAllChildren(text); // no secure context: the browser keeps its clipboard to itself
      good = document.execCommand("copy");
    }
    copy.textContent = good ? "Copied" : "Select and copy";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  return el("span", "command", text, copy);
}

export function fillCommand(made, text) {
  const shown = text && document.body.dataset.demo !== undefined ? `# demo: ${text}` : text; // pasted, a shell passes it over
  say(made.children[0], shown);
  put(made.children[1], "aria-label", `Copy: ${shown}`);
  made.hidden = !text;
}

/** Choices of a filter as links: each is its own URL, the chosen one says so to a screen reader, too. */
export function chips(box, label, items) {
  put(box, "role", "group");
  put(box, "aria-label", label);
  keyed(box, items, (item) => item.text, () => el("a", "chip", el("span"), el("span", "chip-count")), (made, item) => {
    say(made.children[0], item.text);
    say(made.children[1], item.count ?? "");
    put(made, "href", item.href);
    put(made, "aria-current", item.on ? "true" : null);
  });
}

/** Links to the pages before and after. */
export function pager(box, found, href) {
  const { page = 1, pages = 1 } = found || {};
  box.hidden = pages < 2;
  const items = [["‹ Back", page > 1 ? page - 1 : null], [`page ${whole(page)} of ${whole(pages)}`, null], ["Next ›", page < pages ? page + 1 : null]];
  keyed(box, items, (item, i) => item[0].replace(/\d.*/, ""), (item) => el(item[0].startsWith("page") ? "span" : "a", "page"), (made, [text, to]) => {
    say(made, text);
    put(made, "href", to ? href(to) : null);
    put(made, "aria-disabled", made.tagName === "A" && !to ? "true" : null);
  });
}
