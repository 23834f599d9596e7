"""KV that a prefill engine sends ahead of its hand-over.

On the prefill engine `desk.PushDesk` says what to send and `writers.PushWriters` sends it. On the
decode engine `landing_desk.LandingDesk` gives leave, and what arrives waits in
`landing_area.LandingArea`; `landings.LandingRegistry` knows who may write where.
"""

from __future__ import annotations

__all__: list[str] = []
