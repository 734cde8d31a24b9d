"use strict";

// The server tells which runs changed; the report of the selected ones is fetched anew when one of these did.

const at = (id) => document.getElementById(id);
const runs = new Map(); // name -> what the server says of it
const items = new Map(); // name -> its place in the list
const given = new URLSearchParams(location.search).getAll("run");
const chosen = new Set(given);
const followed = new Set();
const MOST = 12; // runs that are selected by themselves
let shownFor = ""; // what the report on the page is of
let shownOf = ""; // the same, whatever their state
let fetching = null;

at("follow").checked = given.length === 0;

const stream = new EventSource("events");
stream.onopen = () => link("live", "live");
stream.onerror = () =>
  stream.readyState === EventSource.CLOSED
    ? link("lost", "pfed watch has ended; start it again and open the address that it prints")
    : link("lost", "connection lost, trying again …");
stream.onmessage = (message) => {
  const told = JSON.parse(message.data);
  for (const name of told.gone) forget(name);
  for (const run of told.runs) update(run);
  follow();
  arrange();
  refresh();
};

function link(kind, text) {
  at("link").className = kind;
  if (at("link").textContent !== text) at("link").textContent = text;
}

function forget(name) {
  runs.delete(name);
  chosen.delete(name);
  followed.delete(name);
  items.get(name).remove();
  items.delete(name);
}

function update(run) {
  const before = runs.get(run.run);
  runs.set(run.run, run);
  if (!items.has(run.run)) items.set(run.run, make(run.run));
  const item = items.get(run.run);
  const put = (name, text) => {
    const element = item.querySelector(`.${name}`);
    if (element.textContent !== text) element.textContent = text;
  };
  const state = run.stopping ? "stopping" : run.state;
  put("state", state);
  item.querySelector(".state").className = `state ${run.state}`;
  for (const name of ["about", "score", "accuracy", "sent", "per_round", "rest"]) put(name, run[name]);
  put("round", `${run.round} of ${run.rounds}`);
  const progress = item.querySelector("progress");
  progress.max = Math.max(1, run.rounds);
  progress.value = run.round;
  const stop = item.querySelector(".stop");
  stop.hidden = run.state !== "running";
  stop.disabled = run.stopping;
  if (before && before.state !== run.state) say(`${run.run} is ${run.state} after round ${run.round}.`);
  else if (before && !before.stopping && run.stopping) say(`${run.run} ends after the round that it is in.`);
}

function make(name) {
  const item = at("row").content.firstElementChild.cloneNode(true);
  item.querySelector(".run").textContent = name;
  item.querySelector("progress").setAttribute("aria-label", `rounds of ${name}`);
  const box = item.querySelector("input");
  box.checked = chosen.has(name);
  box.addEventListener("change", () => {
    at("follow").checked = false;
    if (box.checked) chosen.add(name);
    else chosen.delete(name);
    refresh();
  });
  const stop = item.querySelector(".stop");
  stop.setAttribute("aria-label", `Stop ${name}`);
  stop.addEventListener("click", () => ask(name));
  return item;
}

function say(text) {
  at("said").textContent = text;
}

// Runs that one which goes on is to be compared with: its settings under other methods and seeds, the newest of each.
function kin(run, sorted) {
  const seen = new Set([run.about]);
  const fits = ({ setting, state, about }) =>
    setting === run.setting && state === "complete" && !seen.has(about) && seen.add(about);
  return sorted.filter(fits);
}

// While nobody chooses, the runs that go on are selected, with their kin, and stay so; where none did, the newest.
function follow() {
  if (!at("follow").checked) return;
  const sorted = order();
  for (const run of sorted) {
    if (run.state !== "running" || followed.has(run.run)) continue;
    for (const { run: name } of [run, ...kin(run, sorted)]) followed.add(name);
  }
  const these = followed.size ? sorted.filter((run) => followed.has(run.run)) : sorted.slice(0, 1);
  chosen.clear();
  for (const run of these.slice(0, MOST)) chosen.add(run.run);
  for (const [name, item] of items) item.querySelector("input").checked = chosen.has(name);
}

function order() {
  const going = (run) => run.state === "running" || run.state === "starting";
  return [...runs.values()].sort((a, b) => going(b) - going(a) || b.created - a.created || (a.run < b.run ? -1 : 1));
}

function arrange() {
  const list = at("runs");
  const focused = document.activeElement;
  order().forEach(({ run }, place) => {
    const item = items.get(run);
    if (list.children[place] !== item) list.insertBefore(item, list.children[place] ?? null);
  });
  if (focused && focused !== document.activeElement && list.contains(focused)) focused.focus({ preventScroll: true });
  at("filtering").hidden = runs.size <= 8;
  at("none").hidden = runs.size > 0;
  filter();
}

function filter() {
  const wanted = at("filtering").hidden ? "" : at("filter").value.trim().toLowerCase();
  for (const [name, item] of items) {
    const text = `${name} ${runs.get(name).about} ${runs.get(name).state}`.toLowerCase();
    item.hidden = !text.includes(wanted);
  }
}

at("filter").addEventListener("input", filter);
at("follow").addEventListener("change", () => {
  follow();
  refresh();
});
at("clear").addEventListener("click", () => {
  at("follow").checked = false;
  chosen.clear();
  for (const item of items.values()) item.querySelector("input").checked = false;
  refresh();
});

function ask(name) {
  const dialog = at("confirm");
  at("question").textContent = `Stop ${name}?`;
  at("again").textContent = `pfed resume ${name}`;
  dialog.returnValue = "";
  dialog.onclose = () => {
    if (dialog.returnValue === "stop") stop(name);
  };
  dialog.showModal();
}

async function stop(name) {
  try {
    const answer = await fetch(`stop?${new URLSearchParams({ run: name })}`, { method: "POST" });
    if (!answer.ok) say((await answer.json()).error);
  } catch {
    say(`${name} was not stopped: the connection is lost.`);
  }
}

// The report of the selected runs, fetched when it is not of their present state; one request at a time.
async function refresh() {
  // The oldest first, so that a method keeps its colour when others join.
  const these = order().filter((run) => chosen.has(run.run)).sort((a, b) => a.created - b.created);
  const names = these.map((run) => run.run);
  const query = new URLSearchParams(names.map((name) => ["run", name]));
  const address = at("follow").checked || !names.length ? location.pathname : `?${query}`;
  history.replaceState(null, "", address);
  const wanted = JSON.stringify(names.map((name) => [name, runs.get(name).version]));
  if (!names.length) {
    fetching?.abort();
    fetching = null;
    shownFor = shownOf = wanted;
    at("report").replaceChildren();
    tell(runs.size ? "Select runs to see their report." : "");
    return;
  }
  if (wanted === shownFor || (fetching && fetching.names === String(query))) return;
  fetching?.abort();
  const own = (fetching = new AbortController());
  own.names = String(query);
  try {
    const first = shownOf !== String(query); // a report of some rounds before is better than a blank page
    if (first) tell("Drawing the report …");
    const answer = await fetch(`report?${query}${first ? "&older=1" : ""}`, { signal: own.signal });
    const text = await answer.text();
    if (!answer.ok) throw new Error(text);
    show(new DOMParser().parseFromString(text, "text/html"), query);
    shownOf = String(query);
    shownFor = first ? "" : wanted;
  } catch (error) {
    if (error.name === "AbortError") return;
    tell(`The report can't be drawn: ${error.message}`);
    shownFor = wanted;
  }
  fetching = null;
  refresh();
}

function tell(text, query) {
  at("drawn").textContent = text;
  at("save").hidden = !query;
  if (query) at("save").href = `report?${query}&save=1`;
}

function show(page, query) {
  const report = at("report");
  const before = remember(report);
  change(report, page.querySelector("main"));
  report.dispatchEvent(new Event("report", { bubbles: true })); // for the report's own script
  restore(report, before);
  const time = new Date().toLocaleTimeString();
  tell(`Report of ${chosen.size === 1 ? "1 run" : `${chosen.size} runs`}, drawn at ${time}.`, query);
}

// The controls of a report under names by which they are found again: what they are, what they say, the how manieth.
function controls(report) {
  const found = new Map();
  for (const control of report.querySelectorAll("a, button, input, select, summary")) {
    const name = `${control.nodeName} ${control.type ?? ""} ${control.textContent}`;
    let again = 0;
    while (found.has(`${name} ${again}`)) again++;
    found.set(`${name} ${again}`, control);
  }
  return found;
}

const title = (details) => details.querySelector("summary")?.textContent;
const sorting = (table) => table.querySelector("th[aria-sort]");
const finder = (table) => table.closest(".scroll")?.previousElementSibling?.querySelector("input[type=search]");

function enter(control, value) {
  control.value = value;
  control.dispatchEvent(new Event("input", { bubbles: true }));
}

// What someone has done to a report: opened, sorted, filtered, moved, focused.
function remember(report) {
  return {
    open: new Set([...report.querySelectorAll("details[open]")].map(title)),
    tables: [...report.querySelectorAll("table")].map((table) => ({
      place: sorting(table)?.cellIndex,
      way: sorting(table)?.getAttribute("aria-sort"),
      words: finder(table)?.value,
    })),
    sliders: [...report.querySelectorAll("input[type=range]")].map((slider) => slider.value),
    focus: [...controls(report)].find(([, control]) => control === document.activeElement)?.[0],
  };
}

function restore(report, before) {
  for (const details of report.querySelectorAll("details")) details.open = before.open.has(title(details));
  [...report.querySelectorAll("table")].forEach((table, i) => {
    const { place, way, words } = before.tables[i] ?? {};
    const header = table.tHead?.rows[0].cells[place];
    for (let clicks = 0; way && clicks < 2 && header?.getAttribute("aria-sort") !== way; clicks++) {
      header?.querySelector("button")?.click();
    }
    if (words && finder(table)) enter(finder(table), words);
  });
  report.querySelectorAll("input[type=range]").forEach((slider, i) => {
    if (before.sliders[i] && slider.value !== before.sliders[i]) enter(slider, before.sliders[i]);
  });
  const control = controls(report).get(before.focus);
  if (control && control !== document.activeElement) control.focus({ preventScroll: true });
}

// Make the children of one element those of another, and leave alone what is the same: it keeps focus and place.
function change(old, meant) {
  let place = old.firstChild;
  for (const child of [...meant.childNodes]) {
    let found = place;
    while (found && !alike(found, child)) found = found.nextSibling;
    if (!found) {
      old.insertBefore(document.adoptNode(child), place);
      continue;
    }
    while (place !== found) place = discard(place);
    place = found.nextSibling;
    if (found.isEqualNode(child)) continue;
    if (found.nodeType !== Node.ELEMENT_NODE) found.data = child.data;
    else if (found.nodeName === "svg") found.replaceWith(document.adoptNode(child));
    else {
      adorn(found, child);
      change(found, child);
    }
  }
  while (place) place = discard(place);
}

function discard(node) {
  const next = node.nextSibling;
  node.remove();
  return next;
}

function alike(one, other) {
  const heading = /^(H[1-6]|DETAILS)$/;
  if (one.nodeName !== other.nodeName || one.id !== other.id) return false;
  if (!heading.test(one.nodeName)) return true;
  const words = (node) => (node.querySelector("summary") ?? node).textContent;
  return words(one) === words(other);
}

function adorn(old, meant) {
  for (const { name } of [...old.attributes]) {
    if (!meant.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of meant.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
}
