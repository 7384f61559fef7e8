// All jobs: one page of them at a time, sorted and filtered by the console, each row a link to the job's own page.

import { ago, chips, el, figure, keyed, names, pager, put, say, whole } from "./dom.js";
import { JobPage } from "./job.js";
import { changed, choose, link } from "./route.js";
import { Asker } from "./stream.js";

// Name of what is sorted by, title, and whether numbers stand in it.
const COLUMNS = [["id", "job"], ["name", "name"], ["user", "user"], ["state", "state"], ["nodes", "nodes", "num"], ["step", "step", "num"], ["rate", "steps/s", "num"], ["loss", "loss", "num"], ["heard", "heard", "num"]];

function makeTable() {
  const head = el("tr");
  for (const [key, title, kind] of COLUMNS) {
    const cell = el("th", kind || "", el("a", "sort", title));
    cell.scope = "col";
    cell.dataset.sort = key;
    head.append(cell);
  }
  const table = el("table", "jobs-table", el("caption", "unseen", "Jobs, what needs somebody first unless sorted otherwise"), el("thead", "", head), el("tbody"));
  return el("div", "panel scroll", table);
}

function makeRow() {
  const id = el("th", "", el("a", "row-link"));
  id.scope = "row";
  const cells = COLUMNS.slice(1).map(([, , kind]) => el("td", kind || ""));
  cells[1].append(el("a"));
  cells[2].append(el("span", "badge"), el("span", "row-why"));
  return el("tr", "", id, ...cells);
}

function fillRow(row, job, now) {
  const [id, name, user, state, nodes, step, rate, loss, heard] = row.children;
  put(row, "data-hue", job.hue || null);
  put(row, "data-job", job.id);
  say(id.firstChild, job.label);
  put(id.firstChild, "href", link("jobs", job.id));
  say(name, job.name || "unnamed");
  say(user.firstChild, job.user);
  put(user.firstChild, "href", job.user ? changed({ user: job.user }) : null);
  say(state.children[0], job.word);
  put(state.children[0], "data-mood", job.mood);
  say(state.children[1], job.word === "held" || job.word === "pending" ? job.pending_reason : "");
  say(nodes, job.nodes.length || "–");
  put(nodes, "title", job.nodes.length ? names(job.nodes) : null);
  const unknown = job.watched ? "unknown" : "–";
  say(step, job.step === null ? unknown : whole(job.step));
  say(rate, job.rate === null ? (job.over ? "–" : unknown) : figure(job.rate));
  say(loss, job.loss === null ? unknown : typeof job.loss === "string" ? job.loss : figure(job.loss));
  say(heard, job.heard_unix ? ago(job.heard_unix, now) : "–");
}

export class Jobs {
  constructor(list, page, count) {
    Object.assign(this, { list, pageRoot: page, count, found: null, problem: "" });
    this.job = new JobPage(page);
    this.field = el("input", "filter-text");
    Object.assign(this.field, { type: "search", placeholder: "name, user or number", maxLength: 200 });
    put(this.field, "aria-label", "Jobs whose name, user or number has this in it");
    this.field.addEventListener("input", () => choose({ text: this.field.value }, true));
    this.states = el("div", "chips");
    this.who = el("div", "chips");
    this.table = makeTable();
    this.pages = el("nav", "pager");
    put(this.pages, "aria-label", "Pages of jobs");
    list.append(el("div", "filters", this.field, this.who, this.states), this.table, this.pages);
    this.asker = new Asker((found, problem) => {
      Object.assign(this, { found: found || (problem ? null : this.found), problem });
      this.draw();
    });
  }

  update(state, now, { name, asked }) {
    Object.assign(this, { state, now, asked });
    this.list.hidden = name !== "";
    this.pageRoot.hidden = name === "";
    say(this.count, `${whole(state.jobs_known)} known, ${state.running} running`);
    if (name !== "") return this.job.update(state, now, { name, asked });
    if (document.activeElement !== this.field) this.field.value = asked.get("text") || "";
    this.asker.ask(`jobs?${asked}`, state.seq);
    return this.draw();
  }

  draw() {
    const asked = this.asked;
    const on = asked.get("state") || "";
    const counts = Object.entries(this.found?.states || {});
    if (on && !this.found?.states?.[on]) counts.push([on, 0]);
    chips(this.states, "Jobs in this state alone", counts.map(([word, count]) => ({ text: word, count: whole(count), on: word === on, href: changed({ state: word === on ? "" : word }) })));
    const who = ["user", "node"].filter((key) => asked.get(key));
    chips(this.who, "What is chosen; follow a link to take it back", who.map((key) => ({ text: `${key} ${asked.get(key)} ✕`, on: true, href: changed({ [key]: "" }) })));
    this.who.hidden = !who.length;
    for (const cell of this.table.querySelectorAll("th[data-sort]")) this.drawSort(cell, asked);
    const rows = this.found?.jobs || [];
    const none = this.problem || (this.found ? "No job fits." : "Asking …");
    put(this.table, "data-empty", rows.length ? null : this.state.jobs_known || this.problem || !this.found ? none : "No jobs on record. `deeplink sbatch train.sh` submits one that is watched.");
    keyed(this.table.querySelector("tbody"), rows, (job) => job.id, makeRow, (row, job) => fillRow(row, job, this.now));
    pager(this.pages, this.found, (page) => changed({ page }));
  }

  drawSort(cell, asked) {
    const mine = asked.get("sort") === cell.dataset.sort;
    const turned = asked.get("turned") === "1";
    put(cell, "aria-sort", mine ? (turned ? "descending" : "ascending") : null);
    // First the way that is asked for most, then the other one, then as it was.
    const first = cell.classList.contains("num") ? "1" : "";
    const next = !mine ? { sort: cell.dataset.sort, turned: first } : turned === (first === "1") ? { sort: cell.dataset.sort, turned: first ? "" : "1" } : { sort: "", turned: "" };
    put(cell.firstChild, "href", changed(next));
  }
}
