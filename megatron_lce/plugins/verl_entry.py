"""verl's entry point, which all its processes load: `VERL_USE_EXTERNAL_PLUGINS=megatron_lce` imports the plugin."""

import logging
import os

if "megatron_lce" in [name.strip() for name in os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "").lower().split(",")]:
    try:
        import megatron_lce.plugins.verl  # noqa: F401
    except (ImportError, RuntimeError) as error:  # verl drops what an entry point raises
        logging.getLogger("megatron_lce.plugins").error("megatron_lce is not in use: %s", error)
        raise
