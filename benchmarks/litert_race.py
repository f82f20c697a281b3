#!/usr/bin/env python3
"""Which engine answers faster in a browser: onnxruntime-web or LiteRT, with which file and which settings?

    python -m benchmarks.litert_race tinybert/bundle tinybert-tflite --litert node_modules/@litertjs --out result.json

The bundle's ONNX files beside the .tflite files that `compress export --for litert` wrote of it, in one headless
Chromium: one row of 128 tokens, one thread, every contender in a frame of its own, in turns, in two passes of opposite
order.
`node_modules/@litertjs` has `core` and `wasm-utils` as npm puts them.
"""

import json
import shutil
import statistics
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.chromium import open_tab
from benchmarks.common import make_parser, write_result
from compress.benchmark.browser.device import WEB_VERSION, load_runtime
from compress.exporters.artifact import Bundle
from compress.exporters.manifest import BUNDLE_FILES
from compress.exporters.session import read_model, session_entries

TOKENS = 128
FRAME = """<!doctype html><script type="importmap">
{"imports": {"@litertjs/wasm-utils": "/litert/wasm-utils/dist/index.js"}}</script><script type="module">
const ids = [...Array(%(tokens)d).keys()].map((n) => 1000 + 37 * n);
const rows = { input_ids: ids, attention_mask: ids.map(() => 1), token_type_ids: ids.map(() => 0) };

async function openOrt({ file, options, entry }) {
  const ort = await import(`/ort/${entry}`);
  Object.assign(ort.env.wasm, { numThreads: 1, wasmPaths: `${location.origin}/ort/` });
  const session = await ort.InferenceSession.create(file, { executionProviders: ["wasm"], ...options });
  const feeds = Object.fromEntries(session.inputNames.map((name) =>
    [name, new ort.Tensor("int64", BigInt64Array.from(rows[name], BigInt), [1, ids.length])]));
  return async () => [...(await session.run(feeds)).logits.data];
}

async function openLiteRt({ file, wasm }) {
  const { loadLiteRt, loadAndCompile, Tensor } = await import("/litert/core/dist/index.js");
  await loadLiteRt(`/litert/core/wasm/${wasm}`);
  const model = await loadAndCompile(file, { accelerator: "wasm", cpuOptions: { numThreads: 1 } });
  const signature = `tokens_${ids.length}`;
  const names = model.signatures[signature].getInputDetails().map(({ name }) => name);
  const feeds = Object.fromEntries(names.map((name) =>
    [name, new Tensor(Int32Array.from(rows[name]), [1, ids.length])]));
  return async () => {
    const outputs = Object.values(await model.run(signature, feeds));
    const found = [...outputs[0].toTypedArray()];
    for (const each of outputs) each.delete();
    return found;
  };
}

let forward;
window.start = async (how) => {
  forward = await (how.wasm ? openLiteRt : openOrt)(how);
  return forward();
};
window.time = async (runs) => {
  const times = [];
  for (let run = -2; run < runs; run++) {
    const start = performance.now();
    await forward();
    if (run >= 0) times.push(performance.now() - start);
  }
  return times;
};
window.ready = true;
</script>"""
PAGE = """<!doctype html><body><script>
window.frameOf = async (name, how) => {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.id = name;
  frame.src = "/frame.html";
  while (!frame.contentWindow?.ready) await new Promise((done) => setTimeout(done, 20));
  return frame.contentWindow.start(how);
};
</script>"""


def list_contenders(bundle: Bundle, tflite: Path) -> dict[str, dict[str, Any]]:
    """Say how each is opened, by name."""
    found: dict[str, dict[str, Any]] = {}
    for precision in ("fp32", "int8"):
        file = f"/onnx/{Path(BUNDLE_FILES[precision]).name}"
        entries = session_entries(read_model(bundle.files()[precision]))
        plain = {"file": file, "entry": "ort.wasm.min.mjs"}
        found[f"ort {precision}"] = {**plain, "options": {"extra": entries}}
        found[f"ort {precision}, all fusions"] = {**plain, "options": {}}
        found[f"ort {precision}, basic"] = {**plain, "options": {"graphOptimizationLevel": "basic"}}
        found[f"ort {precision}, WebGPU's build"] = {
            **plain, "entry": "ort.webgpu.min.mjs", "options": {"extra": entries},
        }  # fmt: skip
        name = {"fp32": "model.tflite", "int8": "model_quantized.tflite"}[precision]
        assert (tflite / name).is_file(), tflite / name
        for kind, wasm in (("relaxed SIMD", "litert_wasm_internal.js"), ("SIMD", "litert_wasm_compat_internal.js")):
            found[f"litert {precision}, {kind}"] = {"file": f"/tflite/{name}", "wasm": wasm}
    return found


class Quiet(SimpleHTTPRequestHandler):
    """Isolates the page, whose clock then has finer steps."""

    def end_headers(self) -> None:
        self.send_header("Cross-Origin-Opener-Policy", "same-origin")
        self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("tflite", type=Path)
    parser.add_argument("--litert", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    bundle = Bundle.load(args.bundle)
    opened, logits, failed = list_contenders(bundle, args.tflite), {}, {}
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in opened}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        root = Path(scratch) / "root"
        shutil.copytree(bundle.path / "onnx", root / "onnx")
        shutil.copytree(args.tflite, root / "tflite")
        shutil.copytree(args.litert, root / "litert")
        (root / "ort").mkdir()
        for path in (*load_runtime(), *load_runtime(webgpu=True)):
            shutil.copyfile(path, root / "ort" / path.name)
        (root / "frame.html").write_text(FRAME % {"tokens": TOKENS}, encoding="utf-8")
        (root / "index.html").write_text(PAGE, encoding="utf-8")
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=root)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with open_tab(Path(scratch) / "profile", f"http://127.0.0.1:{server.server_port}/") as tab:
                tab.wait("!!window.frameOf")
                agent = tab.see("navigator.userAgent")
                for name, how in list(opened.items()):
                    call = f"frameOf({json.dumps(name)}, {json.dumps(how)})"
                    answer = tab.see(f"{call}.catch(error => String(error?.message ?? error))")
                    if isinstance(answer, list):
                        logits[name] = answer
                    else:
                        failed[name] = answer
                        del opened[name], times[name]
                    print(name, answer, flush=True)
                for turn in range(args.rounds):
                    late = turn >= args.rounds // 2
                    for name in reversed(opened) if late else opened:
                        frame = f"document.getElementById({json.dumps(name)}).contentWindow"
                        times[name][late].extend(tab.see(f"{frame}.time({args.runs})"))
            server.shutdown()
    rows = {
        name: {
            "p50_ms": statistics.median(one + other),
            "pass_1_ms": statistics.median(one),
            "pass_2_ms": statistics.median(other),
            "min_ms": min(one + other),
            "runs": len(one + other),
            "difference": max(abs(a - b) for a, b in zip(logits[name], logits["ort fp32"], strict=True)),
        }
        for name, (one, other) in times.items()
    }
    for name, row in rows.items():
        print(f"{name:32} p50 {row['p50_ms']:7.2f}  min {row['min_ms']:7.2f}  {row['difference']:.2g}")
    package = json.loads((args.litert / "core" / "package.json").read_text(encoding="utf-8"))
    result = {
        "browser": agent, "onnxruntime-web": WEB_VERSION, "litertjs": package["version"], "tokens": TOKENS,
        "threads": 1,
        "rows": rows, "failed": failed,
    }  # fmt: skip
    write_result(args.out, result)


if __name__ == "__main__":
    main()
