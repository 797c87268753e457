"""The problem that a call poses: its options, the checks of its arguments, and the resulting problem. Touches no
device."""
