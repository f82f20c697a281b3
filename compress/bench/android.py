"""What an Android phone says of itself: properties, governors, temperatures. Text in, facts out."""

import re
from collections.abc import Mapping

CPU_SENSOR = 0
"""mType of a processor's sensor in `dumpsys thermalservice`."""


def properties(printed: str) -> dict[str, str]:
    """Of `getprop`: `[ro.product.model]: [Pixel 8]`."""
    return dict(re.findall(r"^\[([^\]]+)\]: \[(.*)\]\s*$", printed, re.MULTILINE))


def facts(known: Mapping[str, str], governors: str, celsius: float | None, client: str) -> dict[str, str]:
    """Model, processor, system and fingerprint; what the phone does not tell is left out."""
    soc = " ".join(known.get(name, "") for name in ("ro.soc.manufacturer", "ro.soc.model")).strip()
    maker, model = known.get("ro.product.manufacturer", ""), known.get("ro.product.model", "")
    release, level = known.get("ro.build.version.release", ""), known.get("ro.build.version.sdk", "")
    told = {
        "device": f"{maker} {model}".strip(),
        "cpu": soc or known.get("ro.board.platform", ""),
        "abi": known.get("ro.product.cpu.abi", ""),
        "governor": " ".join(sorted(set(governors.split()))),
        "temperature": "" if celsius is None else f"{celsius:.0f} C",
        "system": f"Android {release} (API {level})" if release else "",
        "fingerprint": known.get("ro.build.fingerprint", ""),
        "adb": client,
    }
    return {name: value for name, value in told.items() if value}


def temperature(thermal: str, battery: str) -> float | None:
    """The hottest of the processor's sensors in `dumpsys thermalservice`; else the battery's, of `dumpsys battery`."""
    sensors = re.findall(r"Temperature\{mValue=([\d.]+), mType=(-?\d+),", thermal)
    hot = [float(value) for value, kind in sensors if int(kind) == CPU_SENSOR and 0 < float(value) < 150]
    if hot:
        return max(hot)
    tenths = re.search(r"^\s*temperature: (\d+)\s*$", battery, re.MULTILINE)
    return int(tenths[1]) / 10 if tenths else None
