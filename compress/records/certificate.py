"""The evidence for a file: its certificates, the sensitivity of its layers, and the
race it won.

Kept in report.json; a certificate also in the metadata of its ONNX file.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from compress.records.class_scores import ClassChange


@dataclass(frozen=True)
class Saturation:
    """The answers of an int8 file on x86 processors without VNNI, computed on another.

    There the products of two neighbours are added in 16 bits: see
    `compress.quantization.saturation`. All defaults: no sum of the file can leave 16
    bits, so that every processor computes the same sums.

    products    the number of matrix products of which a sum can leave 16 bits
    shares      product -> the share of its sums of two that did, if any
    rows        the number of examples
    changed     examples with another answer than with exact sums; None for a regression
    difference  the largest |logit difference| from exact sums
    before, after   the score with exact sums, and without VNNI
    """

    products: int = 0
    shares: Mapping[str, float] = field(default_factory=dict)
    rows: int = 0
    changed: int | None = 0
    difference: float = 0.0
    before: float = 0.0
    after: float = 0.0

    def describe(self, metric: str) -> str:
        """Describe what is lost in a sentence; '' if no sum can leave 16 bits."""
        if not self.products:
            return ""
        if not self.shares:
            return (
                "On x86 processors without VNNI its sums can leave 16 bits, and did on "
                f"none of {self.rows:,} rows."
            )
        changed = ""
        if self.changed is not None:
            plural = "s" * (self.changed != 1)
            changed = f"changes {self.changed:,} answer{plural}, "
        return (
            f"On x86 processors without VNNI it answers differently: on {self.rows:,} "
            f"rows this {changed}moves logits by up to {self.difference:.2g} and "
            f"yields {metric} {self.after:.4f} instead of {self.before:.4f}."
        )


@dataclass(frozen=True)
class Certificate:
    """A comparison of one file with the fp32 file that it was made from, on the same
    rows and one device.

    That is the fp32 file of the same bundle; for a model that was trained again for
    int8, it is the one before that training.

    artefact     path of the file inside the bundle, such as onnx/model_quantized.onnx
    method       how it was made: `dynamic int8`, `static int8, percentile 99.99`, ...
    metric       the score of the task; before: of the fp32 file, after: of this file
    max_drop     the largest allowed drop, in the unit of the score (0.005 is half a
                 point)
    agreement    share of rows with the same answer; Pearson's r for a regression
    max_logit_difference   the largest |logit of this file - logit of fp32|
    rows, split, data      the number of examples, and where they are from
    device, runtime        where it ran: int8 answers differ between processors and
                           runtimes
    kept         matrix products left in float32; kept_ms, kept_mb: what they cost
                 compared with leaving none (p50 of one forward at the setting kept_at,
                 and 10^6 bytes); None if that was not measured
    classes      the recall of each class, before and after
    sha256       of the file with this certificate inside, hence '' in that file;
                 exact_sha256: of the fp32 file
    left         nodes that the NPU does not support, which run on the CPU; context_mb:
                 10^6 bytes of the binary that it loads, if one was made
    saturation   what an int8 file answers on x86 processors without VNNI; None if that
                 was not computed
    chose        whether the same rows also chose how the file is made, so that the
                 score after is slightly optimistic
    certified    whether the drop is within max_drop and no class has collapsed; reason:
                 why not, or by what margin
    date         ISO 8601
    """

    artefact: str
    method: str
    metric: str
    before: float
    after: float
    max_drop: float
    agreement: float
    max_logit_difference: float
    rows: int
    split: str
    data: str
    device: str
    runtime: str
    certified: bool
    reason: str
    date: str
    kept: tuple[str, ...] = ()
    sha256: str = ""
    exact_sha256: str = ""
    classes: tuple[ClassChange, ...] = ()
    kept_ms: float | None = None
    kept_mb: float | None = None
    kept_at: str = ""
    left: tuple[str, ...] = ()
    context_mb: float | None = None
    saturation: Saturation | None = None
    chose: bool = False

    @property
    def drop(self) -> float:
        """Return the score before minus the score after; negative if the file scores
        better."""
        return self.before - self.after

    @property
    def warning(self) -> str:
        """Return a sentence on what the file loses on other processors; '' if nothing,
        or unknown."""
        return self.saturation.describe(self.metric) if self.saturation else ""

    @property
    def place(self) -> str:
        """Return the number and the split of the rows, and whether they chose the
        file."""
        rows = f"{self.rows:,} {self.split} rows"
        return f"{rows}, which also chose how int8 is made" if self.chose else rows

    @staticmethod
    def from_json(text: str) -> "Certificate":
        """Read the certificate in an ONNX file's metadata."""
        from pydantic import TypeAdapter

        return TypeAdapter(Certificate).validate_json(text)


@dataclass(frozen=True)
class Sensitivity:
    """The effect of quantising one matrix product.

    product  name of the node in the graph; layer: its description, such as `layer 3
             feed-forward out`
    error    mean squared difference of the logits from fp32's, with only this product
             quantised
    share    of the file's error that disappears when only this product is left in
             float32; can be negative
    kept     whether it is left in float32 in the file that ships
    """

    product: str
    layer: str
    error: float
    share: float
    kept: bool


@dataclass(frozen=True)
class VariantResult:
    """One variant of a graph in a race on one device.

    variant      such as `raw, dynamic int8`; entries: the session settings it ran with
    p50_ms       setting (`1 thread, batch 1, 128 tokens`) -> median; ratio: setting ->
                 p50 / p50 of the first variant
    difference   the largest |logit difference| from the model; None if it does not run
                 or returns no numbers
    agreement    with the answers of fp32, if there were rows to compare
    fused        operator -> number of its nodes that onnxruntime runs
    passed       whether parity held; reason: why not, or a warning, such as a fusion
                 that is missing
    """

    variant: str
    device: str
    p50_ms: Mapping[str, float]
    ratio: Mapping[str, float]
    difference: float | None
    file_mb: float
    passed: bool
    chosen: bool
    reason: str = ""
    agreement: float | None = None
    noisy: bool = False
    entries: Mapping[str, str] = field(default_factory=dict)
    fused: Mapping[str, int] = field(default_factory=dict)
