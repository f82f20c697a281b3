"""A FAKE `adb` and phone: a script that answers as they do, and logs its calls.

It shows that we use adb as its manual says and parse its output. It shows nothing about any phone.

The JSON file STAND_IN_ADB scripts it: `devices` (serial -> state), `gone_after` (calls until the phone is unplugged),
`prints` (the output of the program on the phone), `times` (its file of runs), `log` (the file of calls).
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GETPROP = """[ro.product.manufacturer]: [Acme]
[ro.product.model]: [Phone 9]
[ro.soc.manufacturer]: [Foundry]
[ro.soc.model]: [F900]
[ro.build.version.release]: [15]
[ro.build.version.sdk]: [35]
[ro.product.cpu.abi]: [arm64-v8a]
[ro.build.fingerprint]: [acme/phone9:15/AB1:user/release-keys]
"""
THERMAL = """IsStatusOverride: false
Thermal Status: 0
Cached temperatures:
\tTemperature{mValue=96.0, mType=0, mName=CPU7, mStatus=3}
HAL Ready: true
Current temperatures from HAL:
\tTemperature{mValue=41.5, mType=0, mName=CPU0, mStatus=0}
\tTemperature{mValue=47.25, mType=0, mName=CPU7, mStatus=0}
\tTemperature{mValue=52.0, mType=3, mName=skin, mStatus=0}
"""
PERF_TEST = """Setting intra_op_num_threads to 2
Session creation time cost: 0.0412 s
First inference time cost: 12 ms
Total inference requests: 20
Peak working set size: 61865984 bytes
"""
SECONDS = (0.009, 0.008, 0.007, 0.006, 0.006, 0.004, 0.005, 0.006)
"""Of every run; the first five are warming up."""
TIMES = "".join(f"0-1x8,{each},61865984,25,{at}\n" for at, each in enumerate(SECONDS)) + "\nMin Latency: 0.004 s\n"


def _shell(words: Sequence[str], known: Mapping[str, Any]) -> str:
    line = " ".join(words)
    answers = {
        "getprop": GETPROP,
        "cat /sys": "schedutil\nschedutil\n",
        "dumpsys thermalservice": THERMAL,
        "dumpsys battery": "  level: 80\n  temperature: 312\n",
        "sh -c": known["prints"],
        "cat /data": known["times"],
    }
    return next((answer for start, answer in answers.items() if line.startswith(start)), "")


def _main(words: list[str]) -> None:
    known = json.loads(Path(os.environ["STAND_IN_ADB"]).read_text())
    log = Path(known["log"])
    with log.open("a") as file:
        file.write(json.dumps(words) + "\n")
    if words == ["devices"]:
        print("List of devices attached\n" + "".join(f"{name}\t{state}\n" for name, state in known["devices"].items()))
    elif words == ["version"]:
        print("Android Debug Bridge version 0 (stand-in)")
    elif words[0] == "-s":
        if len(log.read_text().splitlines()) > known.get("gone_after", 10**6):
            sys.exit(f"error: device '{words[1]}' not found")
        print(_shell(words[3:], known) if words[2] == "shell" else "", end="")


if __name__ == "__main__":
    _main(sys.argv[1:])
