"""The checker of shapes and types at run time, for ``--jaxtyping-packages`` in pyproject.toml."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int will do for a float
