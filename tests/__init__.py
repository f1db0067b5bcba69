"""Tests of the package. Their processes have one thread each, as a fork waits forever for OpenMP's other threads."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
