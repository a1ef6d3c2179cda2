"""Ends a run at a random moment, measured in processor time: a busy machine changes nothing."""

import os
import random
import signal

import torch


def soon_after_a_checkpoint():
    """When one was written or read, the kernel is told to end the process within 0.1 s."""

    def armed(function):
        def call(*args, **options):
            result = function(*args, **options)
            if "checkpoint_" in str(args[-1]):
                signal.setitimer(signal.ITIMER_PROF, random.uniform(0.001, 0.1))
            return result

        return call

    os.replace, torch.load = armed(os.replace), armed(torch.load)
