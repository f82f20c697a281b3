"""The measured figures of the pages, read from benchmarks/results. `python -m docs.measured` writes the tables anew.

A page marks a figure by the name of a function of this file, on a line of its own before a table or a paragraph:

    <!-- measured: gate_alarms -->

A function that returns rows makes the table below its mark, to the last character; one that returns a text makes the
paragraph below; one that returns phrases says what that paragraph has to contain. tests/test_measured.py holds the
pages to all of them.
"""

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from math import isnan, log10, nan
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from benchmarks import effects

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", ROOT / "recipes" / "README.md", *sorted(Path(__file__).parent.glob("*.md")))
VERDICTS = ROOT / "recipes" / "verdicts.json"
MARK = re.compile(r"^<!-- measured: (\w+) -->\n\n", re.MULTILINE)
Rows = list[Sequence[str]]
Phrases = list[str]
WIDTH = 140
"""Characters of a line of a page."""


@cache
def read(name: str) -> Any:
    """Read a result, which has to say by which command it was made, and when."""
    found = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert found.get("command"), f"{name}: no command"
    assert found.get("date"), f"{name}: no date"
    return found


def lay_out(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows as a table; the first one is the heading."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    return "\n".join(lines).replace("|  ", "| ") + "\n"


def fill(text: str) -> str:
    """Put its table, or its paragraph, below each mark that stands for one."""
    parts = MARK.split(text)
    for at in range(1, len(parts), 2):
        name, below = parts[at : at + 2]
        parts[at] = f"<!-- measured: {name} -->\n\n"
        found = figures(name)
        if isinstance(found, str):
            _, blank, rest = below.partition("\n\n")
            parts[at + 1] = found + blank + rest
        elif not isinstance(found[0], str):
            parts[at + 1] = lay_out(found) + re.sub(r"\A(\|.*\n)*", "", below)
    return "".join(parts)


def figures(name: str) -> Rows | Phrases | str:
    """Compute what a mark stands for."""
    function: Callable[[], Rows | Phrases | str] = globals()[name]
    return function()


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def points(before: float, after: float) -> str:
    """Write how many points are lost."""
    lost = 100 * (before - after)
    return f"{lost:+.2f}" if abs(lost) >= 0.005 else "0.00"


def two_digits(value: float) -> str:
    """Write a number with two significant digits, and no exponent from a ten-thousandth on."""
    return (
        f"{float(f'{value:.1e}'):.6f}".rstrip("0").rstrip(".") if value >= 1e-4 else f"{value:.1e}".replace("e-0", "e-")
    )


def milliseconds(value: float) -> str:
    """Write milliseconds with two decimals below 10, and three digits up to 1,000."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


# --- real teachers

KOREAN = "real_teachers_korean_xeon-2core-busy_202611"


def korsts() -> Rows:
    """Give the correlation of each model with the sentences' similarity, and its share of the teacher's."""
    return _kept("KorSTS, pairs of the test split", "spearman", read(KOREAN)["korsts"])


def nsmc() -> Rows:
    """Give the accuracy of each model on reviews, and its share of the teacher's."""
    return _kept("NSMC, rows of the test split", "accuracy", read(KOREAN)["nsmc"])


def deeper() -> Rows:
    """Give what other recipes make of the fine-tuned teacher, on the rows that each had time to score."""
    rows: Rows = [["recipe", "accuracy of teacher", "of student, int8 (95 %)", "of the teacher's", "parameters", "MB"]]
    for recipe, models in read(KOREAN)["recipes"].items():
        (teacher,) = (one for one in models if one["role"] == "teacher")
        *_, student = models
        own, score = teacher["score"]["accuracy"], student["score"]["accuracy"]
        rows.append(
            [
                f"`{recipe}`",
                f"{own:.3f}",
                "{:.3f} ({:.3f} to {:.3f})".format(score, *student["interval"]),
                percent(score / own),
                f"{student['parameters'] / 1e6:.1f} million",
                f"{student['file_mb']:.1f}",
            ]
        )
    return rows


def prompted() -> Rows:
    """Give what an encoder keeps of a prompted language model, by the number of examples in the prompt."""
    rows: Rows = [
        ["examples", "bag of words", "teacher (95 %)", "student int8 (95 %)", "of the teacher's", "agreement"]
    ]
    for count, models in read("real_teachers_prompted_xeon-2core-busy_202611")["examples"].items():
        _, words, teacher, _, student = models
        scores = [
            "{:.3f} ({:.3f} to {:.3f})".format(one["score"]["accuracy"], *one["interval"]) for one in (teacher, student)
        ]
        kept = percent(student["score"]["accuracy"] / teacher["score"]["accuracy"])
        rows.append([count, f"{words['score']['accuracy']:.3f}", *scores, kept, percent(student["agreement"])])
    return rows


def _kept(heading: str, metric: str, models: Sequence[Any]) -> Rows:
    roles = {one["role"]: one for one in models}
    teacher = roles.get("published", roles["teacher"])
    rows: Rows = [[heading, f"{metric} (95 %)", "of the teacher's", "MB"]]
    for one in models:
        score = one["score"][metric]
        interval = " ({:.3f} to {:.3f})".format(*one["interval"]) if one["interval"] else ""
        size = f"{one['file_mb']:.1f}" if one["file_mb"] else ""
        rows.append([one["name"], f"{score:.3f}{interval}", percent(score / teacher["score"][metric]), size])
    return rows


def korean_text_file() -> Phrases:
    """Say how large the text file is, and how it was compared."""
    found = read(KOREAN)
    compared = found["read_as_by_the_tokenizer"]["reviews"]
    return [
        f"{found['text_file_mb']:.2f} MB",
        f"{compared:,} reviews",
        f"on {found['vectors']['texts']} reviews by at most {found['vectors']['largest_difference']:g}",
    ]


def language_model() -> Rows:
    """Give nats and perplexity of the language models of each arm."""
    arms = read("real_teachers_wikipedia_xeon-2core-busy_202611")["arms"]
    rows: Rows = [["model", "parameters", "nats a token", "perplexity"]]
    for arm, found in arms.items():
        for one in found["models"]:
            rows.append(
                [
                    f"{arm}: {one['name']}",
                    f"{one['parameters'] / 1e6:.1f} million",
                    f"{one['nats']:.3f} ± {one['standard_error']:.3f}",
                    f"{float(format(one['perplexity'], '.2e')):,.0f}",
                ]
            )
    return rows


# --- README


def demo() -> Rows:
    """Give the median over the seeds, with the lowest and the highest where they differ.

    Of the times only ratios are shown, as the machine was busy: the files of a run were timed in turns.
    """
    forms = {
        "accuracy": ("accuracy", "{:.3f}"),
        "agreement": ("agreement", "{:.1%}"),
        "parameters": ("parameters", "{:.1f} M"),
        "file_mb": ("file, MB", "{:.1f}"),
        "speed": ("times as fast", "{:.1f}"),
    }
    runs = [run["rows"] for run in read("demo_seeds_xeon-2core_202611")["runs"]]
    rows: Rows = [[f"median of {len(runs)} (lowest to highest)", *(heading for heading, _ in forms.values())]]
    for name in runs[0]:
        cells = [name]
        for value, (_, form) in forms.items():
            found = sorted(_of_demo(run, name, value) for run in runs)
            texts = [form.format(one).replace("%", " %") for one in (median(found), found[0], found[-1])]
            middle, low, high = texts
            cells.append("" if isnan(found[0]) else middle if low == high else f"{middle} ({low} to {high})")
        rows.append(cells)
    return rows


def _of_demo(run: dict[str, Any], name: str, value: str) -> float:
    """Read a value of a row of one run, NaN if the row lacks it; `speed` is the teacher's time over its own."""
    row = run[name]
    if value == "speed":
        return run["minilm"]["p50_ms"] / row["p50_ms"] if row["p50_ms"] else nan
    found = nan if row[value] is None else float(row[value])
    return found / 1e6 if value == "parameters" else found


def demo_runs() -> str:
    result = read("demo_seeds_xeon-2core_202611")
    seconds, runs = result["run"]["seconds"], result["runs"]
    minutes, low, high = (f"{seconds[each] / 60:.0f}" for each in ("median", "lowest", "highest"))
    spread = f" ({low} to {high})" if len(runs) > 1 else ""
    words = [
        f"Accuracy is measured on {result['split_rows']:,} {result['split']} rows; speed compares one forward with the",
        f"teacher's float32 file, {result['settings'][0]}. The command took {minutes} minutes{spread} on",
        f"{result['threads']} cores of a Xeon, {result['date'][:10]} ([script](benchmarks/demo_seeds.py)).",
    ]
    return textwrap.fill(" ".join(words), WIDTH, break_on_hyphens=False)


def kept_shares() -> Phrases:
    """Give the runs whose last rows had decided nothing before."""
    runs = [run for run in read("keep_xeon-2core-busy_202611")["runs"] if run["set"] not in ("stsb", "mrpc")]
    speeds = [run["speed"] for run in runs]
    shares = [100 * run["kept"]["share"] for run in runs]
    return [
        f"{min(speeds):.1f} to {max(speeds):.1f} times as fast",
        f"{min(shares):.1f} to {max(shares):.1f} % of its test score",
    ]


# --- bench, browser


def int8_on_arm64() -> Rows:
    """Give the largest difference of both students, and the share of their answers that agree."""
    names = {
        "cortex-a53": "cortex-a53 (asimd)",
        "cortex-a76": "cortex-a76 (dot products)",
        "max,sme=off": "`max` without SME (dot products, i8mm, SVE2)",
        "max": "`max` with SME",
    }
    results = read("int8_on_arm64_qemu72_202611")["results"]
    rows: Rows = [["emulated processor", "fp32", "int8"]]
    for processor, name in names.items():
        cells = [name]
        for precision in ("fp32", "int8"):
            found = [one for one in results if (one["processor"], one["precision"]) == (processor, precision)]
            largest = two_digits(max(one["largest_difference"] for one in found))
            some = [f"{one['agreement']:.0%}".replace("%", " %") + f" ({one['bundle']})" for one in found]
            agree = "all" if all(one["agreement"] == 1 for one in found) else ", ".join(some)
            cells.append(f"{largest}; {agree}")
        rows.append(cells)
    return rows


def browser_and_native() -> Rows:
    result = read("browser_vs_native_epyc-2core_202611")

    def p50(place: str, precision: str, threads: int, tokens: int) -> str:
        setting = {"threads": threads, "batch": 1, "seq": tokens}
        one = next(each for each in result[place] if (each["name"], each["setting"]) == (precision, setting))
        return "~" * bool(one["noisy"]) + milliseconds(one["p50_ms"])

    rows: Rows = [["tokens", "fp32, 1 thread", "int8, 1 thread", "fp32, 2 threads, wasm", "int8, 2 threads, wasm"]]
    for tokens in (16, 64, 128):
        one = [
            f"{p50('native_before', each, 1, tokens)} / {p50('in_browser', each, 1, tokens)}"
            for each in ("fp32", "int8")
        ]
        two = [p50("in_browser", each, 2, tokens) for each in ("fp32", "int8")]
        rows.append([str(tokens), *one, *two])
    return rows


def browser_parity() -> Phrases:
    parity = read("browser_vs_native_epyc-2core_202611")["parity"]
    return [
        f"{parity['fp32']['rows']} rows of dev",
        f"float32 logits differ by at most {two_digits(parity['fp32']['max_difference'])}",
        f"int8 logits by {two_digits(parity['int8']['max_difference'])}",
        f"all {parity['int8']['rows'] * parity['int8']['agreement']:.0f} labels agree",
    ]


def engines_in_browser() -> Rows:
    rows = read("litert_race_epyc-2core-busy_202611")["rows"]
    names = {
        "onnxruntime-web, as we open a file": "ort {}",
        "without our session entries: fused SkipLayerNormalization": "ort {}, all fusions",
        '`graphOptimizationLevel: "basic"`': "ort {}, basic",
        "its build with WebGPU, on the CPU": "ort {}, WebGPU's build",
        "LiteRT, relaxed SIMD": "litert {}, relaxed SIMD",
        "LiteRT, without relaxed SIMD": "litert {}, SIMD",
    }
    first = rows["ort fp32"]["p50_ms"]
    table: Rows = [["engine", "fp32", "int8"]]
    for name, row in names.items():
        ratios = [rows[row.format(each)]["p50_ms"] / first for each in ("fp32", "int8")]
        table.append([name, *(f"{ratio:.2f}" for ratio in ratios)])
    return table


def engines_agree() -> Phrases:
    result = read("litert_race_epyc-2core-busy_202611")
    rows = result["rows"]
    apart = [abs(row["pass_1_ms"] / row["pass_2_ms"] - 1) for row in rows.values()]
    fp32 = max(row["difference"] for name, row in rows.items() if "fp32" in name)
    return [
        f"agree within {100 * max(apart):.0f} %",
        f"fp32 logits agree to {fp32:.0e}".replace("e-0", "e-"),
        f"{rows['litert int8, SIMD']['difference']:.3f} for LiteRT",
        f"{rows['ort int8']['difference']:.3f} for onnxruntime-web",
        f"load of {float(result['machine']['load']):.0f}",
    ]


# --- embeddings, export


def leaf_students() -> Rows:
    models = read("embeddings_leaf_epyc-2core_202611")["models"]
    names = {"teacher": "`minilm`", "leaf": "`leaf`, 3 x 384", "leaf-4x312": "`leaf`, 4 x 312"}
    rows: Rows = [["", "parameters", "STS-B", "nDCG@10, questions of MLQA", "searching the teacher's index"]]
    for key, name in names.items():
        cells = [name, f"{models[key]['parameters'] / 1e6:.1f} M"]
        for value in ("stsb_spearman", "qa_ndcg10", "qa_ndcg10_of_teachers_index"):
            score = models[key][value]
            share = "" if key == "teacher" else f" ({percent(score / models['teacher'][value])})"
            cells.append(f"{score:.3f}{share}")
        rows.append(cells)
    return rows


PEER = "optimum-onnx int8"


def _race() -> dict[tuple[str, str], dict[str, Any]]:
    """Return the latencies of the race of exports, by shape and setting, then by file."""
    found = dict[tuple[str, str], dict[str, Any]]()
    for one in read("export_race_epyc-2core_202611")["latencies"]:
        setting = one["setting"]
        words = f"{setting['threads']}, {setting['batch']}, {setting['seq']}"
        found.setdefault((one["shape"], words), {})[one["name"]] = one
    return found


def export_race() -> Rows:
    race = _race()
    shapes = {"tinybert": "TinyBERT 4 x 312", "minilm": "MiniLM 6 x 384", "bert-base": "BERT-base 12 x 768"}
    heading = ["threads, rows, tokens"]
    for name in shapes.values():
        heading += [f"{name}: the peer, ms", "ours: dynamic / static / OpenVINO"]
    rows: Rows = [heading]
    for setting in dict.fromkeys(setting for _, setting in race):
        cells = [setting]
        for shape in shapes:
            files = race[shape, setting]
            peer = files[PEER]
            ratios = []
            for name in ("ours, dynamic", "ours, static", "ours, OpenVINO"):
                noisy = "~" * (files[name]["noisy"] or peer["noisy"])
                ratios.append(f"{noisy}{files[name]['p50_ms'] / peer['p50_ms']:.2f}")
            cells += ["~" * peer["noisy"] + milliseconds(peer["p50_ms"]), " / ".join(ratios)]
        rows.append(cells)
    return rows


def export_ratios() -> Phrases:
    """Give the range of the ratios of lines whose two passes agree."""

    def span(names: Iterable[str]) -> str:
        pairs = [(files[name], files[PEER]) for files in _race().values() for name in names]
        ratios = [one["p50_ms"] / peer["p50_ms"] for one, peer in pairs if not (one["noisy"] or peer["noisy"])]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    return [span(("ours, dynamic", "ours, static")), f"{span(('ours, OpenVINO',))} under OpenVINO"]


# --- gate, keep, knowledge


def gate_alarms() -> Rows:
    result = read("gate_alarms_epyc-2core_202611")
    slower = result["10 % more work"]
    names = {
        "identical": "identical",
        "10 % more work": f"with 10 % more work ({percent(slower['median_change'])} by the median)",
    }
    rows: Rows = [["pairs", "passed", "cannot be told", "failed", "passes, median and most", "seconds per pair"]]
    for key, name in names.items():
        one = result[key]
        outcomes = one["outcomes"]
        counts = [str(outcomes.get(each, 0)) for each in ("passed", "undecided", "failed")]
        assert sum(map(int, counts)) == sum(outcomes.values())
        passes = f"{one['median_passes']:.0f}, {one['most_passes']}"
        rows.append([f"{sum(outcomes.values())} {name}", *counts, passes, f"{one['seconds_a_pair']:.0f}"])
    return rows


def keep() -> Rows:
    names = {
        "sst2": "SST-2 ({} rows)",
        "stsb": "STS-B ({} validation pairs, also used to decide)",
        "topics": "which of 20 articles a sentence is from ({} rows)",
        "mrpc": "MRPC ({} validation pairs, also used to decide)",
        "intents": "`intents` ({} rows), with an earlier version",
    }
    runs = {run["set"]: run for run in read("keep_xeon-2core-busy_202611")["runs"]}
    rows: Rows = [
        [
            "data",
            "student",
            "share of the test score (80 % interval)",
            "speed-up over int8 teacher",
            "int8, MB",
            "minutes",
        ]
    ]
    for key, name in names.items():
        run = runs[key]
        kept, path = run["kept"], run["path"]
        sizes = next(rung["sizes"] for rung in path["rungs"] if rung["name"] == path["chosen"])
        layers = f"{sizes['layers']} layer{'s' * (sizes['layers'] > 1)}"
        shares = f"{percent(kept['share'])} ({100 * kept['low']:.1f} to {100 * kept['high']:.1f})"
        rows.append(
            [
                name.format(f"{run['rows']:,}"),
                f"{layers}, {sizes['hidden']} wide, {sizes['ffn']} neurons",
                shares,
                f"{run['speed']:.1f} x",
                f"{run['file_mb']:.1f}",
                f"{run['minutes']:.0f}",
            ]
        )
    return rows


def knowledge() -> Rows:
    found = read("knowledge_xeon-2core-busy_202611")
    means = found["summary"]
    majority = fmean(arms["hinton"]["majority"] for arms in found["seeds"].values())
    labels = read("knowledge_labels_xeon-2core_202611")["summary"]["labels"]["student"]
    rows: Rows = [["", "teacher", "its student", "its student, with the corpus"]]
    rows.append(["always the most frequent answer", f"{majority:.3f}", "", ""])
    rows.append(["labels alone, no teacher", "", f"{labels:.3f}", ""])
    for arm, name in {"hinton": "`hinton`, without facts", "knowledge": "`knowledge`, with facts"}.items():
        plain, corpus = means[arm], means[f"{arm}-corpus"]
        scores = (plain["teacher"], plain["student"], corpus["student"])
        rows.append([name, *(f"{score:.3f}" for score in scores)])
    return rows


def knowledge_leads() -> Phrases:
    result = read("knowledge_xeon-2core-busy_202611")
    summary = result["summary"]
    labels = read("knowledge_labels_xeon-2core_202611")
    over = [
        [seed[arm]["student"] - labels["seeds"][name]["labels"]["student"] for name, seed in result["seeds"].items()]
        for arm in ("knowledge", "knowledge-corpus")
    ]
    mean, spread = ([100 * how(leads) for leads in over] for how in (fmean, stdev))
    teacher, plain, corpus = (
        summary[name] for name in ("lead of the teacher", "lead of the student", "lead-corpus of the student")
    )
    return [
        f"gains {100 * teacher['mean']:.0f} points",
        f"{100 * plain['mean']:.1f} points (deviation of the seeds {100 * plain['deviation']:.1f})",
        f"{100 * corpus['mean']:.1f} ({100 * corpus['deviation']:.1f}) with the corpus",
        f"the labels alone give {labels['summary']['labels']['student']:.3f}",
        f"the gain is {mean[0]:.1f} points ({spread[0]:.1f}), and {mean[1]:.1f} ({spread[1]:.1f}) with the corpus",
    ]


# --- npu, quantize


def _npu_certificate(one: dict[str, Any]) -> str:
    lost = points(one["before"], one["after"])
    lost = f"**{lost}**" if one["before"] - one["after"] > one["max_drop"] else lost
    return f"{lost}, {percent(one['agreement'])}, {two_digits(one['max_logit_difference'])}, {one['rows']:,}"


NPU = {
    "MRPC, `distilbert` 3 x 384, 96 tokens": "npu_files_mrpc_xeon-2core-busy_202611",
    "SST-2, `tinybert` 4 x 312, 64 tokens": "npu_files_sst2_epyc-2core-busy_202611",
}


def npu_files() -> Rows:
    """Give each file's certificate on the CPU and on the emulator: ours, and those of onnxruntime's own recipe."""
    rows: Rows = [["student, accuracy in fp32", "file", "on the CPU", "on the emulator", "context, MB"]]
    for student, name in NPU.items():
        (bundle,) = read(name)["bundles"]
        for file, (fp32, cpu, emulator) in bundle["files"].items():
            kept = len(cpu["kept"])
            made = cpu["method"] + (f", {kept} block{'s' * (kept > 1)} in uint16" if kept else "")
            how = f"ours: {made}" if "ours" in file else made.replace("get_qnn_qdq_config", "onnxruntime's recipe")
            head = f"{student}: {fp32['before']:.3f}" if file == next(iter(bundle["files"])) else ""
            results = [_npu_certificate(cpu), _npu_certificate(emulator)]
            rows.append([head, how, *results, f"{emulator['context_mb']:.1f}"])
    return rows


def int8_methods() -> Rows:
    methods = {
        "dynamic, all of it": "dynamic, nothing kept",
        "dynamic": "dynamic",
        "static": "static",
        "smoothquant": "smoothquant",
    }
    rows: Rows = [["student, fp32 score, rows", *methods.values()]]
    for bundle in read("int8_methods_epyc-2core_202611")["bundles"]:
        proof = bundle["ways"]["dynamic"]["certificate"]
        name = f"{bundle['bundle']}: {proof['metric']} {proof['before']:.4f}, {proof['rows']:,} {proof['split']}"
        noisy = {one["name"]: one["noisy"] for one in bundle["latencies"]}
        cells = [name]
        for method in methods:
            one = bundle["ways"][method]["certificate"]
            lost = points(one["before"], one["after"])
            parts = [f"**{lost}**" if float(lost) > 0.3 else lost, percent(one["agreement"])]
            if one["kept"]:
                parts.append(f"{len(one['kept'])} kept")
            parts.append("noisy" if noisy[method] else f"{bundle['to_dynamic'][method]:.2f}")
            cells.append(", ".join(parts))
        rows.append(cells)
    return rows


def smoothquant() -> Phrases:
    bundles = read("int8_methods_epyc-2core_202611")["bundles"]
    proofs = [bundle["ways"]["smoothquant"]["certificate"] for bundle in bundles]
    ratios = [bundle["to_dynamic"]["smoothquant"] for bundle in bundles]
    lost = max(100 * (one["before"] - one["after"]) for one in proofs)
    assert not any(one["kept"] for one in proofs)
    one_kept = [
        bundle["to_dynamic"][method]
        for bundle in bundles
        for method, way in bundle["ways"].items()
        if len(way["certificate"]["kept"]) == 1
    ]
    return [
        f"within {lost:.2f} points",
        f"{min(ratios):.2f} to {max(ratios):.2f} of dynamic int8's latency",
        f"costs {min(one_kept):.2f} to {max(one_kept):.2f}",
    ]


# --- processes, scale, vocabulary


def gpu_students() -> Rows:
    names = {
        "distilbert": "`distilbert`, 6 x 768",
        "distilbert, compiled": "the same, compiled",
        "distilbert, kept": "the same, not compiled, the teacher's outputs cached",
        "tinybert": "`tinybert`, 4 x 312, all losses",
    }
    rows: Rows = [["student", "samples/s", "MFU", "peak memory"]]
    for key, name in names.items():
        runs = read("gpu_distill_h200_202611")["runs"][key]
        speeds = " and ".join(f"{run['samples_per_second']:,.0f}" for run in runs)
        shares = dict.fromkeys(f"{run['mfu_percent']:.0f}" for run in runs)
        peak = max(run["peak_gb"] for run in runs)
        rows.append([name, speeds, " and ".join(shares) + " %", f"{peak:.1f} GB"])
    return rows


def scale_of_rows() -> Rows:
    rows: Rows = [["rows", "first step after", "anonymous memory", "cache"]]
    for count, one in read("scale_rows_xeon-2core-busy_202611")["rows"].items():
        memory, kept = one["anonymous MB"] / 1000, one["cache MB"] / 1000
        rows.append([f"{int(count):,}", f"{one['first step s']:.0f} s", f"{memory:.2f} GB", f"{kept:.2f} GB"])
    return rows


def scale_of_tokens() -> Rows:
    rows: Rows = [["tokens", "seconds", "tokens/s", "memory", "bytes a token"]]
    for count, one in read("scale_tokens_xeon-2core-busy_202611")["tokens"].items():
        cells = [f"10^{len(str(int(float(count)))) - 1}", f"{one['seconds']:.1f}"]
        cells += [f"{one['tokens/s'] / 1e6:.1f} million", f"{one['anonymous MB']:.0f} MB"]
        rows.append([*cells, f"{one['bytes a token']:.2f}"])
    return rows


def scale_exponents() -> Phrases:
    result = read("scale_rows_xeon-2core-busy_202611")
    steps = result["exponents"]["rows"]["first step s"]
    million, ten = (result["rows"][count]["first step s"] for count in ("1000000", "10000000"))
    encoding = read("scale_tokens_xeon-2core-busy_202611")["exponents"]["tokens"]["seconds"]
    last = f"({log10(ten / million):.2f} from one to ten million rows)"
    return [f"the seconds to the first step {steps:.2f} {last}", f"those of encoding {encoding:.2f}"]


def trimmed() -> Rows:
    runs = read("vocabulary_trimming_epyc-2core_202611")["runs"]
    first = runs["1"]
    before = first["trimmed"]["bytes"]["onnx/model_quantized.onnx"][0] / 1e6
    score = 100 * first["certificates"][1]["before"]
    rows: Rows = [
        [
            "min-count",
            "tokens",
            "int8 file, MB",
            "accuracy, int8",
            "same answers",
            "dev texts encoded as before",
            "corpus encoded as before",
        ],
        ["none", f"{first['trimmed']['before']:,}", f"{before:.2f}", f"{score:.2f}", "", "", ""],
    ]
    for count, run in runs.items():
        proof = next(one for one in run["certificates"] if "quantized" in one["artefact"])
        size = run["trimmed"]["bytes"][proof["artefact"]][1] / 1e6
        shares = [percent(proof["agreement"]), percent(run["alike"], 0), percent(run["trimmed"]["whole"], 0)]
        rows.append([count, f"{run['trimmed']['kept']:,}", f"{size:.2f}", f"{100 * proof['after']:.2f}", *shares])
    return rows


# --- demo, text in


def demo_page_busy() -> Phrases:
    result = read("demo_first_answer_epyc-2core-busy_202611")
    one = result["medians"]
    return [
        f"{result['parameters'] / 1e6:.1f} M parameters",
        f"{one['warm answer_s']:.1f} s, of which the command takes {one['warm link_s']:.1f} s",
        f"it takes {one['cold answer_s']:.1f} s and {one['cold link_s']:.1f} s",
        f"processor time was {one['warm cpu_to_link_s']:.1f} s, the first time {one['cold cpu_to_link_s']:.1f} s",
    ]


def demo_page() -> Phrases:
    one = read("demo_first_answer_epyc-2core_202611")["medians"]
    return [
        f"{one['warm answer_s']:.1f} s, of which the command takes {one['warm link_s']:.1f} s",
        f"{one['cold answer_s']:.1f} and {one['cold link_s']:.1f} s",
    ]


def _text_file(name: str) -> Phrases:
    """Say what is equal, how long a call takes, and how large the tokenizer is."""
    result = read(name)
    ms = result["median_ms"]
    whole = result["equal"].get("classification", result["equal"])
    assert not any(one["different"] for one in whole["texts"].values())
    return [
        "no text is tokenised differently",
        f"takes {ms['text file']:.2f} ms with the text file",
        f"{ms['tokenizers + int8 file']:.2f} ms with `tokenizers`",
        f"{whole['reader_bytes'] / 1e6:.{2 if whole['reader_bytes'] < 1e6 else 1}f} MB",
    ]


def text_file() -> Phrases:
    name = "text_in_label_out_epyc-2core_202611"
    result = read(name)
    web = result["javascript"]
    assert not any(one["labels_different"] for one in web.values())
    return [
        *_text_file(name),
        f"of a {result['bytes']['text file'] / 1e6:.1f} MB file",
        f"on {web['onnxruntime-web, int8']['texts']} of {web['onnxruntime-web, int8']['texts']} texts",
        f"agree to {web['onnxruntime-web, fp32']['largest_logit_difference']:.0e}".replace("e-0", "e-"),
        f"int8 logits to {web['onnxruntime-web, int8']['largest_logit_difference']:.2f}",
    ]


def text_file_of_words() -> Phrases:
    result = read("text_in_words_out_epyc-2core-busy_202611")
    ms = result["median_ms"]
    drawn = result["equal"]["qa"]["texts"]["random"]
    return [
        f"differs on {drawn['different']} of the {drawn['texts']:,} random texts",
        f"took {ms['text file over ids ready, of pairs']:.2f} ms more",
        f"{ms['text file over ids ready, of the best rounds']:.2f} ms more in each text's best",
        f"`tokenizers` took {ms['tokenizers + int8 file'] - ms['int8 file, ids ready']:.2f} ms",
    ]


def text_file_of_bytes() -> Phrases:
    name = "text_in_label_out_bpe_epyc-2core-busy_202611"
    more = read(name)["median_ms"]["text file over ids ready, of the best rounds"]
    return [*_text_file(name), f"takes {more:.2f} ms more than the bare one"]


def text_file_of_pieces() -> Phrases:
    name = "text_in_label_out_unigram_epyc-2core-busy_202611"
    result = read(name)
    web = result["javascript"]
    more = result["median_ms"]["text file over ids ready, of the best rounds"]
    return [
        *_text_file(name),
        f"takes {more:.2f} ms",
        f"equal to {web['onnxruntime-web, fp32']['largest_logit_difference']:.0e}".replace("e-0", "e-"),
        f"by up to {web['onnxruntime-web, int8']['largest_logit_difference']:.3f}",
        f"{web['onnxruntime-web, int8']['labels_different']} of {web['onnxruntime-web, int8']['texts']} labels differ",
    ]


def verdicts(folder: Path) -> str:
    """Write what `compress recipes` says of each recipe that was tried, as its package holds no results."""
    judged = effects.judge(effects.load(folder))
    return json.dumps({name: verdict for name, (verdict, _) in judged.items()}, indent=2) + "\n"


if __name__ == "__main__":
    VERDICTS.write_text(verdicts(RESULTS / "recipes"), encoding="utf-8")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (filled := fill(text)) != text:
            page.write_text(filled, encoding="utf-8")
            print(page)
