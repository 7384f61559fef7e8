// A card per job: how it is, where its ranks are, and its loss across all attempts.

import { Curve } from "./curve.js";
import { ago, el, figure, keyed, moment, names, put, say, span, whole } from "./dom.js";
import { ring } from "./fabric.js";

const curves = new WeakMap();

/** Word and mood of a job: what its launcher says first, then what Slurm says. */
export function condition(job) {
  const byPhase = {
    starting: ["starting", "calm"],
    running: ["running", "good"],
    recovering: ["recovering", "warn"],
    stranded: ["stranded – needs the watchdog", "bad"],
    succeeded: ["succeeded", "done"],
    failed: ["failed", "bad"],
  };
  if (job.remedy) return ["held", "warn"];
  if (byPhase[job.phase]) return byPhase[job.phase];
  if (!job.slurm_state) return ["unknown", "unknown"];
  const word = job.slurm_state.toLowerCase().replaceAll("_", " ");
  if (["FAILED", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "TIMEOUT"].includes(job.slurm_state)) return [word, "bad"];
  if (["COMPLETED", "CANCELLED"].includes(job.slurm_state)) return [word, "done"];
  return [word, job.slurm_state === "RUNNING" ? "good" : "calm"];
}

function fact(name) {
  return el("div", "fact", el("dt", "", name), el("dd"));
}

const FACTS = ["step", "rate", "loss", "ranks", "crossings", "repeated", "spares", "heard"];
const TITLES = {
  crossings: "leaf-to-leaf hops of the ring of ranks: ours against Slurm's own order by node name",
  repeated: "steps run again because the attempt before ended after its last checkpoint",
};

const OVER = new Set(["succeeded", "failed"]);

/** Whether a job has ended: it is shown as one line until someone opens it. */
function over(job) {
  return OVER.has(job.phase) || ["done", "bad"].includes(condition(job)[1]) && job.phase !== "stranded";
}

function makeJob(job) {
  const card = el("details", "job");
  card.open = !over(job);
  const head = el("summary", "", el("span", "job-id"), el("h3", "job-name"), el("span", "job-user"), el("span", "badge"), el("span", "job-attempt"));
  const facts = el("dl", "facts");
  for (const name of FACTS) {
    const made = fact(name);
    if (TITLES[name]) made.title = TITLES[name];
    facts.append(made);
  }
  const tries = el("details", "tries", el("summary"), el("ol"));
  card.append(head, el("div", "job-body", facts, el("div", "plot"), el("p", "way"), el("p", "job-remedy"), el("p", "job-detail"), tries));
  return card;
}

/** The right end of a job's line: which attempt it is, or how an ended one ended. */
function tailText(job, now) {
  if (!job.watched) return job.slurm_state === "PENDING" ? job.pending_reason : "not watched";
  const attempt = job.attempts.length > 1 ? `attempt ${job.attempts.length} · ${job.attempt}` : job.attempt;
  return over(job) ? `step ${whole(job.step)} · ${attempt} · ${ago(job.heard_unix, now)}` : attempt;
}

function valuesOf(job, now) {
  const crossings = job.ring === null ? "unknown" : `${job.ring}, in Slurm's order ${job.ring_stock}`;
  return {
    step: whole(job.step),
    rate: job.rate === null ? (over(job) ? "ended" : "unknown") : `${figure(job.rate)} steps/s`,
    loss: job.loss === null ? "unknown" : typeof job.loss === "string" ? job.loss : figure(job.loss),
    ranks: job.world_size === null ? "unknown" : `${job.world_size} on ${job.nodes.length} node${job.nodes.length === 1 ? "" : "s"}`,
    crossings,
    repeated: whole(job.repeated_steps),
    spares: job.watched ? names(job.spares) || "none" : "unknown",
    heard: job.heard_unix ? ago(job.heard_unix, now) : "never",
  };
}

function fillJob(card, job, state, now) {
  const [head, body] = card.children;
  const [facts, plot, way, remedy, detail, tries] = body.children;
  const [word, mood] = condition(job);
  put(card, "data-mood", mood);
  put(card, "data-hue", job.hue);
  put(card, "data-bare", job.watched ? null : "yes");
  card.dataset.job = job.id;
  [job.label, job.name || "unnamed", job.user, word, tailText(job, now)].forEach((text, i) => say(head.children[i], text));
  put(head.children[3], "data-mood", mood);
  facts.hidden = !job.watched;
  plot.hidden = !job.watched;
  if (job.watched) {
    const values = valuesOf(job, now);
    FACTS.forEach((name, i) => {
      say(facts.children[i].children[1], values[name]);
      put(facts.children[i], "data-unknown", values[name] === "unknown" ? "yes" : null);
    });
    if (!curves.has(card)) curves.set(card, new Curve(plot));
    curves.get(card).update(job, state.curves[job.id] || { metric: "loss", points: [], version: 0 });
  }
  fillWay(way, job, state);
  say(remedy, job.remedy);
  remedy.hidden = !job.remedy;
  say(detail, job.detail);
  detail.hidden = !detail.textContent;
  fillTries(tries, job, now);
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

export class Jobs {
  constructor(root, count, fabricRoot) {
    Object.assign(this, { root, count });
    // Pointing at a job shows where it is: every other node steps back.
    const point = (job) => {
      for (const tile of fabricRoot.querySelectorAll(".tile")) tile.classList.toggle("aside", job !== null && tile.dataset.job !== job);
    };
    for (const event of ["pointerover", "focusin"]) root.addEventListener(event, (at) => point(at.target.closest(".job")?.dataset.job ?? null));
    for (const event of ["pointerleave", "focusout"]) root.addEventListener(event, () => point(null));
  }

  update(state, now) {
    const order = { bad: 0, warn: 1, good: 2, unknown: 3, calm: 4 };
    const rank = (job) => (over(job) ? 9 : order[condition(job)[1]]);
    const jobs = Object.values(state.jobs).sort((a, b) => rank(a) - rank(b) || b.id - a.id);
    keyed(this.root, jobs, (job) => job.id, makeJob, (card, job) => fillJob(card, job, state, now));
    put(this.root, "data-empty", jobs.length ? null : "No jobs on record. `deeplink sbatch train.sh` submits one that is watched.");
    const watched = jobs.filter((job) => job.watched).length;
    const many = state.jobs_known > jobs.length ? `${jobs.length} of ${whole(state.jobs_known)}` : jobs.length;
    say(this.count, jobs.length ? `${many}, ${watched} watched` : "");
  }
}
