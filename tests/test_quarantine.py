from sqla_neoq.quarantine import ALONE, HOLD, Quarantine, Turn


def test_without_suspects_it_is_always_the_others_turn():
    quarantine = Quarantine()
    assert [quarantine.turn(now, in_flight) for now, in_flight in ((0, 0), (5, 3), (500, 0))] == [Turn.OTHERS] * 3
    assert quarantine.changes_at() is None


def test_a_suspect_runs_at_once_when_nothing_else_does():
    quarantine = Quarantine()
    quarantine.due = True
    assert quarantine.turn(0, 0) is Turn.SUSPECT


def test_a_suspect_waits_for_the_jobs_that_run_but_not_for_long():
    quarantine = Quarantine()
    quarantine.due = True
    assert quarantine.turn(10, 3) is Turn.NOTHING
    assert quarantine.changes_at() == 10 + HOLD
    assert quarantine.turn(10 + HOLD - 0.01, 1) is Turn.NOTHING
    assert quarantine.turn(10 + HOLD, 1) is Turn.SUSPECT


def test_it_does_not_wait_out_the_hold_once_the_others_have_ended():
    quarantine = Quarantine()
    quarantine.due = True
    assert quarantine.turn(10, 3) is Turn.NOTHING
    assert quarantine.turn(10.1, 0) is Turn.SUSPECT


def test_a_suspect_has_the_runner_to_itself_for_a_while_and_then_others_run_beside_it():
    quarantine = Quarantine()
    quarantine.due = True
    quarantine.claimed(10, found=True)
    assert quarantine.turn(10, 1) is Turn.NOTHING
    assert quarantine.changes_at() == 10 + ALONE
    assert quarantine.turn(10 + ALONE, 1) is Turn.OTHERS


def test_no_second_suspect_is_claimed_while_one_runs():
    quarantine = Quarantine()
    quarantine.claimed(10, found=True)
    quarantine.due = True
    assert quarantine.turn(10 + ALONE, 1) is Turn.OTHERS
    assert quarantine.turn(10 + 100 * ALONE, 0) is Turn.OTHERS


def test_after_a_suspect_the_next_one_is_looked_for():
    quarantine = Quarantine()
    quarantine.claimed(10, found=True)
    quarantine.ended()
    assert quarantine.turn(11, 0) is Turn.SUSPECT


def test_when_none_was_found_the_others_go_on_at_once():
    quarantine = Quarantine()
    quarantine.due = True
    assert quarantine.turn(10, 2) is Turn.NOTHING
    quarantine.claimed(12, found=False)
    assert quarantine.turn(12, 2) is Turn.OTHERS
    assert quarantine.changes_at() is None


def test_each_suspect_gets_a_hold_of_its_own():
    quarantine = Quarantine()
    quarantine.due = True
    quarantine.turn(10, 1)
    quarantine.claimed(12, found=False)
    quarantine.due = True
    assert quarantine.turn(100, 1) is Turn.NOTHING
    assert quarantine.changes_at() == 100 + HOLD


def test_both_bounds_fit_into_the_ten_seconds_after_which_a_dead_workers_jobs_run_again():
    # Four seconds of silence and a beat of 2.5 come before the hold.
    assert 4 + 2.5 + HOLD < 10
