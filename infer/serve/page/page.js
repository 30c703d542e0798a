// The page of locret-serve. Everything that comes from files, models and clients is put into the page as text, never
// as HTML; addresses are relative, so that the page works behind any path.
"use strict";

const POLL_MS = 2000, READING_MS = 200;
const state = { contexts: [], selected: null, model: "", key: sessionStorage.getItem("key") || "",
  turns: [], asking: null, following: null, lost: false, keyless: false };
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
  const headers = { ...(options.headers || {}) }, key = state.key;
  if (state.key) headers.Authorization = `Bearer ${state.key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (failure) {
    if (failure.name === "AbortError") throw failure;
    throw new Refused(0, "The server does not answer; is it still running?");
  }
  if (response.status === 401 && (state.key !== key || await askForKey())) return call(path, options);
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
const at = (name) => `v1/contexts/${encodeURIComponent(name)}`;

// Server-sent events over fetch: EventSource cannot send a key.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const broken = (failure) => {
    throw failure?.name === "AbortError" ? failure
      : new Refused(0, "The connection broke; is the server still running? Ask again for the rest.");
  };
  let held = "", ended = false;
  for (;;) {
    const { value, done } = await reader.read().catch(broken);
    if (done) return ended || broken();
    held += value;
    const parts = held.split(/\r?\n\r?\n/);
    held = parts.pop();
    for (const part of parts) {
      const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      ended ||= data[0] === "[DONE]";
      if (data.length && data[0] !== "[DONE]") yield JSON.parse(data.join("\n"));
    }
  }
}

// What a user does clears the warning before; what the page does by itself must not.
async function attempt(action, { quiet = false } = {}) {
  if (!quiet) {
    warn("");
    state.keyless = false;
  }
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

function showDialog({ title, text = "", label = "", value = "", type = "text", yes }) {
  const box = $("dialog"), input = $("dialog-input");
  $("dialog-title").textContent = title;
  $("dialog-text").textContent = text;
  $("dialog-label").textContent = label;
  $("dialog-label").hidden = input.hidden = !label;
  $("dialog-yes").textContent = yes;
  Object.assign(input, { type, value, required: Boolean(label), disabled: !label });
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
  if (state.keyless) return false;
  const refused = state.key ? "That key was not accepted. " : "";
  keyWanted ??= dialog({ title: "API key",
    text: `${refused}This server asks for a key. It is kept until this tab is closed.`, label: "Key", type: "password", yes: "Use it" }).then((key) => {
    keyWanted = null;
    if (!key) {
      state.keyless = true;  // until the user does something: the page's own looking must not ask again and again
      return false;
    }
    state.key = key;
    sessionStorage.setItem("key", key);
    return true;
  });
  return keyWanted;
}

// ---- Memory ------------------------------------------------------------------------------------------------------

const PART_NAMES = { answers: "contexts, questions and answers", working: "set aside for chunks and files" };

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
  $("memory-text").textContent = `Memory: ${bytes(used)} in use of ${bytes(planned)} promised at the start`;
  const rows = memory.resident ? [...words, `the whole process ${bytes(memory.resident)}`] : words;
  $("memory-parts").replaceChildren(...rows.map((text) => make("li", {}, text)));
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
  map.setAttribute("aria-label", `From the beginning to the end of the text; most is kept: ${best.join(", ")}.`);
  shares.forEach((share, nth) => {
    const bar = document.createElementNS(SVG, "rect");
    const height = share / most;
    const box = { x: nth, y: 1 - height, width: 0.9, height };
    for (const [name, value] of Object.entries(box)) bar.setAttribute(name, value);
    map.append(bar);
  });
  return map;
}

// ---- The list of contexts ----------------------------------------------------------------------------------------

function summary(context) {
  if (context.state === "waiting") return "waits until others have been read";
  if (context.state === "reading") return `being read: ${readSoFar(context)}`;
  if (context.state !== "ready") return `cannot be asked: ${context.state}`;
  return `ready, ${number(context.tokens)} tokens`;
}

const going = ({ state: now }) => now === "waiting" || now === "reading";

function readSoFar({ progress, tokens }) {
  const share = progress?.total ? `${percent(Math.min(1, progress.bytes / progress.total))}, ` : "";
  return `${share}${number(tokens)} tokens`;
}

// Elements are kept and only their text changes: what has the focus must not be taken away by a refresh.
function showContexts() {
  const list = $("contexts"), old = new Map([...list.children].map((item) => [item.dataset.name, item]));
  const items = state.contexts.map((context) => old.get(context.name) || contextItem(context.name));
  items.forEach((item, nth) => {
    const context = state.contexts[nth], [button] = item.children;
    button.lastChild.textContent = summary(context);
    button.setAttribute("aria-current", String(context.name === state.selected));
    if (list.children[nth] !== item) list.insertBefore(item, list.children[nth] || null);
  });
  while (list.children.length > items.length) list.lastChild.remove();
  $("empty").hidden = items.length > 0;
  $("choose").hidden = Boolean(state.selected) || !items.length;
}

function contextItem(name) {
  const item = make("li", {}, make("button", { type: "button", onclick: () => select(name, true) },
    make("span", {}, name), make("span", { class: "small" })));
  item.dataset.name = name;
  return item;
}

async function refresh() {
  const [contexts, memory] = await Promise.all([json("v1/contexts"), json("v1/memory")]);
  state.contexts = contexts.data;
  showContexts();
  showMemory(memory);
  if (state.selected && !state.contexts.some((context) => context.name === state.selected)) select(null);
}

async function poll() {
  let wait = POLL_MS;
  if (document.visibilityState === "visible") {
    try {
      await refresh();
      if (state.lost) { state.lost = false; warn(""); }
    } catch (failure) {
      warn(failure.message);
      state.lost = true;
      wait = 5 * POLL_MS;
    }
  }
  setTimeout(poll, wait);
}

// ---- One context -------------------------------------------------------------------------------------------------

const find = (name) => state.contexts.find((context) => context.name === name);

async function select(name, focus = false) {
  state.following?.abort();
  state.asking?.abort();
  state.selected = name;
  history.replaceState(null, "", name ? `#${encodeURIComponent(name)}` : "#");
  $("context").hidden = !name;
  state.turns = [];
  $("answers").replaceChildren();
  $("kept").replaceChildren();
  showContexts();
  if (!name) return;
  $("context-title").textContent = name;
  showFacts(find(name) || { name, state: "reading" });
  if (focus) $("context-title").focus();
  await follow(name);
}

function showFacts(context) {
  const rows = { "Read from": context.source, "Tokens read": context.tokens && number(context.tokens),
    "Of the text": context.summary || (context.units && `${number(context.units)} units per layer and KV head so far`),
    "File": context.bytes && bytes(context.bytes),
    "For other programs": context.model && `model ${context.model} at ${new URL("v1", document.baseURI)}`,
    "What is wrong": context.message };
  $("facts").replaceChildren(...Object.entries(rows).filter(([, value]) => value).flatMap(([name, value]) =>
    [make("dt", {}, name), make("dd", {}, String(value))]));
  const ready = context.state === "ready";
  for (const id of ["send", "question"]) $(id).disabled = !ready;
  $("delete").textContent = going(context) ? "Stop and delete" : "Delete";
  $("progress").hidden = !going(context);
}

// Watches a context while it is read; then shows what was kept.
async function follow(name) {
  const leave = state.following = new AbortController();
  await attempt(async () => {
    let context = await json(at(name), { signal: leave.signal });
    showFacts(context);
    if (going(context)) {
      while (going(context)) {
        showProgress(context);
        await new Promise((resolve) => setTimeout(resolve, READING_MS));
        context = await json(at(name), { signal: leave.signal });
      }
      await refresh();
      showFacts(context);
      say(context.state === "ready" ? `${name} has been read.` : "");
    }
    $("kept").replaceChildren();
    if (context.state === "ready") $("kept").append(...keptParts(context));
  }, { quiet: true });
}

function showProgress(context) {
  const bar = $("bar"), { progress } = context;
  showFacts(context);
  if (!progress) return;
  if (progress.total) bar.value = Math.min(1, progress.bytes / progress.total); else bar.removeAttribute("value");
  $("progress-text").textContent = context.state === "waiting" ? "It waits until others have been read."
    : readSoFar(context);
}

function keptParts(context) {
  const map = keptMap(context.kept);
  return map ? [make("h3", {}, "What is kept of the text, from its beginning to its end"), map] : [];
}

// ---- Questions ---------------------------------------------------------------------------------------------------

async function ask(event) {
  event.preventDefault();
  const question = $("question").value.trim(), name = state.selected;
  if (!question || !name || state.asking) return;
  const leave = state.asking = new AbortController();
  const answer = make("p", { class: "answer", "aria-live": "polite", "aria-busy": "true" });
  const facts = make("p", { class: "small" });
  const item = make("li", {}, make("p", { class: "question" }, question), answer, facts);
  const turns = [...state.turns, { role: "user", content: question }];
  $("answers").append(item);
  $("question").value = "";
  $("stop").hidden = false;
  $("send").disabled = true;
  const told = await attempt(() => stream(name, turns, answer, leave.signal));
  answer.removeAttribute("aria-busy");
  state.asking = null;
  $("stop").hidden = true;
  $("send").disabled = find(name)?.state !== "ready";
  if (leave.signal.aborted || (!told && answer.textContent)) facts.textContent = "Broken off.";
  else if (!told) {
    item.remove();
    $("question").value ||= question;
  } else {
    if (state.selected === name) state.turns = [...turns, { role: "assistant", content: answer.textContent }];
    say("");
    showAnswerFacts(facts, told);
  }
}

async function stream(name, messages, answer, signal) {
  const start = performance.now();
  let first = null, usage = null, finish = null;
  const response = await call("v1/chat/completions", { method: "POST", signal,
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model: state.model, context: name, messages,
      stream: true, stream_options: { include_usage: true } }) });
  for await (const event of events(response)) {
    if (event.error) throw new Refused(500, event.error.message);
    const text = event.choices?.[0]?.delta?.content;
    if (text) {
      first ??= performance.now() - start;
      answer.textContent += text;
    }
    usage = event.usage || usage;
    finish = event.choices?.[0]?.finish_reason || finish;
  }
  return { first, usage, cut: finish === "length", seconds: (performance.now() - start) / 1000 };
}

function showAnswerFacts(facts, { first, usage, cut, seconds }) {
  const units = usage?.prompt_tokens_details?.units;
  facts.textContent = [first === null ? null : `first words after ${(first / 1000).toFixed(2)} s`,
    `${seconds.toFixed(2)} s in all`,
    usage && `${number(usage.completion_tokens)} tokens`,
    cut && "cut off there: the longest answer that there is room for"].filter(Boolean).join(", ");
  facts.title = units ? `from ${number(units)} units for ${number(usage.prompt_tokens)} tokens` : "";
}

// ---- Files and other actions -------------------------------------------------------------------------------------

// A name that the server takes, made of a file's.
const nameOf = (file) =>
  file.name.replace(/\.[^.]*$/, "").replace(/[^A-Za-z0-9._-]+/g, "-").replace(/^[^A-Za-z0-9]+/, "").slice(0, 60);

// The name itself, or with the first number behind it that is free.
function free(name) {
  let found = name;
  for (let nth = 2; find(found); nth += 1) found = `${name}-${nth}`;
  return found;
}

// What the server converts goes as a form; a text goes as it is, of any length.
const DOCUMENT = /\.(pdf|epub|docx|html?)$/i;

// Each file becomes a context of its own; what is wrong with one does not keep the others from being read.
async function upload(files) {
  const typed = $("name").value.trim(), several = files.length > 1, failed = [];
  let shown = false;
  $("upload").reset();
  warn("");
  state.keyless = false;
  for (const [nth, file] of files.entries()) {
    const doing = DOCUMENT.test(file.name) ? "Sending and converting" : "Sending";
    say(several ? `${doing} ${file.name}, ${nth + 1} of ${files.length}.` : `${doing} ${file.name}.`);
    const own = free(nameOf(file) || "text");
    let made = null;
    try {
      made = await send(file, (several && typed ? `${typed}-${own}`.slice(0, 100) : typed) || own);
    } catch (failure) {
      failed.push(`${file.name}: ${failure.message}`);
      warn(failed.join("\n"));
    }
    await attempt(refresh, { quiet: true });
    if (made && !shown) select(made.id || made.name, true);
    shown ||= Boolean(made);
  }
  say("");
}

async function send(file, wanted) {
  let begin;
  try {
    begin = new Uint8Array(await file.slice(0, 4096).arrayBuffer());
  } catch {
    throw new Refused(0, "It cannot be read here; a folder's files have to be chosen themselves.");
  }
  if (!file.size) throw new Refused(0, "It is empty.");
  if (begin.includes(0) && !DOCUMENT.test(file.name)) {
    throw new Refused(0, "It is no text, and no PDF, EPUB, Word or HTML document.");
  }
  const form = new FormData(), query = new URLSearchParams({ name: wanted, source: file.name.slice(0, 200) });
  form.append("purpose", "user_data");
  form.append("file", file, wanted === nameOf(file) ? file.name : `${wanted}${file.name.match(/\.[^.]*$/)}`);
  const text = { method: "POST", headers: { "Content-Type": "text/plain; charset=utf-8" }, body: file };
  return DOCUMENT.test(file.name) ? json("v1/files", { method: "POST", body: form })
    : json(`v1/contexts?${query}`, text);
}

async function remove() {
  const name = state.selected;
  const sure = await dialog({ title: `Delete ${name}?`, text: "Its file is removed from the server.", yes: "Delete" });
  if (sure === null) return;
  await attempt(async () => {
    await call(at(name), { method: "DELETE" });
    await select(null);
    await refresh();
    say(`${name} has been deleted.`);
    $("file").focus();
  });
}

// ---- Beginning ---------------------------------------------------------------------------------------------------

function listen() {
  $("upload").addEventListener("submit", (event) => {
    event.preventDefault();
    const files = [...$("file").files];
    if (files.length) upload(files); else warn("Choose a file first.");
  });
  addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dragging"); });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dragging"); });
  addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dragging");
    const files = [...event.dataTransfer.files];
    if (files.length) upload(files);
  });
  $("ask").addEventListener("submit", ask);
  $("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!state.asking) $("ask").requestSubmit();
  });
  $("stop").addEventListener("click", () => state.asking?.abort());
  $("delete").addEventListener("click", remove);
}

async function begin() {
  listen();
  await attempt(async () => {
    const models = await json("v1/models");
    state.model = models.data[0].id;
    $("model").textContent = state.model;
    await refresh();
    const name = decodeURIComponent(location.hash.slice(1));
    if (find(name)) select(name);
  });
  setTimeout(poll, POLL_MS);
}

begin();
