// Where the page is: a place, a name in it, and what is chosen there, all in the URL behind the #. So a link leads to
// what one sees, and the browser's back and forward work.

export const PLACES = ["now", "fabric", "jobs", "cache", "incidents"];

/** #/jobs/17?sort=step: the place, the name, and the choices. What cannot be understood is the place "now". */
export function read() {
  const [path, asked] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [place, name = ""] = path.split("/").map(decoded);
  return { place: PLACES.includes(place) ? place : "now", name, asked: new URLSearchParams(asked || "") };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return ""; // half of an escape
  }
}

export function link(place, name = "", asked = {}) {
  const chosen = new URLSearchParams(Object.entries(asked).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const text = String(chosen);
  return `#/${place}${name === "" ? "" : `/${encodeURIComponent(name)}`}${text ? `?${text}` : ""}`;
}

/** The same place with other choices; an empty value takes a choice back. Any choice but a page begins at the first. */
export function changed(change) {
  const { place, name, asked } = read();
  const chosen = { ...Object.fromEntries(asked), ...change };
  if (!("page" in change)) delete chosen.page;
  return link(place, name, chosen);
}

/** Chooses; `quietly` (each letter typed) leaves no step to come back to. */
export function choose(change, quietly = false) {
  const url = changed(change);
  if (url === location.hash) return;
  if (quietly) {
    history.replaceState(null, "", url);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = url;
}
