"""Imports that take seconds. The process from which the others are forked imports this module, if it can."""

import contextlib
import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import snapstore.convert
    import snapstore.dcp

    for name in ("transformers", "accelerate", "lightning"):
        with contextlib.suppress(ImportError, snapstore.CapabilityError):
            __import__(f"snapstore.integrations.{name}")
