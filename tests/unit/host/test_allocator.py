"""Free parts of GPU memory are joined, unless the user or WSL decides otherwise."""

import os
import subprocess
import sys

import pytest

from qerl.host.allocator import join_free_memory
from tests.jobs import train_job  # noqa: F401
