"""What a call asks for: its options, the checks of its arguments, and the problem that they pose. No device."""
