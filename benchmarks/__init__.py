"""What this project costs, measured beside something else in the same run."""

import multiprocessing
from typing import Final

FORK: Final = multiprocessing.get_context("fork")
"""How the clients of a measurement begin: with what their parent has imported. Python 3.14 would import it in each."""
