"""Place the weights of frozen models that do not fit into free memory: accelerate keeps
as many layers as fit, and reads the others from the checkpoint's files in each forward
pass.

Imports neither torch nor transformers until something is placed.
"""

import ctypes
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from compress.data.cache import home
from compress.machine import measure_memory

if TYPE_CHECKING:
    import torch
    from torch import nn

USED_SHARE: Final = 0.7
"""The share of free memory for weights if they do not all fit; the rest is for
activations and the layer that is being read."""


def plan_placement(size: int) -> dict[str, Any]:
    """Return the options of `from_pretrained` for weights of `size` bytes that are not
    trained: none if the device of this process can hold them."""
    import torch
    from accelerate import PartialState

    device = PartialState().device
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free: dict[int | str, int] = {"cpu": measure_memory()[1] // sharing}
    fits = size <= free["cpu"] or not free["cpu"]
    if device.type == "cuda":
        on_gpu, _ = torch.cuda.mem_get_info(device)
        free = {device.index or 0: on_gpu, **free}
        fits = size <= on_gpu
    if fits:
        return {}
    _return_freed_layers()
    folder = home() / "offload"
    folder.mkdir(parents=True, exist_ok=True)
    most = {place: int(USED_SHARE * each) for place, each in free.items()}
    return {"device_map": "auto", "max_memory": most, "offload_folder": str(folder)}


def _return_freed_layers() -> None:
    """Let glibc return the memory of every layer that is read, by a fixed mmap
    threshold: its dynamic one rises to 32 MB, and memory then grows to several times a
    layer."""
    threshold = -3  # M_MMAP_THRESHOLD of malloc.h
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(threshold, 1 << 20)


def is_dispatched(model: "nn.Module") -> bool:
    """Return True for a model of which accelerate holds only some layers in memory."""
    return len(set(getattr(model, "hf_device_map", {}).values())) > 1


def to_device(model: "nn.Module", device: "torch.device | str") -> None:
    """Move a model to a device, unless accelerate has placed its layers."""
    if not is_dispatched(model):
        model.to(device)


def input_device(model: "nn.Module") -> "torch.device":
    """Return the device that a model takes its inputs on."""
    import torch

    device = next(model.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device


def pass_on(model: "nn.Module", name: str) -> None:
    """Let accelerate pass an argument of the model on to its layers unchanged. It
    copies lists to move their tensors, and what layers append to a copy is lost."""
    from accelerate.hooks import AlignDevicesHook

    for module in model.modules():
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            if isinstance(each, AlignDevicesHook):
                known = each.skip_keys or []
                known = [known] if isinstance(known, str) else known
                each.skip_keys = [*known, name]
