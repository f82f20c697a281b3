"""X-MOD."""

from compress.families.family import Family

FAMILY = Family(
    "xmod",
    # its adapters' outputs are written into the float32 stream in place
    float32_only=True,
    prepared_mask=True,
)
