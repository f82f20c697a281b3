// Claims the link, then executes the commands one at a time: see ../server.py.

const GIVE_UP = 20_000; // milliseconds without a reply
const RETRY = 1_000;

const workers = new Map();
const files = new Map(); // fetched once; the browser may keep a Blob on disk
let base; // the secret path
let last = 0; // number of the last command
let over = false;
let wasHidden = false;

const at = (id) => document.getElementById(id);
const sleep = (ms) => new Promise((done) => setTimeout(done, ms));
const inside = (name) => new URL(base + name, location.origin).href;

function status(words, kind = "") {
  at("status").textContent = words;
  at("status").className = kind;
}

function notice(words) {
  const line = document.createElement("li");
  line.textContent = words;
  at("notices").append(line);
}

// -- talking to the command

async function retry(request) {
  for (let since = Date.now(); ; await sleep(RETRY)) {
    try {
      return await request();
    } catch (error) {
      if (over || Date.now() - since > GIVE_UP) throw error;
    }
  }
}

async function post(name, body) {
  const text = JSON.stringify(body);
  return retry(() => fetch(inside(name), { method: "POST", body: text }));
}

async function work() {
  while (!over) {
    const response = await retry(() => fetch(inside(`next?after=${last}`)));
    if (response.status === 204) continue;
    if (!response.ok) throw new Error(`it answered ${response.status}`);
    const command = await response.json();
    if (command.id <= last) continue;
    last = command.id;
    if (command.do === "end") finish(command.say);
    else answer(command); // not awaited: polling continues and shows that this page is alive
  }
}

async function answer(command) {
  wasHidden = document.hidden;
  if (command.say) status(command.say);
  if (command.done !== undefined) at("progress").value = command.done;
  const reply = { id: command.id };
  try {
    reply.ok = await DOES[command.do](command);
  } catch (error) {
    reply.error = String(error?.message ?? error);
  }
  reply.hidden = wasHidden || document.hidden;
  await post("answer", reply).catch(() => {}); // the poll fails too
}

function finish(words, kind = "") {
  over = true;
  dismiss();
  files.clear();
  lock?.release();
  for (const id of ["progress", "keep", "notices"]) at(id).hidden = true;
  status(words, kind);
}

function dismiss() {
  for (const each of workers.values()) each.terminate();
  workers.clear();
}

// -- the commands

async function blob(name, words) {
  if (!files.has(name)) {
    const response = await fetch(inside(name));
    if (!response.ok) throw new Error(`the file could not be fetched: ${response.status}`);
    const size = Number(response.headers.get("Content-Length"));
    const parts = [];
    let length = 0;
    for (const reader = response.body.getReader(); ; ) {
      const { done, value } = await reader.read();
      if (done) break;
      parts.push(value);
      length += value.length;
      status(`${words}: ${(length / 1e6).toFixed(0)} of ${(size / 1e6).toFixed(0)} MB fetched`);
    }
    files.set(name, new Blob(parts));
    status(words);
  }
  return files.get(name);
}

function ask(worker, command) {
  return new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => ("error" in data ? reject(new Error(data.error)) : resolve(data.ok));
    worker.onerror = (event) => {
      event.preventDefault();
      reject(new Error(`the measuring worker failed: ${event.message ?? "it could not be started"}`));
    };
    worker.postMessage(command);
  });
}

function worker(name) {
  if (!workers.has(name)) workers.set(name, new Worker(inside("worker.js"), { type: "module" }));
  return workers.get(name);
}

async function open(command) {
  const [file, probe] = await Promise.all([
    blob(command.file, command.say),
    fetch(inside("probe.onnx")).then((response) => response.arrayBuffer()),
  ]);
  const job = { ...command, blob: file, probe, runtime: inside(command.runtime) };
  return ask(worker(command.worker), job);
}

const DOES = {
  open,
  time: (command) => ask(worker(command.worker), command),
  logits: (command) => ask(worker(command.worker), command),
  known: describeBrowser,
  async clear({ keep }) {
    dismiss();
    for (const name of [...files.keys()]) if (!keep.includes(name)) files.delete(name);
    return {};
  },
  async show({ tables }) {
    at("results").replaceChildren(...tables.map(buildTable));
    at("empty").hidden = tables.length > 0;
    return {};
  },
};

// A WebAssembly function with a SIMD instruction.
const SIMD = [
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 10, 1, 8, 0, 65, 0, 253, 15, 253, 98, 11,
];

async function describeBrowser({ webgpu }) {
  const hints = await navigator.userAgentData?.getHighEntropyValues?.([
    "architecture", "bitness", "model", "platformVersion",
  ]);
  const probe = worker("probe");
  const step = await ask(probe, { do: "step" });
  dismiss();
  const facts = {
    agent: navigator.userAgent,
    cores: navigator.hardwareConcurrency ?? 0,
    memory_gb: navigator.deviceMemory ?? 0,
    isolated: globalThis.crossOriginIsolated === true,
    simd: WebAssembly.validate(new Uint8Array(SIMD)),
    timer_ms: step,
    processor: [hints?.architecture, hints?.bitness && `${hints.bitness} bit`].filter(Boolean).join(" "),
    system: [hints?.platform, hints?.platformVersion].filter(Boolean).join(" "),
    model: hints?.model ?? "",
    gpu: webgpu ? await describeGpu() : "",
  };
  showFacts(facts);
  return facts;
}

async function describeGpu() {
  const adapter = await navigator.gpu?.requestAdapter();
  if (!adapter) return "";
  const { vendor, architecture, device, description } = adapter.info ?? {};
  return [vendor, architecture, device, description].filter(Boolean).join(" ") || "unnamed adapter";
}

function showFacts(facts) {
  const lines = {
    Browser: facts.agent,
    Device: [facts.model, facts.system, facts.processor].filter(Boolean).join(", "),
    Cores: facts.cores || "unknown",
    Threads: facts.isolated ? "allowed" : "one only",
    Clock: `steps of ${Number(facts.timer_ms.toPrecision(2))} ms`,
    GPU: facts.gpu,
  };
  for (const [name, value] of Object.entries(lines)) {
    if (value === "") continue;
    const [term, text] = [document.createElement("dt"), document.createElement("dd")];
    [term.textContent, text.textContent] = [name, value];
    at("facts").append(term, text);
  }
  if (!facts.isolated) {
    notice("One thread only: browsers allow no threads in a page that comes over plain http from another machine.");
  }
}

function buildTable({ title, head, rows }) {
  const table = document.createElement("table");
  table.createCaption().textContent = title;
  const line = (section, cells, kind) => {
    const row = section.insertRow();
    for (const text of cells) {
      const cell = document.createElement(kind);
      cell.textContent = text;
      row.append(cell);
    }
  };
  line(table.createTHead(), head, "th");
  const body = table.createTBody();
  for (const cells of rows) line(body, cells, "td");
  return table;
}

// -- keeping the screen on, and noticing a hidden page

let lock;
let warned = false;

async function stayAwake() {
  try {
    lock = await navigator.wakeLock.request("screen");
  } catch {
    if (!warned) notice("This browser does not let the page keep the screen on: touch it now and then.");
    warned = true;
  }
}

document.addEventListener("visibilitychange", () => {
  if (over || !base) return;
  if (document.hidden) {
    wasHidden = true;
    if (!at("hidden").hidden) return;
    at("hidden").hidden = false;
  } else stayAwake();
});

addEventListener("pagehide", () => {
  if (base && !over) navigator.sendBeacon(inside("bye"));
});

async function start() {
  const token = location.hash.slice(1);
  history.replaceState(null, "", "/"); // the token is valid once
  if (!token) {
    return status("This address is incomplete: open the whole link that the command printed. A reloaded page needs a new link.", "wrong");
  }
  const claim = await fetch("/claim", { method: "POST", body: JSON.stringify({ token }) });
  if (!claim.ok) {
    return status("This link has been used or has expired. Run the command again for a new one.", "wrong");
  }
  base = (await claim.json()).base;
  status("Connected. Waiting for the first file.");
  stayAwake();
  await work();
}

start().catch((error) => finish(`The command does not answer: ${error?.message ?? error}. The measurement has ended.`, "wrong"));
