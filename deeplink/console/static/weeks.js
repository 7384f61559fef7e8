// What was found, in sum: the incidents of each week as bars, and what they cost whom.

import { el, figure, keyed, moment, put, say, whole } from "./dom.js";
import { changed } from "./route.js";

const WEEK_S = 604800;

function makeBar() {
  return el("a", "week", el("span", "week-bar", el("i", "week-bad"), el("i", "week-good")), el("span", "week-name"));
}

function day(unix) {
  return moment(unix).slice(5, 10);
}

export class Weeks {
  constructor(root) {
    this.bars = el("div", "weeks");
    this.cost = el("p", "costs");
    put(this.bars, "role", "group");
    put(this.bars, "aria-label", "Incidents by week; follow a link to see one week's alone");
    root.append(this.bars, this.cost);
    this.root = root;
  }

  /** `found`: the answer to what was asked; `since`: from when one week alone is chosen. */
  draw(found, since) {
    this.root.hidden = !found?.found;
    if (this.root.hidden) return;
    const most = Math.max(1, ...found.weeks.map(([, count]) => count));
    keyed(this.bars, found.weeks, ([monday]) => monday, makeBar, (bar, [monday, count, bad]) => {
      const on = Number(since) === monday;
      put(bar, "href", changed({ since: on ? "" : monday, until: on ? "" : monday + WEEK_S, within: "" }));
      put(bar, "aria-current", on ? "true" : null);
      put(bar, "aria-label", `week of ${day(monday)}: ${count} incident${count === 1 ? "" : "s"}, ${bad} without a good end`);
      put(bar, "title", `${count}, of them ${bad} without a good end`);
      const [worse, good] = bar.firstChild.children;
      for (const [part, share] of [[worse, bad], [good, count - bad]]) part.style.height = `${(share / most) * 100}%`;
      say(bar.children[1], day(monday));
    });
    this.bars.hidden = found.weeks.length < 2;
    const sum = found.costs.reduce((total, [, hours]) => total + hours, 0);
    const whose = found.costs.map(([user, hours]) => `${user || "unknown"} ${figure(hours)}`).join(", ");
    say(this.cost, sum ? `These ${whole(found.found)} cost ${figure(sum)} rank-hours, as far as that is known: ${whose}.` : "");
    this.cost.hidden = !sum;
  }
}
