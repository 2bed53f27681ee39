"""Runs what is planned, in processes side by side."""

import concurrent.futures
import multiprocessing
import queue

from reproduce import worker


def run_all(runs, processes, store, told, failed):
    """Trains all runs and stores each as soon as it is done.

    Args:
        runs: those not stored yet.
        processes: how many side by side.
        store: a `Store`.
        told: is called with {index of a run: share of it that is done, None when it is over}, again and again.
        failed: is called with a run and its exception.
    """
    worker.environment()
    context = multiprocessing.get_context("spawn")
    notes = context.Queue()
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, worker.start, (notes,))
    try:
        waiting = {pool.submit(worker.perform, index, run): index for index, run in enumerate(runs)}
        while waiting:
            over, _ = concurrent.futures.wait(waiting, 0.2, concurrent.futures.FIRST_COMPLETED)
            changes = _drained(notes)
            for future in over:
                index = waiting.pop(future)
                changes[index] = None
                if future.exception() is None:
                    store.save(runs[index], *future.result())
                else:
                    failed(runs[index], future.exception())
            told(changes)
    finally:
        pool.shutdown(cancel_futures=True)


def _drained(notes):
    changes = {}
    while True:
        try:
            index, share = notes.get_nowait()
        except queue.Empty:
            return changes
        changes[index] = share
