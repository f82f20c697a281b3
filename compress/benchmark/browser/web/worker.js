// Opens one ONNX file with onnxruntime-web and times it. In a worker, each file has its own runtime and threads, and the
// page can answer meanwhile. Python sends the commands: see ../device.py.

const PRECISION = 100; // a sample lasts at least this many steps of the clock

// The runtime does not report its memory; its WebAssembly memories do. They never shrink.
const memories = [];
WebAssembly.Memory = new Proxy(WebAssembly.Memory, {
  construct(target, args) {
    const memory = new target(...args);
    memories.push(memory);
    return memory;
  },
});

let ort;
let session;
let feeds;
let forwards = 1; // per sample

const ARRAYS = {
  int64: (data) => BigInt64Array.from(data, BigInt),
  int32: (data) => Int32Array.from(data),
};

function tensors(inputs) {
  return Object.fromEntries(
    inputs.map(({ name, type, dims, data }) => [name, new ort.Tensor(type, ARRAYS[type](data), dims)]),
  );
}

function clockStep() {
  const steps = [];
  while (steps.length < 9) {
    const start = performance.now();
    let now = start;
    while (now === start) now = performance.now();
    steps.push(now - start);
  }
  return steps.sort((a, b) => a - b)[4];
}

async function forward() {
  const start = performance.now();
  await session.run(feeds);
  return performance.now() - start;
}

async function sample() {
  const start = performance.now();
  for (let done = 0; done < forwards; done++) await session.run(feeds);
  return (performance.now() - start) / forwards;
}

async function load(job) {
  ort = await import(job.runtime);
  ort.env.logLevel = "fatal";
  ort.env.wasm.numThreads = job.threads;
  ort.env.wasm.wasmPaths = new URL("./", job.runtime).href;
  await ort.InferenceSession.create(new Uint8Array(job.probe)); // starts the runtime, which is not timed
}

async function open(job) {
  await load(job);
  const start = performance.now();
  const bytes = new Uint8Array(await job.blob.arrayBuffer());
  session = await ort.InferenceSession.create(bytes, {
    executionProviders: [job.provider],
    logSeverityLevel: 4,
    extra: job.entries,
  });
  const initMs = performance.now() - start;
  if (!job.inputs) return { init_ms: initMs, first_ms: 0, forwards };
  feeds = tensors(job.inputs);
  const firstMs = await forward();
  const times = [];
  for (let done = 0; done < job.warm_up; done++) times.push(await forward());
  const typical = times.sort((a, b) => a - b)[Math.floor(times.length / 2)];
  const least = PRECISION * clockStep();
  forwards = Math.max(1, Math.ceil(least / Math.max(typical, least / 1000)));
  return { init_ms: initMs, first_ms: firstMs, forwards };
}

async function time({ warm_up: warmUp, runs, seconds }) {
  for (let done = 0; done < warmUp; done++) await forward();
  const ms = [];
  const end = performance.now() + 1000 * (seconds ?? 0);
  while (ms.length < (runs ?? 1) || performance.now() < end) ms.push(await sample());
  const heap = memories.reduce((total, memory) => total + memory.buffer.byteLength, 0);
  return { ms, heap_mb: heap / 1e6 };
}

function base64(floats) {
  const bytes = new Uint8Array(floats.buffer, floats.byteOffset, floats.byteLength);
  let text = "";
  for (let at = 0; at < bytes.length; at += 8192) text += String.fromCharCode(...bytes.subarray(at, at + 8192));
  return btoa(text);
}

function encode(name, tensor) {
  if (tensor.type !== "float32") throw new Error(`output ${name} is ${tensor.type}; expected float32`);
  return { dims: tensor.dims, data: base64(tensor.data) };
}

async function logits({ rows }) {
  const found = [];
  for (const inputs of rows) {
    const outputs = await session.run(tensors(inputs));
    found.push(session.outputNames.map((name) => encode(name, outputs[name])));
  }
  return { rows: found };
}

const DOES = { open, time, logits, step: async () => clockStep() };

addEventListener("message", async ({ data }) => {
  try {
    postMessage({ id: data.id, ok: await DOES[data.do](data) });
  } catch (error) {
    postMessage({ id: data.id, error: String(error?.message ?? error) });
  }
});
