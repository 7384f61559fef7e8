// The state of the cluster: one compressed snapshot, then the stream of what changes, for ever.

/** Folds a change into the state: changed fields of changed things, names of things gone. */
function apply(state, change) {
  Object.assign(state, change.meta);
  for (const [table, rows] of Object.entries(change.set)) {
    for (const [key, fields] of Object.entries(rows)) state[table][key] = { ...state[table][key], ...fields };
  }
  for (const [table, keys] of Object.entries(change.gone)) {
    for (const key of keys) delete state[table][key];
  }
}

export class Stream {
  /** `heard` is called at each event and when the console is lost or found. */
  constructor(heard) {
    Object.assign(this, { heard, state: null, offset: 0, lostAt: 0, at: 0, wait: 1, source: null });
    setInterval(() => this.watch(), 1000);
    this.begin();
  }

  now() {
    return Date.now() / 1000 + this.offset;
  }

  async begin() {
    this.at = Date.now();
    let after = "";
    try {
      const answer = await fetch("api/v1/snapshot", { signal: AbortSignal.timeout(20_000) });
      if (!answer.ok) throw new Error(answer.statusText);
      const state = await answer.json();
      after = state.id;
      this.took(state);
    } catch {
      return this.lose(true);
    }
    const source = new EventSource(`api/v1/events?after=${encodeURIComponent(after)}`);
    this.source = source;
    source.addEventListener("snapshot", (event) => this.took(JSON.parse(event.data)));
    source.addEventListener("change", (event) => {
      const change = JSON.parse(event.data);
      if (change.after !== this.state.seq) return this.again(0); // a gap: ask for the whole
      apply(this.state, change);
      return this.took(this.state);
    });
    // The browser tries again by itself after a lost connection, but not after a refusal.
    source.onerror = () => this.lose(source.readyState === EventSource.CLOSED);
  }

  took(state) {
    Object.assign(this, { state, at: Date.now(), lostAt: 0, wait: 1, offset: state.unix - Date.now() / 1000 });
    this.heard();
  }

  lose(refused) {
    this.lostAt ||= Date.now() / 1000;
    this.heard();
    if (refused) this.again(this.wait);
  }

  again(seconds) {
    this.source?.close();
    this.wait = Math.min(10, this.wait * 2);
    this.at = Date.now();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.begin(), seconds * 1000 * (0.5 + Math.random()));
  }

  /** A half-open connection (a laptop that slept) says nothing: after a while without a word, begin anew. */
  watch() {
    const patience = 3 * (this.state?.interval_s || 2) + 15;
    if (this.source && Date.now() - this.at > patience * 1000) {
      this.lose(false);
      this.again(0);
    }
  }
}

/** A question to the console that is asked again and again: only its newest answer counts, one is under way at most. */
export class Asker {
  constructor(took) {
    Object.assign(this, { took, url: "", busy: false, seq: 0 });
  }

  /** Asks, unless this was asked already at this `seq` of the state. */
  async ask(url, seq) {
    if (url === this.url && (seq === this.seq || this.busy)) return;
    Object.assign(this, { url, seq, busy: true });
    let body = null;
    let problem = "";
    try {
      const answer = await fetch(`api/v1/${url}`, { signal: AbortSignal.timeout(20_000) });
      body = await answer.json();
      if (!answer.ok) problem = [body.error, body.remedy].filter(Boolean).join(". ");
    } catch {
      problem = "The console does not answer.";
    }
    if (url !== this.url) return; // another question since
    this.busy = false;
    this.took(problem ? null : body, problem);
  }
}
