"""Names that a person can say and remember, in place of hashes."""

from __future__ import annotations

_KINDS_TEXT = (
    "amber ashen azure bold brave brief bright brisk broad calm clear coral crisp dark deep "
    "dense dry dusky early even fair far fine firm fleet fond free fresh full gentle gilt "
    "glad golden grand green grey hardy high hollow humble inner ivory keen kind late lean "
    "light live lone long loud low lucid lunar merry mild misty near noble north olive open "
    "outer pale"
)
_THINGS_TEXT = (
    "anchor arch bay beacon birch boat brook buoy canal cape cedar cliff cloud coast cove "
    "crane creek dale delta dock dune eagle elm falcon fern field fjord ford forest gale "
    "geyser glen grove gull harbor haven heron hill inlet isle jetty keel kelp lagoon lake "
    "lark ledge lily marsh meadow mesa mill moor moss oak otter pearl pier pine pond port "
    "quay reef rill"
)
SPOKEN_KINDS, SPOKEN_THINGS = _KINDS_TEXT.split(), _THINGS_TEXT.split()


def spoken_name(key: bytes) -> str:
    """Returns a name such as "calm-otter-17" for a hash: the same one for the same hash, one of
    409,600 in total. Raises ValueError for fewer than four bytes."""
    if len(key) < 4:
        raise ValueError(f"a name needs four bytes, not {len(key)}")
    number = int.from_bytes(key[:4], "big")
    number, kind = divmod(number, len(SPOKEN_KINDS))
    number, thing = divmod(number, len(SPOKEN_THINGS))
    return f"{SPOKEN_KINDS[kind]}-{SPOKEN_THINGS[thing]}-{number % 100}"
