"""The models of the protocols hold, their broken variants fail, and the driver that says so is not easily pleased."""

import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

DRIVER = Path(__file__).parents[1] / "docs" / "design" / "model" / "check.py"


def load():
    spec = util.spec_from_file_location("check_models", DRIVER)
    module = util.module_from_spec(spec)
    sys.modules["check_models"] = module
    spec.loader.exec_module(module)
    return module


check = load()
COMPILER = next((name for name in check.COMPILERS if shutil.which(name)), None)
HOLDS = check.Case("m.pml", "", {}, {})
BROKEN = HOLDS._replace(fails="violated (job==")
FULL = "Full statespace search for:\nState-vector 9 byte, depth reached 7, errors: 0\n        5 states, stored\n"
FAILED = "pan:1: assertion violated (job==4) (at depth 55)\nWarning: Search not completed\n" + FULL.replace(
    ": 0", ": 1"
)


@pytest.mark.skipif(COMPILER is None or not shutil.which("spin"), reason="needs spin and a C compiler")
@pytest.mark.parametrize("case", check.CASES, ids=lambda case: f"{case.model} {case.says}")
def test_the_model_is_as_it_must_be(case, tmp_path):
    found = check.check(case, COMPILER, tmp_path, quick=True)
    assert found.verdict == ""
    assert found.states > 10


def test_each_promise_has_a_model_that_holds_and_one_that_fails():
    for model in ("claim.pml", "wakeup.pml"):
        of_model = [case for case in check.CASES if case.model == model]
        assert {(case.fails is None, "LIVENESS" in case.flags) for case in of_model} == {
            (holds, lively) for holds in (True, False) for lively in (True, False)
        }


def test_a_broken_model_must_fail_and_as_foretold():
    assert check.judge(BROKEN, FAILED) == ""
    assert "it holds" in check.judge(BROKEN, FULL)
    assert "should have failed" in check.judge(BROKEN, FAILED.replace("job==4", "row==4"))


@pytest.mark.parametrize("trouble", ["Warning: Search not completed", "error: max search depth too small"])
def test_a_search_that_did_not_see_every_state_shows_nothing(trouble):
    assert check.judge(HOLDS, FULL) == ""
    assert check.judge(HOLDS, FAILED).startswith("pan:1: assertion violated")
    assert check.judge(HOLDS, f"{FULL}{trouble}\n") == "the search was not exhaustive"
    assert check.judge(HOLDS, FULL.replace("Full statespace", "Bit statespace")) == "the search was not exhaustive"


def test_what_is_missing_is_named(tmp_path):
    done = subprocess.run([sys.executable, DRIVER], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 2
    assert "install spin gcc" in done.stderr
