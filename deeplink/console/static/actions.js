// What an operator has done: asked again with the exact commands, done by the watchdog, and written down beside it.

import { ago, command, el, fillCommand, keyed, put, say } from "./dom.js";

const KEPT = "deeplink-operator"; // an operator's token, in this tab alone
const AGAIN_MS = 5_000;
const WORDS = {
  acknowledge: "Acknowledge", reopen: "Open again", drain: "Drain", resume: "Resume", requeue: "Requeue", release: "Release",
  cancel: "Cancel", warm: "Warm", evict: "Evict", "pause-watchdog": "Pause the watchdog", "resume-watchdog": "Resume the watchdog",
};
const MAY_FORCE = { resume: "Resume it although it is not ours, or not well", evict: "Also what cannot be had again" };

function token() {
  return sessionStorage.getItem(KEPT) || "";
}

/** Asks the console; what came, and whether it is well. */
async function ask(path, body) {
  const headers = token() ? { "deeplink-token": token() } : {};
  try {
    const post = { method: "POST", headers: { ...headers, "content-type": "application/json" }, body: JSON.stringify(body) };
    const answer = await fetch(`api/v1/${path}`, { ...(body ? post : { headers }), signal: AbortSignal.timeout(80_000) });
    return { ok: answer.ok, status: answer.status, ...(await answer.json()) };
  } catch {
    return { ok: false, error: "The console does not answer.", remedy: "" };
  }
}

function button(text, act, kind = "") {
  const made = el("button", `act ${kind}`, text);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

function field(label, attributes) {
  const input = el("input");
  for (const [name, value] of Object.entries(attributes)) put(input, name, value);
  return { input, box: el("label", "act-field", el("span", "", label), input) };
}

/** One question on top of the page; focus goes in, Escape ends it, and focus comes back. */
class Question {
  constructor() {
    this.box = el("dialog", "act-box");
    put(this.box, "aria-labelledby", "act-title");
    document.body.append(this.box);
  }

  show(title, ...parts) {
    const head = el("h2", "", title);
    head.id = "act-title";
    this.box.replaceChildren(head, ...parts);
    if (!this.box.open) this.box.showModal();
  }

  close() {
    this.box.close();
  }
}

export class Actions {
  /** `head`: where it says who one is. */
  constructor(head) {
    Object.assign(this, { role: { role: "viewer", why: "" }, question: new Question(), panels: new Map(), done: 0 });
    this.who = button("", () => this.signIn(), "who");
    head.append(this.who);
    this.learn();
  }

  async learn() {
    const role = await ask("role");
    if (role.ok) this.role = role;
    const operator = this.role.role === "operator";
    say(this.who, operator ? `${this.role.name}, operator` : "Viewer");
    put(this.who, "data-role", this.role.role);
    if (operator && this.role.paused) say(this.who, `${this.role.name}, operator · watchdog paused`);
    this.redraw();
  }

  /** Who one is; an operator finds the watchdog's own actions here, too. */
  signIn() {
    const close = button("Close", () => this.question.close());
    if (this.role.role === "operator") {
      const verb = this.role.paused ? "resume-watchdog" : "pause-watchdog";
      const paused = this.role.paused ? `The watchdog is paused (${this.role.paused}): it begins nothing of its own.` : "";
      const state = this.role.watchdog ? `No watchdog does anything: ${this.role.watchdog}` : paused || "The watchdog takes requests.";
      const leave = button("Be a viewer again", () => this.become(""));
      this.question.show(this.who.textContent, el("p", "", state), el("p", "act-row", button(WORDS[verb], () => this.ask(verb, "watchdog")), token() ? leave : "", close));
      return;
    }
    const { input, box } = field("Operator's token", { type: "text", class: "secret", autocomplete: "off", spellcheck: "false", maxlength: 512 });
    const why = el("p", "act-problem", [this.role.why, this.role.watchdog].filter(Boolean).join(" "));
    put(why, "role", "alert");
    const enter = async () => {
      await this.become(input.value.trim());
      if (this.role.role === "operator") this.question.close();
      else say(why, [this.role.why, this.role.watchdog].filter(Boolean).join(" "));
    };
    input.addEventListener("keydown", (event) => event.key === "Enter" && enter());
    const how = el("p", "", "`deeplink watch --mint NAME --operator` makes one. It stays in this tab.");
    this.question.show("Act as an operator", box, how, why, el("p", "act-row", button("Enter", enter, "strong"), close));
    input.focus();
  }

  async become(text) {
    if (text) sessionStorage.setItem(KEPT, text);
    else sessionStorage.removeItem(KEPT);
    await this.learn();
    if (text && this.role.role !== "operator") sessionStorage.removeItem(KEPT);
    if (!text) this.question.close();
  }

  /** What can be done with what the URL names, and what was done with it. */
  draw(where, state, now) {
    Object.assign(this, { where, state, now });
    const node = where.asked.get("node") || "";
    const incident = Object.values(state.incidents).find((each) => each.id === where.name || String(each.number) === where.name);
    const job = state.jobs?.[where.name]?.label || where.name;
    const nodeVerbs = (name) => (name && state.nodes[name] ? [["drain", name], ["resume", name]] : []);
    const set = where.asked.get("dataset") || "";
    this.panel("inspector", where.place === "fabric" ? nodeVerbs(node) : []);
    this.panel("job-page", where.place === "jobs" && where.name ? [["requeue", job], ["release", job], ["cancel", job]] : []);
    this.panel("datasets", where.place === "cache" && set ? [["warm", set], ["evict", set]] : []);
    const names = incident ? [incident.id] : where.name ? [where.name] : [];
    const ofIncident = names.flatMap((name) => [["acknowledge", name], ["reopen", name]]);
    this.panel("incident-list", where.place === "incidents" && where.name ? [...ofIncident, ...nodeVerbs(incident?.node)] : []);
  }

  redraw() {
    if (this.where) this.draw(this.where, this.state, this.now);
  }

  panel(anchor, verbs) {
    let made = this.panels.get(anchor);
    if (!made && !verbs.length) return;
    if (!made) {
      const box = el("section", "actions", el("div", "act-row"), el("ul", "act-log"));
      put(box, "aria-label", "Actions, and what was done");
      document.getElementById(anchor).after(box);
      this.panels.set(anchor, (made = { box, asked: "", at: 0, log: [] }));
    }
    const shown = this.role.role === "operator" ? verbs : [];
    const several = new Set(verbs.map(([, target]) => target)).size > 1;
    keyed(made.box.children[0], shown, (each) => each.join(" "), ([verb, target]) => button(several ? `${WORDS[verb]} ${target}` : WORDS[verb], () => this.ask(verb, target)), () => {});
    this.list(made, [...new Set(verbs.map(([, target]) => target))]);
    made.box.hidden = !shown.length && !made.log.length;
  }

  async list(made, targets) {
    keyed(made.box.children[1], made.log, (each) => each.request, () => el("li", "", el("span"), el("span")), (line, each) => {
      put(line, "data-outcome", each.outcome || "open");
      const via = each.via ? ` (through ${each.via})` : "";
      say(line.children[0], `${WORDS[each.verb] || each.verb} ${each.target}: ${each.outcome || "under way"}, ${each.person}${via} ${ago(each.asked_unix, this.now)}: ${each.why}`);
      say(line.children[1], each.outcome === "done" ? "" : ` · ${each.result}`);
    });
    const asked = `${targets.join(" ")} ${this.done}`;
    if (!targets.length) Object.assign(made, { log: [], asked });
    if (!targets.length || (made.asked === asked && Date.now() - made.at < AGAIN_MS)) return;
    Object.assign(made, { asked, at: Date.now(), log: made.asked.startsWith(targets.join(" ")) ? made.log : [] });
    const found = await ask(`actions?${new URLSearchParams(targets.map((target) => ["target", target]))}`);
    if (found.ok && made.asked === asked) made.log = found.actions.slice(0, 10);
    this.redraw();
  }

  /** Asks why, shows what would run, and has it done only after that. */
  ask(verb, target) {
    const why = field("Why", { type: "text", maxlength: 200, autocomplete: "off" });
    const nodes = field("Onto nodes", { type: "text", maxlength: 1000, placeholder: "n[0-7]" });
    const force = field(MAY_FORCE[verb], { type: "checkbox" });
    const out = el("div", "act-plan");
    put(out, "aria-live", "polite");
    const words = () => ({ verb, target, why: why.input.value.trim(), nodes: verb === "warm" ? nodes.input.value.trim() : "", force: force.input.checked });
    const go = button("Show the commands", () => this.plan(words(), out), "strong");
    for (const each of [why, nodes, force]) each.input.addEventListener("input", () => out.replaceChildren());
    const extras = [...(verb === "warm" ? [nodes.box] : []), ...(verb in MAY_FORCE ? [force.box] : [])];
    const title = target === "watchdog" ? WORDS[verb] : `${WORDS[verb]} ${target}`;
    this.question.show(title, why.box, ...extras, el("p", "act-row", go, button("Close", () => this.question.close())), out);
    why.input.focus();
  }

  async plan(words, out) {
    if (!words.why) {
      out.replaceChildren(el("p", "act-problem", "Say why: it is written down with what is done."));
      return;
    }
    out.replaceChildren(el("p", "", "Asking …"));
    const plan = await ask("actions/plan", words);
    if (!plan.ok) this.tell(out, plan.error, plan.remedy, plan.commands);
    else if (plan.refused) this.tell(out, plan.refused, plan.remedy, this.role.acting ? [] : plan.commands);
    else {
      this.tell(out, "", "", plan.commands);
      for (const line of plan.remarks) out.append(el("p", "", line));
      if (plan.undo) out.append(el("p", "", `Taken back by: ${WORDS[plan.undo]}.`));
      out.append(el("p", "act-row", button(`${WORDS[words.verb]} now`, () => this.act({ ...words, saw: plan.saw, request: plan.request }, out), "strong")));
    }
  }

  /** The same request again and again until it has ended: it is done once. */
  async act(words, out) {
    out.replaceChildren(el("p", "", "The watchdog does it …"));
    let found = await ask("actions", words);
    const begun = found.ok;
    while ((found.ok ? !found.outcome : begun && found.status === 429) && this.question.box.open) {
      await new Promise((wake) => setTimeout(wake, 2_000));
      found = await ask("actions", words);
    }
    this.done += 1;
    if (!found.ok) this.tell(out, found.error, found.remedy, found.commands);
    else out.replaceChildren(el("p", found.outcome === "done" ? "act-done" : "act-problem", `${found.outcome || "under way"}: ${found.result}`));
    await this.learn();
  }

  tell(out, problem, remedy, commands = []) {
    const said = el("p", "act-problem", [problem, remedy].filter(Boolean).join(". "));
    if (problem) put(said, "role", "alert");
    const lines = commands.map((line) => {
      const made = command();
      fillCommand(made, line);
      return made;
    });
    if (problem && commands.length) lines.unshift(el("p", "", "By hand:"));
    out.replaceChildren(...(problem ? [said] : []), ...lines);
  }
}
