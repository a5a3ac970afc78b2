"""The process of one worker: answers what `Processes` asks."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from multiprocessing.connection import Connection
from textwrap import shorten

import torch

from lightning_rl.actors.shared_memory import SharedWeights, SlotWriter
from lightning_rl.cpu_threads import one_thread
from lightning_rl.envs.processes import live_and_die_with_the_parent

RAN_THE_PROGRAM = 78
"""Exit status of a process that found itself running the program from its beginning."""
ERROR = "error"
"""Stands where an answer has its time, if the worker raised."""


def leave_the_program() -> None:
    """End a process that was spawned for a worker and, on its way there, imports a program that trains as it is imported."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        os._exit(RAN_THE_PROGRAM)


def work(index: int, restarts: int, made_of: bytes, weights_name: str, pipe: Connection) -> None:
    """Build a worker and answer, until told to close or until the other end of the pipe is gone."""
    live_and_die_with_the_parent()
    torch.set_num_threads(1)  # the others have the other cores
    one_thread()
    worker, writers = None, dict[int, SlotWriter]()
    try:
        build, network = pickle.loads(made_of)
        weights = SharedWeights(network, weights_name)
        while (request := pipe.recv()) is not None:
            slot, method, arguments, slot_name = request
            if worker is None:  # which takes seconds; weights are read behind it
                worker = build(index, restarts, network)
            version, began = weights.read(network), time.monotonic()
            value = getattr(worker, method)(*arguments)
            answer = writers.setdefault(slot, SlotWriter()).dump(slot_name, value)
            pipe.send((time.monotonic(), version, *answer[:2], answer[2], time.monotonic() - began))
    except (EOFError, ConnectionError):
        pass
    except Exception as error:  # an environment of others may raise anything
        line = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" …")
        pipe.send((ERROR, line, traceback.format_exc()))
    finally:
        if worker is not None:
            worker.close()
        for writer in writers.values():
            writer.close()
