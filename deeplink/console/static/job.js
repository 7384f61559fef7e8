// One job: how it is, what helps, where its ranks are, its course on one axis of time, and what befell it.

import { ago, command, el, figure, fillCommand, keyed, moment, names, put, say, span, whole } from "./dom.js";
import { link } from "./route.js";
import { Asker } from "./stream.js";
import { ring } from "./tiles.js";
import { Timeline } from "./timeline.js";

function fact(name) {
  return el("div", "fact", el("dt", "", name), el("dd"));
}

const FACTS = ["step", "rate", "loss", "ranks", "crossings", "repeated", "spares", "heard"];
const TITLES = {
  crossings: "leaf-to-leaf hops of the ring of ranks: ours against Slurm's own order by node name",
  repeated: "steps run again because the attempt before ended after its last checkpoint",
};

/** The command in a sentence that names one: "held: `scontrol release 12` lets it start". */
function commandIn(text) {
  return /`([^`]+)`/.exec(text)?.[1] || "";
}

function makeJob() {
  const card = el("article", "panel job");
  const head = el("header", "job-head", el("span", "job-id"), el("h3", "job-name"), el("a", "job-user"), el("span", "badge"), el("span", "job-attempt"));
  const facts = el("dl", "facts");
  for (const name of FACTS) {
    const made = fact(name);
    if (TITLES[name]) made.title = TITLES[name];
    facts.append(made);
  }
  const tries = el("section", "tries", el("h4"), el("ol"));
  const hurt = el("section", "befell", el("h4", "", "Incidents"), el("ul"));
  const remedy = el("p", "job-remedy", el("span"), command());
  card.append(head, el("div", "job-body", facts, el("p", "way"), remedy, el("p", "job-detail"), el("section", "course"), tries, hurt));
  return card;
}

/** The right end of a job's line: which attempt it is, or how an ended one ended. */
function tailText(job, now) {
  if (!job.watched) return job.slurm_state === "PENDING" ? job.pending_reason : "not watched";
  const attempt = job.attempts.length > 1 ? `attempt ${job.attempts.length} · ${job.attempt}` : job.attempt;
  return job.over ? `step ${whole(job.step)} · ${attempt} · ${ago(job.heard_unix, now)}` : attempt;
}

function valuesOf(job, now) {
  const crossings = job.ring === null ? "unknown" : `${job.ring}, in Slurm's order ${job.ring_stock}`;
  return {
    step: whole(job.step),
    rate: job.rate === null ? (job.over ? "ended" : "unknown") : `${figure(job.rate)} steps/s`,
    loss: job.loss === null ? "unknown" : typeof job.loss === "string" ? job.loss : figure(job.loss),
    ranks: job.world_size === null ? "unknown" : `${job.world_size} on ${job.nodes.length} node${job.nodes.length === 1 ? "" : "s"}`,
    crossings,
    repeated: whole(job.repeated_steps),
    spares: job.watched ? names(job.spares) || "none" : "unknown",
    heard: job.heard_unix ? ago(job.heard_unix, now) : "never",
  };
}

function fillJob(card, { job, incidents }, state, now, asked, plots) {
  const [head, body] = card.children;
  const [facts, way, remedy, detail, course, tries, hurt] = body.children;
  put(card, "data-mood", job.mood);
  put(card, "data-hue", job.hue);
  put(card, "data-bare", job.watched ? null : "yes");
  card.dataset.job = job.id;
  [job.label, job.name || "unnamed", job.user, job.word, tailText(job, now)].forEach((text, i) => say(head.children[i], text));
  put(head.children[2], "href", job.user ? link("jobs", "", { user: job.user }) : null);
  put(head.children[3], "data-mood", job.mood);
  facts.hidden = !job.watched;
  course.hidden = !job.watched;
  if (job.watched) {
    const values = valuesOf(job, now);
    FACTS.forEach((name, i) => {
      say(facts.children[i].children[1], values[name]);
      put(facts.children[i], "data-unknown", values[name] === "unknown" ? "yes" : null);
    });
    plots.course ||= new Timeline(course);
    plots.course.update(job, now, asked);
  }
  fillWay(way, job, state);
  say(remedy.children[0], job.remedy.replace(/`[^`]+` /, ""));
  fillCommand(remedy.children[1], commandIn(job.remedy));
  remedy.hidden = !job.remedy;
  say(detail, job.detail);
  detail.hidden = !detail.textContent;
  fillTries(tries, job, now);
  hurt.hidden = !incidents.length;
  keyed(hurt.children[1], incidents, (each) => each.id, () => el("li", "", el("a"), el("span")), (line, each) => {
    say(line.children[0], `${each.number} ${each.kind}${each.node ? ` on ${each.node}` : ""}`);
    put(line.children[0], "href", link("incidents", each.number));
    say(line.children[1], ` · ${each.outcome} · ${ago(each.began_unix, now)}`);
  });
}

function fillWay(way, job, state) {
  const print = JSON.stringify([job.nodes, job.nodes.map((name) => state.nodes[name]?.switch), job.watched]);
  if (way.dataset.print === print) return;
  way.dataset.print = print;
  if (!job.nodes.length) way.replaceChildren(job.slurm_state === "PENDING" ? "" : "nodes unknown");
  else if (job.watched && job.nodes.length <= 32) way.replaceChildren(el("span", "way-label", "ring"), ring(job, state));
  else way.replaceChildren(el("span", "way-label", "nodes"), names(job.nodes));
  way.hidden = !way.textContent;
}

function fillTries(tries, job, now) {
  tries.hidden = job.attempts.length < 2;
  say(tries.children[0], `${job.attempts.length} attempts`);
  keyed(tries.children[1], job.attempts, (each) => each.name, () => el("li"), (line, each) => {
    const reach = each.first_step === null ? "no step reported" : `steps ${whole(each.first_step)} to ${whole(each.last_step)}`;
    const end = each.ended_unix || now;
    say(line, `${each.name} · began ${moment(each.began_unix)} · ${each.ended_unix ? "ran" : "running for"} ${span(end - each.began_unix)} · ${reach} · ${names(each.nodes)}`);
  });
}

/** The page of the job that the URL names, asked for again with each news of it. */
export class JobPage {
  constructor(root) {
    Object.assign(this, { root, found: null, problem: "", plots: {}, card: null });
    this.asker = new Asker((found, problem) => {
      Object.assign(this, { found: found || (problem ? null : this.found), problem });
      this.draw();
    });
  }

  update(state, now, { name, asked }) {
    if (name !== this.name) Object.assign(this, { name, found: null, problem: "" });
    Object.assign(this, { state, now, asked });
    this.asker.ask(`jobs/${encodeURIComponent(name)}`, state.seq);
    this.draw();
  }

  draw() {
    put(this.root, "data-empty", this.found ? null : this.problem || "Asking …");
    if (!this.found) {
      this.root.replaceChildren();
      Object.assign(this, { card: null, plots: {} });
      return;
    }
    if (!this.card) {
      this.card = makeJob();
      const back = el("a", "back", "‹ all jobs");
      back.href = "#/jobs";
      this.where = el("a", "back", "on the fabric ›");
      this.root.replaceChildren(el("p", "crumbs", back, this.where), this.card);
    }
    put(this.where, "href", link("fabric", "", { job: this.found.job.id }));
    fillJob(this.card, this.found, this.state, this.now, this.asked, this.plots);
  }
}
