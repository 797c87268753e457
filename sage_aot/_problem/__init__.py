"""What a call asks for: its options, the checks of its arguments, and the resulting problem. Touches no device."""
