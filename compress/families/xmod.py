"""X-MOD."""

from compress.families.family import Family

FAMILY = Family(
    "xmod",
    float32_only=True,  # its adapters' outputs are written into the float32 stream in place
    prepared_mask=True,
)
