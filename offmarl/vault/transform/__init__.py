"""The parts of transforms: selection from sources, changes, copying and lineage."""
