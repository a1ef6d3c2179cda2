"""Ends a run at a fixed moment, as a kill or a power cut would."""

import os
import signal

import torch


def after_a_call():
    """Of the function and at the count that $KILL_AFTER names: "replace 2"."""
    name, count = os.environ["KILL_AFTER"].split()
    module, calls = os if hasattr(os, name) else torch, []
    function = getattr(module, name)

    def call(*args, **options):
        result = function(*args, **options)
        calls.append(args)
        if len(calls) == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(module, name, call)
