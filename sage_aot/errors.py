"""The types of errors and warnings.

    SageAotError                        base of every error that sage_aot raises on purpose
    ├── ArgumentError (ValueError)      an argument is not what the call takes
    ├── UnsupportedError (RuntimeError) the call is valid, but this machine or this build has no kernel for it
    ├── CubinError (RuntimeError)       a kernel folder or a file in it is missing, damaged or of another version
    └── LaunchError (RuntimeError)      the driver refused to load or to launch a kernel
    PtxWarning (UserWarning)            the GPU is newer than this sage_aot: its driver has to compile PTX
    CalibrationWarning (UserWarning)    measured thresholds are not taken: their file is damaged or another machine's

Every message says what was expected and what came, and what to do where that does not follow from the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType


class SageAotError(Exception):
    """Base of every error that sage_aot raises on purpose."""


class ArgumentError(SageAotError, ValueError):
    """An argument of a call is not what the call takes."""


class UnsupportedError(SageAotError, RuntimeError):
    """The call is valid, but this machine or this build has no kernel for it."""

    # not set by an initializer: dynamo follows none of exceptions, and its own error would hide this one's message
    reasons: Mapping[str, str] = MappingProxyType({})
    """Per arch of the kernel folder, why the GPU cannot run its kernels; empty where something else is unsupported."""


class CubinError(SageAotError, RuntimeError):
    """A kernel folder or a file in it, a cubin or PTX, is missing, damaged or of another version."""


class LaunchError(SageAotError, RuntimeError):
    """The driver refused to load or to launch a kernel."""


class PtxWarning(UserWarning):
    """The GPU is newer than this sage_aot: its kernels are PTX, which the driver has to compile."""


class CalibrationWarning(UserWarning):
    """A file of `sage-aot calibrate` is not taken: it is damaged, or of another GPU, driver, torch or sage_aot."""
