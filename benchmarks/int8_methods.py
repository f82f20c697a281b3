"""What each way to int8 loses on real students, what it keeps in float32, and what that costs in latency.

    python -m benchmarks.int8_methods BUNDLE=DATA... --max-drop 0.3 --out benchmarks/results/int8_methods_<machine>.json

For each bundle: dynamic int8 with nothing left in float32; then dynamic, static and SmoothQuant int8, each with what
must stay in float32 to lose at most --max-drop points (`compress quantize --method`); all certified on the same rows,
then raced against fp32 in one interleaved race. Prints a table in Markdown.
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import load_pair, log, make_parser, write_result
from compress.benchmark.devices import open_device
from compress.commands.quantize import quantize
from compress.exporters.rewrite.graph import layer
from compress.records.latency import Latency, Setting

ALL = 1.0
"""A drop that any file keeps to: nothing is left in float32."""
WAYS: dict[str, Any] = {"dynamic, all of it": "dynamic"} | {way: way for way in ("dynamic", "static", "smoothquant")}
SETTING, ROUNDS, RUNS = Setting(threads=1, batch=1, seq=64), 10, 15


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE=DATA")
    parser.add_argument("--max-drop", type=float, default=0.3, help="points")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = [measure_bundle(each, args.max_drop / 100) for each in args.bundles]
    write_result(args.out, {"bundles": found})
    print("\n".join(format_markdown(found, args.max_drop)))


def measure_bundle(named: str, max_drop: float) -> dict[str, Any]:
    name, bundle, data = load_pair(named)
    lines: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch, open_device("local", say=log) as here:
        files = {"fp32": bundle.files()["fp32"]}
        for way, method in WAYS.items():
            log(f"{name}: {way}")
            limit = ALL if way not in WAYS.values() else max_drop
            done = quantize(bundle, data, method=method, out=Path(scratch) / way, max_drop=limit, say=log)
            files[way] = done.bundle.files()["int8"]
            lines[way] = {
                "certificate": asdict(done.proof),
                "within": done.proof.drop <= max_drop + 1e-9,
                "megabytes": files[way].stat().st_size / 1e6,
                "sensitivity": [asdict(each) for each in done.mixed.sensitivity],
            }
        times = here.race(files, [SETTING], rounds=ROUNDS, runs=RUNS)
    return {"bundle": name, "ways": lines, "latencies": [asdict(each) for each in times], **compute_ratios(times)}


def compute_ratios(times: list[Latency]) -> dict[str, Mapping[str, float]]:
    base = next(each.p50_ms for each in times if each.name == "dynamic, all of it")
    return {"to_dynamic": {each.name: each.p50_ms / base for each in times}}


def format_markdown(found: list[dict[str, Any]], max_drop: float) -> Iterator[str]:
    yield f"| student | int8 | fp32 -> int8 | drop, points | agreement | in float32 | latency | at most {max_drop:g} |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in found:
        noisy = {time["name"] for time in each["latencies"] if time["noisy"]}
        for way, line in each["ways"].items():
            proof = line["certificate"]
            kept = "; ".join(layer(name) for name in proof["kept"]) or "-"
            ratio = f"{each['to_dynamic'][way]:.2f}" + (" (noisy)" if way in noisy else "")
            yield (
                f"| {each['bundle']} ({proof['metric']}, {proof['rows']:,} {proof['split']} rows) | "
                f"{way if line['certificate']['method'].startswith('dynamic') else proof['method']} | "
                f"{proof['before']:.4f} -> {proof['after']:.4f} | {100 * (proof['before'] - proof['after']):+.2f} | "
                f"{proof['agreement']:.2%} | {kept} | {ratio} | {'yes' if line['within'] else 'no'} |"
            )


if __name__ == "__main__":
    main()
