"""The version of offmarl, for modules below the package's front."""

__version__ = "0.1.0"
