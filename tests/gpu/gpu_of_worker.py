"""The GPU that a process of pytest-xdist takes for device 0, where there are several: another one for each process in
turn, so that all of them have memory. Import this before anything that starts CUDA."""

from __future__ import annotations

import os

import torch


def rotate_gpus() -> None:
    """Make another GPU device 0 in each process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = listed.split(",") if listed else [str(gpu) for gpu in range(torch.cuda.device_count())]
    first = int(worker) % max(len(gpus), 1)
    if first:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


rotate_gpus()
