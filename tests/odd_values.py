"""Values that strangers may send, and that no message may choke on."""

from __future__ import annotations

import functools
from typing import Any

DEEP: Any = functools.reduce(lambda inner, _: [inner], range(5000), 0)
"""A list that nothing can write out: JSON can, and a stranger may send it."""
