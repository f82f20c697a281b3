"""A FAKE of the client `qai_hub` 0.56: its functions, with the service's answers scripted and the files run here.

It shows that we call the client as it is declared and read what it returns. It shows nothing about any phone.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime

__version__ = "0.56.0"


class Error(Exception):
    pass


class UserError(Error):
    pass


@dataclass
class Device:
    name: str = ""
    os: str = ""
    attributes: Any = field(default_factory=list)


@dataclass
class Status:
    success: bool
    code: str
    message: str = ""


@dataclass
class Job:
    """A compile job or an inference job, finished at once."""

    url: str
    status: Status
    target: Any = None
    profile: Mapping[str, Any] | None = None
    outputs: Mapping[str, list[Any]] | None = None

    def wait(self, timeout: int | None = None) -> Status:
        return self.status

    def get_target_model(self) -> Any:
        return self.target

    def download_profile(self) -> Any:
        return self.profile

    def download_output_data(self) -> Any:
        return self.outputs


@dataclass
class Hub:
    """The module `qai_hub`, as an object. times: microseconds of the runs of each profile job in turn; fails: the kind
    of job that fails, and its message; token: whether one is configured."""

    devices: Sequence[Device]
    times: Sequence[Sequence[int]] = ()
    fails: Mapping[str, str] = field(default_factory=dict)
    token: bool = True
    calls: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list)
    Error = Error
    UserError = UserError
    __version__ = __version__

    def set_verbose(self, verbose: bool = True) -> None:
        self.calls.append(("set_verbose", {"verbose": verbose}))

    def get_devices(self, name: str = "", os: str = "", attributes: Any = None) -> list[Device]:
        if not self.token:
            raise UserError("Failed to load client configuration file.\n┌──┐\n│ /home/me/.qai_hub/client.ini │\n└──┘")
        return [device for device in self.devices if name in ("", device.name)]

    def submit_compile_job(
        self,
        model: Any,
        device: Device,
        name: str | None = None,
        input_specs: Mapping[str, Any] | None = None,
        options: str = "",
        single_compile: bool = True,
        calibration_data: Any = None,
        retry: bool = True,
        project: Any = None,
    ) -> Job:
        self.calls.append(("compile", {"input_specs": input_specs, "options": options}))
        fixed = onnx.load(model)
        assert input_specs is not None
        for node in fixed.graph.input:
            shape, kind = input_specs[node.name]
            assert onnx.helper.tensor_dtype_to_np_dtype(node.type.tensor_type.elem_type) == np.dtype(kind)
            for dim, size in zip(node.type.tensor_type.shape.dim, shape, strict=True):
                dim.dim_value = size
        return self._job("compile", target=fixed)

    def submit_inference_job(
        self,
        model: Any,
        device: Device,
        inputs: Any = None,
        name: str | None = None,
        options: str = "",
        retry: bool = True,
        profile: bool = True,
        project: Any = None,
    ) -> Job:
        kind = "infer" if inputs else "profile"
        self.calls.append((kind, {"options": options, "profile": profile}))
        if inputs is None:
            times = self.times[sum(each == "profile" for each, _ in self.calls) - 1]
            summary = {"first_load_time": 250_000, "estimated_inference_time": min(times),
                       "estimated_inference_peak_memory": 30_000_000, "all_inference_times": list(times)}  # fmt: skip
            layers = [{"name": "a", "type": "MatMul", "compute_unit": unit} for unit in ("NPU", "CPU", "NPU")]
            return self._job(kind, profile={"execution_summary": summary, "execution_detail": layers})
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        rows = [dict(zip(inputs, row, strict=True)) for row in zip(*inputs.values(), strict=True)]
        answers = zip(*(session.run(None, row) for row in rows), strict=True)
        names = [node.name for node in session.get_outputs()]
        return self._job(kind, outputs=dict(zip(names, map(list, answers), strict=True)))

    def _job(self, kind: str, **results: Any) -> Job:
        message = self.fails.get(kind, "")
        status = Status(not message, "FAILED" if message else "SUCCESS", message)
        return Job(f"https://hub.example/jobs/{len(self.calls)}", status, **results)


def differences(client: Any) -> list[str]:
    """List the parameters that the fake's functions have and those of a real `qai_hub` do not, or in another order."""
    names = ("get_devices", "set_verbose", "submit_compile_job", "submit_inference_job")
    pairs = {name: (getattr(Hub, name), getattr(client, name)) for name in names}
    pairs |= {f"Job.{name}": (getattr(Job, name), getattr(client.InferenceJob, name))
              for name in ("wait", "download_profile", "download_output_data")}  # fmt: skip
    pairs["Job.get_target_model"] = (Job.get_target_model, client.CompileJob.get_target_model)
    found = []
    for name, (ours, theirs) in pairs.items():
        own = [each for each in inspect.signature(ours).parameters if each != "self"]
        real = [each for each in inspect.signature(theirs).parameters if each != "self"]
        found += [] if own == real[: len(own)] else [f"{name}: {own} is not {real}"]
    return found
