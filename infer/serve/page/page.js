// The page of locret-serve. Everything that comes from files, models and clients is put into the page as text, never
// as HTML; addresses are relative, so that the page works behind any path.
"use strict";

const POLL_MS = 2000;
const state = { contexts: [], selected: null, ticked: new Set(), model: "", key: sessionStorage.getItem("key") || "",
  asking: null, following: null, uploads: new Map() };
const $ = (id) => document.getElementById(id);

// ---- Building the page -------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.max(0, Math.floor(Math.log2(Math.max(count, 1)) / 10)));
  const value = count / 1024 ** power;
  return `${value >= 100 || power === 0 ? Math.round(value) : value.toFixed(1)} ${units[power]}`;
}

const number = (count) => Number(count).toLocaleString("en");
const percent = (share) => `${Math.round(100 * share)}%`;

function say(text) { $("notice").textContent = text; }
function warn(text) { $("alert").textContent = text; }

// ---- Talking to the server ---------------------------------------------------------------------------------------

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function call(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (state.key) headers.Authorization = `Bearer ${state.key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (failure) {
    if (failure.name === "AbortError") throw failure;
    throw new Refused(0, "The server does not answer; is it still running?");
  }
  if (response.status === 401 && await askForKey()) return call(path, options);
  if (!response.ok) throw new Refused(response.status, await reason(response));
  return response;
}

async function reason(response) {
  try {
    const body = await response.json();
    return String(body.error.message);
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

const json = async (path, options) => (await call(path, options)).json();
const post = (path, body, more = {}) =>
  json(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), ...more });
const at = (name) => `v1/contexts/${encodeURIComponent(name)}`;

// Server-sent events over fetch: EventSource cannot send a key.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split(/\r?\n\r?\n/);
    held = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      if (data.length && data[0] !== "[DONE]") yield JSON.parse(data.join("\n"));
    }
  }
}

async function attempt(action) {
  warn("");
  try {
    return await action();
  } catch (failure) {
    if (failure.name !== "AbortError") warn(failure.message);
    return undefined;
  }
}

// ---- Dialogs -----------------------------------------------------------------------------------------------------

let dialogBusy = Promise.resolve();

// Returns what was typed ("" where nothing is asked for), or null if it was left.
function dialog(words) {
  const shown = dialogBusy.then(() => showDialog(words));
  dialogBusy = shown;
  return shown;
}

function showDialog({ title, text = "", label = "", value = "", type = "text", yes, min = null, max = null }) {
  const box = $("dialog"), input = $("dialog-input");
  $("dialog-title").textContent = title;
  $("dialog-text").textContent = text;
  $("dialog-label").textContent = label;
  $("dialog-label").hidden = input.hidden = !label;
  $("dialog-yes").textContent = yes;
  Object.assign(input, { type, value, required: Boolean(label), disabled: !label });
  for (const [name, bound] of Object.entries({ min, max })) {
    if (bound === null) input.removeAttribute(name); else input.setAttribute(name, bound);
  }
  box.returnValue = "";
  box.showModal();
  if (label) input.select();
  return new Promise((resolve) => box.addEventListener("close", () => {
    const typed = input.value;
    input.value = "";  // a key must not stay in the page
    resolve(box.returnValue === "yes" ? typed : null);
  }, { once: true }));
}

let keyWanted = null;

// Several requests may be refused at once; they share one dialog.
function askForKey() {
  keyWanted ??= dialog({ title: "API key", text: "This server asks for a key. It is kept until this tab is closed.",
    label: "Key", type: "password", yes: "Use it" }).then((key) => {
    keyWanted = null;
    if (!key) return false;
    state.key = key;
    sessionStorage.setItem("key", key);
    return true;
  });
  return keyWanted;
}

// ---- Memory ------------------------------------------------------------------------------------------------------

const PART_NAMES = { weights: "weights", pages: "answers", readers: "reading", prefixes: "loaded contexts" };

function showMemory(memory) {
  const parts = Object.entries(memory.parts);
  const planned = parts.reduce((sum, [, part]) => sum + part.planned, 0);
  const used = parts.reduce((sum, [, part]) => sum + part.used, 0);
  const bar = $("memory");
  if (bar.children.length !== parts.length) bar.replaceChildren(...parts.map(() => make("div", {}, make("div"))));
  const words = parts.map(([name, part], nth) => {
    const text = `${PART_NAMES[name] || name} ${bytes(part.used)} of ${bytes(part.planned)}`;
    const segment = bar.children[nth];
    segment.style.width = `${planned ? 100 * part.planned / planned : 0}%`;
    segment.title = text;
    segment.firstChild.style.width = percent(part.planned ? Math.min(1, part.used / part.planned) : 0);
    return text;
  });
  bar.setAttribute("aria-label", `Memory: ${words.join(", ")}`);
  const resident = memory.resident ? `; the whole process ${bytes(memory.resident)}` : "";
  $("memory-text").textContent =
    `Memory promised at the start: ${bytes(planned)}; in use: ${bytes(used)} (${words.join(", ")})${resident}`;
}

// ---- What is kept ------------------------------------------------------------------------------------------------

const SVG = "http://www.w3.org/2000/svg";

// A bar for each stretch of the text: how much of it the heads hold. Returns null where nothing is known.
function keptMap(shares) {
  if (!shares || !shares.length) return null;
  const most = Math.max(...shares) || 1;
  const map = document.createElementNS(SVG, "svg");
  map.setAttribute("class", "map");
  map.setAttribute("viewBox", `0 0 ${shares.length} 1`);
  map.setAttribute("preserveAspectRatio", "none");
  map.setAttribute("role", "img");
  const best = shares.map((share, nth) => [share, nth]).sort((a, b) => b[0] - a[0]).slice(0, 3)
    .map(([share, nth]) => `${percent(share)} at ${percent(nth / shares.length)}`);
  map.setAttribute("aria-label", `What is kept from the beginning to the end of the text. Most is kept: ${best.join(", ")}.`);
  shares.forEach((share, nth) => {
    const bar = document.createElementNS(SVG, "rect");
    const height = share / most;
    for (const [name, value] of Object.entries({ x: nth, y: 1 - height, width: 0.9, height })) bar.setAttribute(name, value);
    map.append(bar);
  });
  return map;
}

function passageList(passages) {
  return make("ol", { class: "passages", "aria-label": "Passages that most heads hold" }, ...passages.map((one) => make("li", {},
    make("span", { class: "small" }, `token ${number(one.position)}, ${percent(one.share)} of heads: `), one.text)));
}
