from sqla_neoq.quarantine import ALONE, HOLD, Quarantine, Turn


def quarantine_with_a_suspect():
    quarantine = Quarantine()
    quarantine.due = True
    return quarantine


def test_without_suspects_it_is_always_the_others_turn():
    quarantine = Quarantine()
    assert [quarantine.turn(now, in_flight) for now, in_flight in ((0, 0), (5, 3), (500, 0))] == [Turn.OTHERS] * 3
    assert quarantine.changes_at(500) is None


def test_a_suspect_runs_at_once_when_nothing_else_does():
    assert quarantine_with_a_suspect().turn(0, 0) is Turn.SUSPECT


def test_a_suspect_waits_for_the_jobs_that_run_but_not_for_long():
    quarantine = quarantine_with_a_suspect()
    assert quarantine.turn(10, 3) is Turn.NOTHING
    assert quarantine.changes_at(10) == 10 + HOLD
    assert quarantine.turn(10 + HOLD - 0.01, 1) is Turn.NOTHING
    assert quarantine.turn(10 + HOLD, 1) is Turn.SUSPECT


def test_it_does_not_wait_out_the_hold_once_the_others_have_ended():
    quarantine = quarantine_with_a_suspect()
    assert quarantine.turn(10, 3) is Turn.NOTHING
    assert quarantine.turn(10.1, 0) is Turn.SUSPECT


def test_a_suspect_has_the_runner_to_itself_for_a_while():
    quarantine = quarantine_with_a_suspect()
    quarantine.claimed(10, 7)
    assert quarantine.turn(10, 1) is Turn.NOTHING
    assert quarantine.changes_at(10) == 10 + ALONE
    assert quarantine.turn(10 + ALONE - 0.01, 1) is Turn.NOTHING


def test_a_suspect_that_lives_on_keeps_neither_the_next_nor_the_others_waiting():
    quarantine = quarantine_with_a_suspect()
    quarantine.claimed(10, 7)
    later = 10 + ALONE
    assert quarantine.turn(later, 1) is Turn.NOTHING  # the next one's hold
    assert quarantine.turn(later + HOLD, 1) is Turn.SUSPECT
    quarantine.claimed(later + HOLD, None)
    assert quarantine.turn(later + HOLD, 1) is Turn.OTHERS
    assert quarantine.changes_at(later + HOLD) is None


def test_after_a_suspect_the_next_one_is_looked_for():
    quarantine = quarantine_with_a_suspect()
    quarantine.claimed(10, 7)
    quarantine.ended([3, 7])
    assert quarantine.turn(11, 0) is Turn.SUSPECT


def test_the_end_of_an_earlier_suspect_does_not_end_the_time_of_the_one_that_runs_alone():
    quarantine = quarantine_with_a_suspect()
    quarantine.claimed(10, 7)
    quarantine.claimed(20, 8)
    quarantine.ended([7])
    assert quarantine.turn(21, 1) is Turn.NOTHING


def test_when_none_was_found_the_others_go_on_at_once():
    quarantine = quarantine_with_a_suspect()
    assert quarantine.turn(10, 2) is Turn.NOTHING
    quarantine.claimed(12, None)
    assert quarantine.turn(12, 2) is Turn.OTHERS
    assert quarantine.changes_at(12) is None


def test_each_suspect_gets_a_hold_of_its_own():
    quarantine = quarantine_with_a_suspect()
    quarantine.turn(10, 1)
    quarantine.claimed(12, None)
    quarantine.due = True
    assert quarantine.turn(100, 1) is Turn.NOTHING
    assert quarantine.changes_at(100) == 100 + HOLD
