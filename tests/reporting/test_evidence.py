"""Evidence is kept with the bundle: what is newer replaces what it proves anew, all else stays."""

from dataclasses import replace
from pathlib import Path

import pytest

from compress.errors import BundleError
from compress.exporters.artifact import Bundle
from compress.records.certificate import Certificate, Sensitivity, VariantResult
from compress.records.run_report import Report
from tests.exporters.test_bundle import write
from tests.reporting import sample

HERE = Certificate(
    artefact="onnx/model_quantized.onnx", method="dynamic int8", metric="accuracy", before=0.9, after=0.89,
    max_drop=0.005, agreement=0.97, max_logit_difference=0.2, rows=100, split="dev", data="reviews", device="local",
    runtime="onnxruntime 1.31", certified=False, reason="0.010 lower, 0.005 allowed", date="2026-11-21",
)  # fmt: skip
WON = VariantResult("raw", "local", {"1 thread": 2.0}, {"1 thread": 1.0}, 1e-6, 5.0, passed=True, chosen=True)


def test_a_bundle_without_a_report_gets_one_that_says_what_it_is(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle").attach_evidence(certificates=[HERE])
    report = Report.from_json(bundle.path / "report.json")
    assert report.certificates == (HERE,)
    assert (report.kind, report.metric, report.labels, report.rows) == ("classification", "accuracy", 2, ())
    assert Bundle.load(bundle.path) == bundle, "the manifest knows it"


def test_evidence_replaces_what_it_proves_anew(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle").attach("report.json", sample.report().to_json())
    there = replace(HERE, device="browser", runtime="onnxruntime-web 1.30")
    better = replace(HERE, after=0.9, certified=True, reason="nothing lost")
    hurt = Sensitivity("/layer.0/MatMul", "layer 0 query", 0.1, 0.5, kept=True)
    raced = [WON, replace(WON, device="browser")]
    bundle = bundle.attach_evidence(certificates=[HERE, there], sensitivity=[hurt], tuning=raced)
    report = bundle.attach_evidence(certificates=[better], tuning=[replace(WON, variant="merged")]).report()
    assert report.certificates == (better, there)
    assert report.sensitivity == (hurt,)
    assert [(each.variant, each.device) for each in report.tuning] == [("raw", "browser"), ("merged", "local")]
    assert report.rows == bundle.report().rows != ()


def test_figures_that_are_none_are_refused_and_nothing_is_kept(tmp_path: Path) -> None:
    bundle = write(tmp_path / "bundle")
    with pytest.raises(BundleError, match="certificate: after is nan"):
        bundle.attach_evidence(certificates=[replace(HERE, after=float("nan"))])
    assert Bundle.load(bundle.path) == bundle
