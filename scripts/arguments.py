"""How the programs' `--help` is laid out."""

import argparse


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The description as it was written, and the default behind each option's text."""
