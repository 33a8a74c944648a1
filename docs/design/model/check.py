"""Check the models beside this file with spin, exhaustively; say what was found, and whether it is what must be.

``python docs/design/model/check.py`` needs spin and a C compiler; ``--quick`` allows fewer faults. Exits with 0 when
every correct model holds in every state it can reach and every broken one fails as foretold, with 1 when not, with 2
when a tool is missing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
DEPTH = 1_000_000
LONGEST = 600.0

CLAIM = {"KILLS": 1, "SILENCES": 2, "ANSWERS": 1, "FAILURES": 1}
CLAIM_LIVELY = {"KILLS": 1, "SILENCES": 1, "ANSWERS": 1, "FAILURES": 1}
CLAIM_QUICK = {"KILLS": 1, "SILENCES": 1, "ANSWERS": 1, "FAILURES": 0}
WAKEUP = {"PRODUCERS": 2, "LOSSES": 1, "KILLS": 1}
WAKEUP_QUICK = {"PRODUCERS": 1, "LOSSES": 1, "KILLS": 1}

OWNERS = "violated (job=="
FENCE = "!(taken_away[token[i]])"
ALIVE = "!(registered[job_worker])"
WOKEN = "straddles[p]"
CYCLE = "acceptance cycle"


class Case(NamedTuple):
    """One search.

    Attributes:
        model: the file.
        says: what is checked, or how the model is broken.
        numbers: how many of what there are, and how often what goes wrong.
        quick: the same for ``--quick``.
        flags: what else is defined.
        fails: how a broken model must fail: what the search then says. None: it must hold.
    """

    model: str
    says: str
    numbers: dict[str, int]
    quick: dict[str, int]
    flags: tuple[str, ...] = ()
    fails: str | None = None


CASES = (
    Case("claim.pml", "one owner, the fence, rescue from the dead alone", CLAIM, CLAIM_QUICK),
    Case("claim.pml", "every committed job comes to an end", CLAIM_LIVELY, CLAIM_QUICK, ("LIVENESS",)),
    Case("claim.pml", "broken: a claim locks nothing", CLAIM, CLAIM, ("CLAIM_WITHOUT_LOCK",), OWNERS),
    Case("claim.pml", "broken: no token in the write", CLAIM, CLAIM, ("OUTCOME_WITHOUT_TOKEN",), FENCE),
    Case("claim.pml", "broken: rescue without re-checking", CLAIM, CLAIM, ("RESCUE_WITHOUT_LOOKING",), ALIVE),
    Case("claim.pml", "broken: rescue without the token", CLAIM, CLAIM, ("RESCUE_WITHOUT_TOKEN",), ALIVE),
    Case(
        "claim.pml",
        "broken: strays are looked for once",
        CLAIM_LIVELY,
        CLAIM_LIVELY,
        ("LIVENESS", "LOOK_FOR_STRAYS_ONCE"),
        CYCLE,
    ),
    Case("wakeup.pml", "what no poll must find, and what it must", WAKEUP, WAKEUP_QUICK, ("WITHOUT_POLLS",)),
    Case("wakeup.pml", "every committed job is started", WAKEUP, WAKEUP_QUICK, ("LIVENESS",)),
    *(
        Case("wakeup.pml", f"broken: {says}", WAKEUP, WAKEUP, ("WITHOUT_POLLS", flag), WOKEN)
        for says, flag in (
            ("no claim after turning hungry", "NO_CLAIM_AFTER_TURNING_HUNGRY"),
            ("no claim after connecting again", "NO_CLAIM_AFTER_CONNECTING_AGAIN"),
            ("wake-ups marked as seen after the claim", "WAKES_SEEN_AFTER_THE_CLAIM"),
        )
    ),
    Case("wakeup.pml", "broken: nobody polls", WAKEUP, WAKEUP, ("LIVENESS", "WITHOUT_POLLS"), CYCLE),
)


class Found(NamedTuple):
    """What a search said.

    Attributes:
        verdict: what is wrong with it; empty: it is as it must be.
        states: how many different states were seen.
        depth: how many steps the longest way had.
        seconds: how long the search took.
    """

    verdict: str
    states: int
    depth: int
    seconds: float


def check(case: Case, compiler: str, directory: Path, *, quick: bool) -> Found:
    """Search every state of one model, in a directory of its own."""
    numbers = case.quick if quick else case.numbers
    lively = "LIVENESS" in case.flags
    defined = [*(f"-D{name}={number}" for name, number in numbers.items()), *(f"-D{flag}" for flag in case.flags)]
    _call(directory, "spin", *defined, "-a", str(HERE / case.model))
    # COLLAPSE stores states in less room and forgets none. NFAIR: room to keep the processes' turns, for -f.
    kind = ("-DNFAIR=4",) if lively else ("-DSAFETY",)
    # What fails does so in no time, and need not be fast.
    speed = "-O0" if case.fails else "-O1" if quick else "-O2"
    _call(directory, compiler, speed, "-w", "-DCOLLAPSE", "-DVECTORSZ=1024", *kind, "-o", "pan", "pan.c")
    began = time.monotonic()
    # -a -f: cycles in which no process that could always go on stands still for ever.
    said = _call(directory, "./pan", f"-m{DEPTH}", *(("-a", "-f") if lively else ()))
    seconds = time.monotonic() - began
    return Found(
        judge(case, said), _number(r"(\d+) states, stored", said), _number(r"depth reached (\d+)", said), seconds
    )


def judge(case: Case, said: str) -> str:
    """Return what is wrong with what a search said; nothing if it is as it must be."""
    first = next((line for line in said.splitlines() if line.startswith("pan:")), "")
    errors = _number(r"errors: (\d+)", said)
    if case.fails is not None:
        return "" if errors and case.fails in first else f"should have failed with {case.fails}: {first or 'it holds'}"
    if errors:
        return first
    if "Full statespace search" not in said or "not completed" in said or "too small" in said:
        return "the search was not exhaustive"
    return ""


def _number(pattern: str, said: str) -> int:
    found = re.search(pattern, said)
    if found is None:
        raise SystemExit(f"the search said nothing like {pattern!r}:\n{said}")
    return int(found[1])


def _call(directory: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=LONGEST, check=False)
    if done.returncode and command[0] != "./pan":
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def tools() -> str:
    """Return the C compiler, or exit saying what to install."""
    compiler = next((name for name in COMPILERS if shutil.which(name)), None)
    missing = [] if shutil.which("spin") else ["spin"]
    if compiler is None:
        missing.append("gcc")
    if compiler is None or missing:
        names = " ".join(missing)
        print(
            f"To check the models, install {names}: apt-get install {names}, or see https://spinroot.com",
            file=sys.stderr,
        )
        raise SystemExit(2)
    return compiler


def main() -> int:
    """Check them all, and print a table."""
    parser = argparse.ArgumentParser(description="Check the models with spin.")
    parser.add_argument("--quick", action="store_true", help="allow fewer faults: seconds instead of a minute")
    quick: bool = parser.parse_args().quick
    compiler = tools()
    wrong = 0
    print(f"{'model':<12}{'what is checked':<52}{'states':>10}{'depth':>7}{'seconds':>9}  verdict")
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            found = check(case, compiler, Path(directory), quick=quick)
        verdict = found.verdict or ("holds" if case.fails is None else "fails, as it must")
        wrong += bool(found.verdict)
        print(
            f"{case.model:<12}{case.says:<52}{found.states:>10,}{found.depth:>7,}{found.seconds:>9.1f}  {verdict}",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
