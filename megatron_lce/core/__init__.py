"""Core orders the launches, savings and collectives of both operations. It knows backends by their protocol alone."""
