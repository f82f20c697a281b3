"""Measure on Qualcomm AI Hub, which hosts phones, laptops and boards: by the vendor's
client `qai_hub` and your token.

A file is compiled for the device at a fixed shape, then run there by a job, which waits
its turn for minutes. The files, and for logits the encoded rows, are uploaded to
Qualcomm. This follows the interface of qai-hub 0.56 and was never tried on the service
itself.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compress.benchmark import jobs
from compress.benchmark.race import Pass, PassTimes, race_files
from compress.exporters.session import EncodedRow, read_model
from compress.records.latency import DeviceError, Latency, Setting, Sustained

INSTALL = 'pip install "qai-hub>=0.56"'
COMPILE_OPTIONS = "--target_runtime onnx"
"""onnxruntime runs the file there as it does here; its QNN provider takes what the
processor can."""


@contextmanager
def open_hosted(name: str, *, say: Callable[[str], None]) -> Iterator["HostedDevice"]:
    """Open the hosted device of this exact name, such as `Samsung Galaxy S24 (Family)`;
    the last that the service lists, if it is there with several systems. Raises
    DeviceError."""
    try:
        import qai_hub
    except ModuleNotFoundError as error:
        raise DeviceError(
            f"--device aihub:{name}: {error.name} is not installed; {INSTALL}"
        ) from None
    with _explain_errors(qai_hub, name):
        qai_hub.set_verbose(False)
        found = qai_hub.get_devices(name=name)
        if not found:
            names = sorted({device.name for device in qai_hub.get_devices()})
            near = [
                each for each in names if name.casefold() in each.casefold()
            ] or names
            raise DeviceError(
                f"--device aihub:{name}: no such device; there are "
                f"{', '.join(near[:20])}"
            )
        yield HostedDevice(qai_hub, found[-1], say)


@contextmanager
def _explain_errors(hub: Any, name: str) -> Iterator[None]:
    try:
        yield
    except hub.Error as error:
        # the client draws boxes around messages
        reason = " ".join(re.sub("[|│┌┐└┘─]", " ", str(error)).split())[:500]
        hint = (
            " A token is set with: qai-hub configure --api_token TOKEN"
            if isinstance(error, hub.UserError)
            else ""
        )
        raise DeviceError(
            f"--device aihub:{name}: {reason.removesuffix('.').strip()}.{hint}"
        ) from None


@dataclass(frozen=True)
class HostedDevice:
    """A device of AI Hub, as a Device.

    compiled  (file, batch, tokens) -> the model that was compiled of it
    layers    file -> where its layers ran, such as `96 on NPU, 2 on CPU`
    """

    hub: Any
    device: Any
    say: Callable[[str], None]
    compiled: dict[tuple[Path, int, int], Any] = field(default_factory=dict)
    layers: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"aihub:{self.device.name}"

    def facts(self) -> dict[str, str]:
        """Describe the device and, of each file that was timed, the units that its
        layers ran on."""
        attributes = dict(each.partition(":")[::2] for each in self.device.attributes)
        facts = {
            "cpu": attributes.get("chipset", ""),
            "system": f"{attributes.get('os', '')} {self.device.os}".strip(),
            "runtime": f"onnxruntime of AI Hub, qai_hub {self.hub.__version__}",
        }
        return facts | {
            f"layers of {file}": units for file, units in self.layers.items()
        }

    def race(
        self,
        files: Mapping[str, Path],
        settings: Sequence[Setting],
        *,
        rounds: int,
        runs: int,
    ) -> list[Latency]:
        """Time each file by a job in each of two passes; the runs of a job are those of
        all its rounds, one after the other. The vendor draws the inputs, and may choose
        another device of this name for each job."""
        if any(setting.threads != 1 for setting in settings):
            raise DeviceError(
                f"--threads: {self.name} chooses its threads itself; leave the option "
                "out"
            )
        measure = partial(self._run_pass, files)
        return list(
            chain(*race_files(files, settings, rounds, runs, measure, say=self._say))
        )

    def sustain(
        self, files: Mapping[str, Path], setting: Setting, *, seconds: float
    ) -> list[Sustained]:
        raise DeviceError(
            f"--sustain: {self.name} runs jobs of a number of runs, not of a time; "
            "leave the option out"
        )

    def logits(
        self, file: Path, rows: Sequence[EncodedRow]
    ) -> list[NDArray[np.float32]]:
        """Run the rows as one job, padded to the file's length, or to the longest of
        them."""
        jobs.refuse_prompt_length(rows[0], self.name)
        tokens = [len(row["input_ids"]) for row in rows]
        length = _fixed_sizes(file)[1] or max(tokens)
        target = self._compile(file, 1, length)
        feeds = {
            name: [
                np.pad(
                    np.asarray([row[name]]), ((0, 0), (0, length - len(row[name])))
                ).astype(kind)
                for row in rows
            ]
            for name, kind in jobs.input_types(file).items()
        }
        self._say(f"running {len(rows)} rows of {file.name}")
        job = self.hub.submit_inference_job(
            target, self.device, inputs=feeds, name=file.name, profile=False
        )
        answers = self._finish(job, file.name).download_output_data()
        outputs = [
            (node.name, len(node.type.tensor_type.shape.dim))
            for node in read_model(file).graph.output
        ]
        # a vector, not the states of its tokens
        rank = min(dims for _, dims in outputs)
        names = [name for name, dims in outputs if dims == rank]
        tokenwise = rank > 2 or names[0].endswith("_logits")
        logits = []
        for at, count in enumerate(tokens):
            values = [np.asarray(answers[name][at][0], np.float32) for name in names]
            # starts and ends of spans
            row = values[0] if len(values) == 1 else np.stack(values, axis=-1)
            logits.append(row[:count] if tokenwise else row)
        return logits

    def _run_pass(self, files: Mapping[str, Path], this: Pass) -> dict[str, PassTimes]:
        submitted = {}
        for name in this.turns[0]:  # all are submitted before any is waited for
            target = self._compile(files[name], this.setting.batch, this.setting.seq)
            submitted[name] = self.hub.submit_inference_job(
                target,
                self.device,
                name=name,
                options=f"--max_profiler_iterations {this.runs * len(this.turns)}",
            )
        return {
            name: self._read(name, self._finish(job, name).download_profile())
            for name, job in submitted.items()
        }

    def _compile(self, file: Path, batch: int, tokens: int) -> Any:
        """Compile a file for a shape, unless it was compiled before. Raises DeviceError
        for a file of another shape."""
        key = (file.resolve(), batch, tokens)
        if key not in self.compiled:
            if file.suffix != ".onnx":
                raise DeviceError(f"{file}: {self.name} takes .onnx files only")
            types = jobs.input_types(file)
            jobs.parts(file)  # refuses one with weights in other files
            for has, asked, option in zip(
                _fixed_sizes(file), (batch, tokens), ("batch", "seq"), strict=True
            ):
                if has not in (None, asked):
                    raise DeviceError(f"{file}: is of --{option} {has}, not {asked}")
            shapes = {
                name: ((batch, tokens), np.dtype(kind).name)
                for name, kind in types.items()
            }
            self._say(f"compiling {file.name} for {batch} x {tokens} tokens")
            job = self.hub.submit_compile_job(
                str(file),
                self.device,
                name=file.name,
                input_specs=shapes,
                options=COMPILE_OPTIONS,
            )
            self.compiled[key] = self._finish(job, file.name).get_target_model()
        return self.compiled[key]

    def _finish(self, job: Any, what: str) -> Any:
        """Wait for a job, and return it. Raises DeviceError if it failed."""
        self._say(f"waiting for {job.url}")
        status = job.wait()
        if not status.success:
            raise DeviceError(
                f"{self.name}: {what} failed: {status.message or status.code}; see "
                f"{job.url}"
            )
        return job

    def _read(self, name: str, profile: Mapping[str, Any]) -> PassTimes:
        """Read the times of a job's profile, which are in microseconds, and its memory,
        in bytes."""
        summary = profile["execution_summary"]
        units = Counter(layer["compute_unit"] for layer in profile["execution_detail"])
        self.layers[name] = (
            ", ".join(f"{count} on {unit}" for unit, count in units.most_common())
            or "not told"
        )
        self._say(f"{name}: layers: {self.layers[name]}")
        times = summary.get("all_inference_times") or [
            summary["estimated_inference_time"]
        ]
        memory = summary["estimated_inference_peak_memory"]
        return PassTimes(
            init_ms=summary["first_load_time"] / 1e3,
            first_ms=times[0] / 1e3,
            ms=[time / 1e3 for time in times],
            peak_rss_mb=memory / 1e6 if memory else None,
        )

    def _say(self, message: str) -> None:
        self.say(f"{self.name}: {message}")


def _fixed_sizes(file: Path) -> tuple[int | None, int | None]:
    """Return the batch size and the number of tokens that a file is made for; None for
    an open one."""
    batch, tokens = read_model(file).graph.input[0].type.tensor_type.shape.dim[:2]
    return batch.dim_value or None, tokens.dim_value or None
