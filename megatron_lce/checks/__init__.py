"""Checks of what a caller passes."""
