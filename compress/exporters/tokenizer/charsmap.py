"""Read SentencePiece's character map, which tokenizer.json calls `Precompiled`, and
describe how tokenizers applies it.

A map is a double-array trie of UTF-8 (the units of Darts-clone) and the replacements of
its keys. tokenizers cuts a text into grapheme clusters. A cluster of several characters
and at most five bytes is replaced as a whole by the value of the shortest key that it
begins with, if there is one. In all other clusters, every character is looked up
separately.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import normalizers

from compress.exporters.tokenizer.wordpiece import UNICODE, isolate, list_blocks

CLUSTER_BYTES: Final = 5
"""The most bytes of a cluster that is looked up as a whole."""

CONTROL, OTHER_CHARACTER, EXTENDS, PREPENDS, RETURN, FEED = range(6)
"""Classes of characters: always alone; ordinary; extends the cluster before it; begins
a cluster with its successor; and two that form one cluster in this order."""
CHARSMAP_CLASSES: Final = FEED + 1

JOINED: Final = np.array(
    [
        [
            (here == EXTENDS and before not in (CONTROL, RETURN, FEED))
            or (before == PREPENDS and here not in (CONTROL, RETURN, FEED))
            or (before, here) == (RETURN, FEED)
            for here in range(CHARSMAP_CLASSES)
        ]
        for before in range(CHARSMAP_CLASSES)
    ]
)
"""Whether characters of two classes [before, after] belong to one cluster."""

LEAF = 1 << 8
LONG_BIT = 1 << 9
LAST_BIT = 1 << 31


def read_charsmap(data: bytes) -> dict[str, str]:
    """Read the keys of at most five bytes, except keys that begin with a shorter key,
    and their replacements."""
    size = int.from_bytes(data[:4], "little")
    units = np.frombuffer(data[4 : 4 + size], "<u4").astype(np.int64)
    texts = data[4 + size :]
    base = np.arange(len(units)) ^ ((units >> 10) << ((units & LONG_BIT) >> 6))
    symbols = np.arange(1, 256)
    found = dict[str, str]()
    open_nodes = [(b"", int(base[0]))]
    while open_nodes:
        key, node = open_nodes.pop()
        places = node ^ symbols
        places = places[places < len(units)]
        for place in places[
            units[places] & (LAST_BIT | 0xFF) == places ^ node
        ].tolist():
            longer = key + bytes([place ^ node])
            if units[place] & LEAF:
                start = int(units[base[place]]) & (LAST_BIT - 1)
                found[longer.decode()] = texts[start : texts.index(0, start)].decode()
            elif len(longer) < CLUSTER_BYTES:
                open_nodes.append((longer, int(base[place])))
    return found


def write_charsmap(keys: Mapping[str, str]) -> bytes:
    """Write a map; no key begins with another key."""
    # Every prefix of a key has 256 units, so that its base is a multiple of 256
    nodes = {b"": 1}
    for key in keys:
        for end in range(1, len(key.encode())):
            nodes.setdefault(key.encode()[:end], len(nodes) + 1)
    leaves = 256 * (len(nodes) + 1)
    units = np.zeros(leaves + 256 * (1 + len(keys) // 256), np.int64)
    units[0] = 256 << 10

    def place_of(name: bytes) -> int:
        return 256 * nodes[name[:-1]] + name[-1]

    for name, number in nodes.items():
        if name:
            place = place_of(name)
            units[place] = (place ^ 256 * number) << 10 | name[-1]
    texts = b""
    for leaf, (key, text) in enumerate(keys.items(), leaves):
        place = place_of(key.encode())
        units[place] = (place ^ leaf) << 10 | LEAF | key.encode()[-1]
        units[leaf] = LAST_BIT | len(texts)
        texts += text.encode() + b"\0"
    return (
        (4 * len(units)).to_bytes(4, "little") + units.astype("<u4").tobytes() + texts
    )


HANGUL: Final = (range(0x1100, 0x1200), range(0xA960, 0xA980), range(0xAC00, 0xD800))
PICTURES: Final = "©®"
"""The only characters of two bytes that a zero-width joiner joins to a pictogram."""


def list_odd_keys(keys: Iterable[str]) -> list[str]:
    """List the keys that may begin inside a cluster, or in a longer one, by rules that
    `JOINED` lacks."""
    classes = find_classes()
    return [
        key
        for key in keys
        if classes[ord(key[0])] == PREPENDS
        or key[0] in PICTURES
        or any(ord(key[0]) in some for some in HANGUL)
    ]


def is_cluster(text: str) -> bool:
    """Check whether a text is a cluster, or the beginning of one."""
    classes = find_classes()[list(map(ord, text))]
    return bool(JOINED[classes[:-1], classes[1:]].all())


@lru_cache(maxsize=1)
def find_classes() -> NDArray[np.uint8]:
    """Find the class of every character from how tokenizers treats it in three texts
    (takes 2 s)."""
    probe = normalizers.Precompiled(
        write_charsmap({"a": "b", "\u0301\u0301": "c", "e\u0301": "d"})
    )
    classes = np.full(UNICODE, OTHER_CHARACTER, np.uint8)
    for block in list_blocks():
        after, before, around = (
            isolate(
                [text.replace("?", each) for each in block],
                probe.normalize_str,
                between="\x01\u200b",
            )
            for text in ("a?", "?\u0301\u0301", "?e\u0301")
        )
        for character, *made in zip(block, after, before, around, strict=True):
            if made[0] == "b":
                classes[ord(character)] = EXTENDS
            elif made[1].endswith("c"):
                classes[ord(character)] = CONTROL
            elif not made[2].endswith("d"):
                classes[ord(character)] = PREPENDS
    classes[ord("\r")] = RETURN
    classes[ord("\n")] = FEED
    return classes
