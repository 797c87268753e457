"""What can go wrong, as types.

Every message says what was expected and what came, and what to do where that does not follow from the two.
"""


class SageAotError(Exception):
    """Base of every error that sage_aot raises on purpose."""


class ArgumentError(SageAotError, ValueError):
    """An argument of a call is not what the call takes."""


class UnsupportedError(SageAotError, RuntimeError):
    """The call is valid, but this machine or this build has no kernel for it."""


class CubinError(SageAotError, RuntimeError):
    """A kernel folder or a cubin in it is missing, damaged or of another version."""


class LaunchError(SageAotError, RuntimeError):
    """The driver refused to load or to launch a kernel."""


class PtxWarning(UserWarning):
    """The kernels for this GPU are PTX, which its driver has to compile: it is newer than this sage_aot."""
