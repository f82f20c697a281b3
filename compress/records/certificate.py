"""The records of what was proved of a file, and how: plain, kept in report.json and in the ONNX file's own metadata."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from compress.records.class_scores import ClassChange


@dataclass(frozen=True)
class Certificate:
    """One file against the fp32 file it came from, on the same rows, on one device.

    That is the fp32 file of the same bundle; of a model trained again for int8, the one before that training.

    artefact     the file inside the bundle, as onnx/model_quantized.onnx
    method       how it was made: `dynamic int8`, `static int8, percentile 99.99`, ...
    metric       the task's score; before: of the fp32 file, after: of this one
    max_drop     how much lower the score may be, in the score's own unit (0.005 is half a point)
    agreement    share of rows answered alike; Pearson's r of a regression
    max_logit_difference   the largest |logit of this file - logit of fp32|
    rows, split, data      on how many examples, of which split, of which data
    device, runtime        where it ran, and on what: int8 answers differ between processors and runtimes
    kept         products left in float32 to get there; kept_ms, kept_mb: what they cost beside the same file with none
                 (p50 of one forward at the setting kept_at, 10^6 bytes); None where that was not measured
    classes      the recall of each class, of the fp32 file and of this one
    sha256       of the whole file that carries this certificate, so '' in that file itself; exact_sha256: of the fp32
                 file it was compared with
    left         nodes that the processor does not take, which run on its CPU; context_mb: 10^6 bytes of the binary that
                 it loads, where one was made
    certified    whether the drop is within max_drop and no class has collapsed; reason says why not, or with what to
                 spare
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

    @property
    def drop(self) -> float:
        """Subtract the score after from that before; negative where the file scores better."""
        return self.before - self.after

    @staticmethod
    def from_json(text: str) -> "Certificate":
        """Read the certificate in an ONNX file's metadata."""
        from pydantic import TypeAdapter

        return TypeAdapter(Certificate).validate_json(text)


@dataclass(frozen=True)
class Sensitivity:
    """The cost of quantising one matrix product.

    product  the graph's node; layer: what it is to a reader, as `layer 3 feed-forward out`
    error    mean squared difference of the logits from fp32's, with this product alone quantised
    share    of the whole file's error that goes when this product alone is left in float32; can be negative
    kept     whether it stays in float32 in the file that ships
    """

    product: str
    layer: str
    error: float
    share: float
    kept: bool


@dataclass(frozen=True)
class VariantResult:
    """One variant of a graph in a race, on one device.

    variant      `raw, dynamic int8`; entries: session settings it ran with
    p50_ms       setting name (`1 thread, batch 1, 128 tokens`) -> median; ratio: setting -> p50 / p50 of the first one
    difference   the largest |logit difference| from the model; None where it does not run, or answers no numbers
    agreement    of answers with fp32's, where rows were given
    fused        operator -> how many of it onnxruntime runs
    passed       parity held; reason: why not, or a warning, as a fusion that should have been there and was not
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
