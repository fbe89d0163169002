// The page's only script: it keeps the parts with data-live up to date, and watches a key. The page works without it.
"use strict";

const EVERY_MS = 3000;
const pause = document.getElementById("pause");
const live = () => [...document.querySelectorAll("[data-live][id]")];
let paused = false;

// Marks each table that has more columns to the right.
function hint() {
  for (const e of document.querySelectorAll(".scroll")) {
    e.classList.toggle("cut", e.scrollWidth > e.clientWidth + e.scrollLeft + 1);
  }
}
document.addEventListener("scroll", hint, { capture: true, passive: true });
window.addEventListener("resize", hint);
hint();

const plain = (e) => e.innerHTML.replaceAll('class="scroll cut"', 'class="scroll"');

function replace(old, fresh) {
  if (plain(old) === plain(fresh) || old.contains(document.activeElement)) return;
  const scrolled = [...old.querySelectorAll(".scroll")].map((e) => e.scrollLeft);
  old.replaceChildren(...[...fresh.childNodes].map((node) => document.importNode(node, true)));
  [...old.querySelectorAll(".scroll")].forEach((e, i) => { e.scrollLeft = scrolled[i] || 0; });
  hint();
}

const parts = (of) => [...of.querySelectorAll("main [data-live][id]")].map((e) => e.id).join(" ");

// Updates the page. Returns null, or the server's answer if it is not a page, such as "503 Service Unavailable".
async function refresh() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" }, credentials: "same-origin" });
  if (answer.status === 401) { location.reload(); return null; }
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  // A 404 is a page of ours if the shown object is gone, and a proxy's if the service is.
  if (!fresh.getElementById("main") || (!answer.ok && answer.status !== 404)) {
    return `${answer.status} ${answer.statusText}`.trim();
  }
  document.title = fresh.title;
  // A new part, such as the first query, has no place in the document yet.
  if (parts(document) !== parts(fresh)) replace(document.getElementById("main"), fresh.getElementById("main"));
  for (const old of live()) {
    const other = fresh.getElementById(old.id);
    if (other) replace(old, other);
  }
  return null;
}

function notRenewed(why) {
  const stale = document.getElementById("stale");
  const before = stale.querySelector(".not-renewed");
  if (before && before.dataset.why === why) return;
  const said = document.createElement("div");
  said.className = "fault error not-renewed";
  said.dataset.why = why;
  said.textContent = `The server of this page has ${why} since ${new Date().toLocaleTimeString()}. ` +
    "The page shows the last known state, and keeps retrying.";
  stale.replaceChildren(said);
}

async function keepUp() {
  for (;;) {
    await new Promise((done) => setTimeout(done, EVERY_MS));
    if (paused || document.hidden) continue;
    try {
      const error = await refresh();
      if (error) notRenewed(`answered "${error}"`);
      if (!paused) pause.textContent = error ? "An error; trying again" : "Pause updates";
    } catch {
      pause.textContent = "No answer; trying again";
      notRenewed("not answered");
    }
  }
}

if (pause && live().length) {
  pause.hidden = false;
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Updates are paused" : "Pause updates";
  });
  keepUp();
}

// -- the watch of a key ------------------------------------------------------------------------

const MOST_WATCHED = 200;
const button = document.getElementById("watch");
if (button) {
  const state = document.getElementById("watch-state");
  const table = document.getElementById("watched");
  const rows = table.tBodies[0];
  let source = null;

  const stop = (text) => {
    if (source) source.close();
    source = null;
    button.setAttribute("aria-pressed", "false");
    button.textContent = "Watch";
    state.textContent = text;
  };

  const add = (cells) => {
    const row = rows.insertRow(0);
    cells.forEach((text, i) => {
      const cell = row.insertCell();
      cell.textContent = text;
      if (i === 0) cell.className = "n";
    });
    while (rows.rows.length > MOST_WATCHED) rows.deleteRow(-1);
  };

  button.addEventListener("click", () => {
    if (source) { stop("Stopped."); return; }
    source = new EventSource(button.dataset.watch);
    button.setAttribute("aria-pressed", "true");
    button.textContent = "Stop";
    state.textContent = "Connecting …";
    source.onopen = () => { state.textContent = "Watching: changes show here as versions complete."; };
    source.onerror = () => { if (source && source.readyState === EventSource.CLOSED) stop("The watch has ended."); };
    source.addEventListener("problem", (event) => stop(JSON.parse(event.data).problem));
    source.addEventListener("change", (event) => {
      const change = JSON.parse(event.data);
      table.hidden = false;
      if (change.more) add([change.version, `and ${change.more} more`, "", ""]);
      for (const row of change.rows) add([change.version, row.change, row.before, row.after]);
      state.textContent = `Version ${change.version} has changed the key.`;
    });
  });
}
