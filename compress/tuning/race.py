"""Keep the fastest file for a device: build and check every variant, and race them there in turns.

with open_device("local") as device:
    tuned = tune(bundle, device=device, settings=[Setting()], evaluator=evaluator, calibration=rows)
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, isfinite, log
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compress.benchmark.devices import Device
from compress.config.limits import check_max_drop
from compress.errors import CompressError, ExportError
from compress.exporters.artifact import FILES, Bundle, Precision
from compress.exporters.int8 import LEARNED_KEY
from compress.exporters.rewrite.graph import list_floats
from compress.exporters.session import difference, onnx_run, opset_of, read_model, rows_for
from compress.quantization.certify import attach_certificate, certify, compare_logits, compute_logits
from compress.records.certificate import Tried
from compress.records.latency import DeviceError, Latency, Setting
from compress.records.run_report import NAME as REPORT
from compress.tuning.variants import Variant, fp32_variants, int8_variants

if TYPE_CHECKING:
    from compress.evaluation.evaluator import Evaluator
    from compress.exporters.session import EncodedRow

PARITY = 1e-4
"""The most that the logits of another form may differ from the traced graph's, relative to the largest (or to 1)."""
ROWS = 400
"""Rows of the evaluator that judge an int8 file, spread evenly over it."""
LOSES = "loses {:.2f} points and changes {:.1f} % of the answers; at most {:g} of each are allowed"
GAIN = 0.02
"""The least gain by which a faster file takes the place of the one that is there."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Tuned:
    """The bundle with the files that were chosen, and all that were tried, in the order of the races."""

    bundle: Bundle
    tried: tuple[Tried, ...]

    @property
    def chosen(self) -> tuple[Tried, ...]:
        """Return the chosen variants, of fp32 and, where it was raced, of int8."""
        return tuple(each for each in self.tried if each.chosen)


def tune(
    bundle: Bundle,
    *,
    device: Device,
    settings: Sequence[Setting],
    evaluator: "Evaluator | None" = None,
    calibration: "Sequence[EncodedRow]" = (),
    max_drop: float = 0.005,
    proof: "Evaluator | None" = None,
    split: str = "validation",
    data: str = "",
    out: Path | None = None,
    rounds: int = 6,
    runs: int = 10,
    say: Say = lambda _: None,
) -> Tuned:
    """Tune the bundle, in place or in a new folder `out`: with the fp32 file, and with an evaluator the int8 file,
    that is fastest on the device; what was tried goes into its report.

    settings     at each of which all are raced; the geometric mean of the ratios decides
    evaluator    rows that judge int8; without it int8 stays as it is, since nothing says what it may lose
    calibration  encoded rows, none of the evaluator's: with them static int8 is in the race
    max_drop     of the score, in its own unit, that an int8 file may lose; at most that share of the answers may
                 change. One that is no worse than the bundle's own passes as well
    proof        rows that certify the int8 file, where those of the evaluator, which chose it, should not
    split, data  what the certificate's rows are
    rounds, runs    turns that each file has at a setting, and timed forwards in each

    A file must be GAIN faster than the bundle's own to take its place. The bundle is untouched until all is measured.
    Every form is made of the weights anew, however the bundle's own files are written. Ratios are to its own fp32 file.
    Raises DeviceError where the device fails, ExportError for a model that cannot be exported.
    """
    check_max_drop(max_drop)
    if not settings:
        raise ExportError("tune: no settings to race at; expected at least one")
    own = bundle.files()
    race = partial(_race, device=device, settings=settings, rounds=rounds, runs=runs, say=say)
    with tempfile.TemporaryDirectory(prefix="compress-tune.") as scratch:
        folder = Path(scratch)
        for name in ("fp32", "int8"):
            (folder / name).mkdir()
        say("building fp32 variants")
        most = max(setting.threads for setting in settings)
        exact = fp32_variants(_export(bundle, folder), folder / "fp32", threads=most)
        checked = check_exact(bundle, device, exact)
        tried, taken = race(checked)
        chosen: dict[Precision, Path] = {"fp32": taken.variant.path} if not taken.own else {}
        if evaluator is not None:
            say("building int8 variants")
            kept = list_floats(own["fp32"], own["int8"])
            learned = json.loads((bundle.path / "config.json").read_text(encoding="utf-8")).get(LEARNED_KEY, {})
            built = int8_variants(exact, folder / "int8", keep=kept, calibration=calibration, learned=learned)
            judged = check_int8(bundle, device, exact[0], built, evaluator=evaluator.spread(ROWS), max_drop=max_drop)
            more, taken = race(judged, beside=checked[0])
            tried += more
            chosen |= {"int8": taken.variant.path} if not taken.own else {}
        candidate = bundle.copy_to(folder / "candidate" / bundle.path.name)
        for precision, path in chosen.items():
            candidate = candidate.put(precision, path)
        if "int8" in chosen and evaluator is not None:
            judges = proof or evaluator
            say(f"certifying int8 on {len(judges):,} {split} rows")
            way = next(each.variant for each in reversed(tried) if each.chosen)
            certificate = certify(
                candidate, "int8", judges, max_drop=max_drop, device=device, method=way, split=split, data=data,
                kept=kept,
            )  # fmt: skip
            candidate, _ = attach_certificate(candidate, "int8", certificate)
        candidate = candidate.attach_evidence(tuning=tried)
        if out is not None:
            return Tuned(candidate.copy_to(out), tuple(tried))
        names = [*(FILES[precision] for precision in chosen), REPORT]
        return Tuned(bundle.adopt(candidate, names), tuple(tried))


@dataclass(frozen=True)
class Checked:
    """A variant and what its answers are worth: wrong says why they are not good enough, '' when they are.

    own  it is the bundle's file as it is
    """

    variant: Variant
    difference: float | None
    wrong: str
    agreement: float | None = None
    own: bool = False


def check_exact(bundle: Bundle, device: Device, variants: Sequence[Variant]) -> list[Checked]:
    """Compare the bundle's own file, then the variants, with the first of these, which is as traced: on the device row
    by row, and here in a padded batch."""
    first = variants[0]
    own = Variant("fp32 of the bundle", bundle.files()["fp32"]).counted()
    rows = rows_for(first.path, bundle.manifest.max_length)
    lists: list[EncodedRow] = [{name: array[0].tolist() for name, array in row.items()} for row in rows]
    exact = device.logits(first.path, lists)
    longest = max(row["input_ids"].shape[1] for row in rows)
    padded = {
        name: np.concatenate([np.pad(row[name], ((0, 0), (0, longest - row[name].shape[1]))) for row in rows])
        for name in rows[0]
    }
    largest = max(1.0, *(float(np.abs(each).max()) for each in exact))
    found = []
    for variant in (own, *variants):
        try:
            pairs = zip(device.logits(variant.path, lists), exact, strict=True)
            there = float(np.max([np.abs(one - two).max() for one, two in pairs])) / largest
        except DeviceError as error:  # this form is not for this device; a device that is gone fails the race too
            found.append(Checked(variant, None, str(error), own=variant is own))
            continue
        here = difference(onnx_run(first.path), onnx_run(variant.path), [padded]).relative
        apart = float(np.max([there, here]))  # NaN stays NaN
        wrong = "" if apart <= PARITY else f"its logits differ by {apart:.2g} of the largest; at most {PARITY:g} may"
        found.append(Checked(variant, apart if isfinite(apart) else None, wrong, own=variant is own))
    return found


def check_int8(
    bundle: Bundle,
    device: Device,
    exact: Variant,
    variants: Sequence[Variant],
    *,
    evaluator: "Evaluator",
    max_drop: float,
) -> list[Checked]:
    """Compare each with fp32, on the device, on the rows of the evaluator; the bundle's own first."""
    threshold = bundle.manifest.threshold if bundle.task.unanswerable else None
    logits = partial(compute_logits, device, evaluator=evaluator)
    expected = logits(exact.path)
    own = Variant("int8 of the bundle", bundle.files()["int8"]).counted()
    usual = compare_logits(evaluator, expected, logits(own.path), threshold=threshold)
    found = [Checked(own, usual.difference, "", usual.agreement, own=True)]
    for variant in variants:
        try:
            outcome = compare_logits(evaluator, expected, logits(variant.path), threshold=threshold)
        except CompressError as error:  # does not run there, or answers what is no number
            found.append(Checked(variant, None, str(error)))
            continue
        no_worse = outcome.drop <= usual.drop and outcome.agreement >= usual.agreement
        wrong = "" if no_worse or outcome.near(max_drop) else LOSES.format(
            100 * outcome.drop, 100 * (1 - outcome.agreement), 100 * max_drop
        )  # fmt: skip
        found.append(Checked(variant, outcome.difference, wrong, outcome.agreement))
    return found


def _export(bundle: Bundle, folder: Path) -> Path:
    """Trace the fp32 file from the weights, at the opset of the bundle's own: what every form is made of."""
    from compress.exporters.onnx import to_onnx
    from compress.models.heads import task_class

    own = read_model(bundle.files()["fp32"])
    model = task_class(bundle.task.kind).from_pretrained(bundle.path, use_safetensors=True)
    segments = "token_type_ids" in [each.name for each in own.graph.input]
    to_onnx(model, folder / "traced.onnx", opset=opset_of(own), segments=segments, form=None)
    return folder / "traced.onnx"


def _race(
    checked: Sequence[Checked],
    beside: Checked | None = None,
    *,
    device: Device,
    settings: Sequence[Setting],
    rounds: int,
    runs: int,
    say: Say,
) -> tuple[list[Tried], Checked]:
    """Race the files; return what each took, and the one to ship. `beside`: runs too, as what ratios are to; else that
    is the first, the bundle's own."""
    base = beside or checked[0]
    able = [each for each in checked if not each.wrong or each.own]
    runners = list({each.variant.name: each for each in (base, *able)}.values())
    say(f"racing {len(runners)} files on {device.name}")
    files = {each.variant.name: each.variant.path for each in runners}
    times: dict[str, list[Latency]] = {name: [] for name in files}
    for latency in device.race(files, settings, rounds=rounds, runs=runs):
        times[latency.name].append(latency)
    ratios = {
        name: {
            str(each.setting): each.p50_ms / one.p50_ms
            for each, one in zip(found, times[base.variant.name], strict=True)
        }
        for name, found in times.items()
    }
    taken = _fastest(able, ratios)
    facts = device.facts()
    described = ", ".join(filter(None, (device.name, facts.get("cpu", ""), facts.get("instructions", ""))))
    tried = [
        Tried(
            variant=each.variant.name,
            device=described,
            p50_ms={str(time.setting): time.p50_ms for time in times.get(each.variant.name, ())},
            ratio=ratios.get(each.variant.name, {}),
            difference=each.difference,
            file_mb=each.variant.path.stat().st_size / 1e6,
            passed=not each.wrong,
            chosen=each is taken,
            reason="; ".join(filter(None, (each.wrong, each.variant.warning))),
            agreement=each.agreement,
            noisy=any(time.noisy for time in times.get(each.variant.name, ())),
            entries=each.variant.entries,
            fused=each.variant.fused,
        )
        for each in checked
    ]
    return tried, taken


def _fastest(able: Sequence[Checked], ratios: Mapping[str, Mapping[str, float]]) -> Checked:
    """Choose the right one with the least geometric mean; the bundle's own unless another is GAIN faster."""

    def mean(each: Checked) -> float:
        found = ratios[each.variant.name].values()
        return exp(sum(log(ratio) for ratio in found) / len(found))

    own = next(each for each in able if each.own)
    best = min((each for each in able if not each.wrong), key=mean, default=own)
    return best if mean(best) < (1 - GAIN) * mean(own) else own
