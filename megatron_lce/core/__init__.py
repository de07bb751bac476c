"""The order of events of both operations: what is launched, saved and exchanged. Knows backends by what they supply."""
