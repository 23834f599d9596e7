"""`make chaos`: two prefill and two decode engines over NIXL, requests, and an adversary."""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import time
from typing import Literal

from adversary import DECODES, PREFILLS, make_plan
from chaos_messages import EngineSettings
from chaos_report import Report
from engine_process import EngineProcess
from protections import PROTECTIONS
from router import Bounds, Router
from verdict import judge_movement

__all__ = ["run"]


def run(seed: int, num_requests: int, *, without: str = "", bounds: Bounds | None = None) -> Report:
    """Run one plan; the engines are new, and gone when it returns.

    Args:
        seed: of everything that is drawn.
        num_requests: how many.
        without: a protection to switch off, or empty.
        bounds: of the run; without a protection it ends when that shows, by default.
    """
    began_at = time.monotonic()
    if bounds is None:
        # An untrue reason is a sign, too, but a weak one: something stronger may follow.
        signs = set(PROTECTIONS[without].signs) - {"untrue reason"} if without else set()
        bounds = Bounds(stops_at=tuple(signs), hang_s=7.0 if without else 30.0)
    engines = {
        settings.name: EngineProcess(settings) for settings in _settings(seed, without=without)
    }
    try:
        for engine in engines.values():
            engine.wait_until_ready()
        router = Router(make_plan(seed, num_requests), engines, bounds)
        router.run()
        if router.misreads and not any(f.kind == "wrong token" for f in router.findings):
            router.find("foreign KV", f"it reached no client, but: {router.misreads[0]}")
        if not without:
            router.findings += judge_movement(router.counts, router.lives)
            _let_them_end(router, engines)
    finally:
        for engine in engines.values():
            engine.kill()
    return Report(
        seed=seed,
        num_requests=num_requests,
        without=without,
        lives=tuple(router.lives),
        faults=router.faults,
        counts=router.counts,
        findings=tuple(router.findings),
        misreads=tuple(router.misreads),
        wall_s=time.monotonic() - began_at,
        engines=tuple(engine.settings for engine in engines.values()),
    )


def _settings(seed: int, *, without: str) -> list[EngineSettings]:
    """The engines differ in what an application may choose."""
    rng = random.Random(seed)
    # With a protection off all are of one shape: where KV is rearranged, only staging areas are
    # written to by others, which would hide what the protection is for.
    odd_size = 8 if without else random.Random(f"shape {seed}").choice((4, 8, 16, 24))
    sizes = dict.fromkeys(PREFILLS + DECODES, 8) | {DECODES[-1]: odd_size}
    policies: list[Literal["recompute", "fail"]] = ["recompute", "fail"]
    return [
        EngineSettings(
            name=name,
            block_size=sizes[name],
            num_blocks=1 + (1280 if name in PREFILLS else 1024) // sizes[name],
            num_push_slots=0 if name in PREFILLS else rng.choice((64, 128)),
            # So few that a prompt takes several steps, and its push several writes; so slow that
            # the claim is granted meanwhile, on a busy machine, too.
            num_batched_tokens=48 if name in PREFILLS else 128,
            device_s=0.006 if name in PREFILLS else 0.002,
            depth=rng.choice((1, 2)),
            on_load_failure=policies[DECODES.index(name)] if name in DECODES else "recompute",
            max_load_retries=rng.choice((0, 1)),
            seed=rng.randrange(1 << 30),
            protection_off=without,
        )
        for name in PREFILLS + DECODES
    ]


def _let_them_end(router: Router, engines: dict[str, EngineProcess]) -> None:
    """An engine at rest ends when it is told to, and cleanly."""
    for engine in engines.values():
        engine.ask_to_leave()
    for engine in engines.values():
        code = engine.join()
        if code != 0:
            how = "does not end" if code is None else f"ends with exit code {code}"
            router.find("hang" if code is None else "dead engine", f"{engine.name} {how}")


def _main() -> int:
    arguments = _arguments()
    ends_at = time.monotonic() + 60 * arguments.minutes
    seed = secrets.randbelow(1 << 31) if arguments.seed is None else arguments.seed
    is_good = True
    while True:
        report = run(seed, arguments.requests, without=arguments.without)
        sys.stdout.write(report.text() + "\n")
        sys.stdout.flush()
        is_good = is_good and report.is_as_it_should_be
        if time.monotonic() >= ends_at or not is_good:
            return 0 if is_good else 1
        seed += 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="default: a new one")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="go on with further seeds for so long"
    )
    parser.add_argument(
        "--without", choices=tuple(PROTECTIONS), default="", help="switch a protection off"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(_main())
