import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.running import claimed

from sqla_neoq.floor import DEAR, EVERYWHERE, GRACE, SHARE, Floor, Position, gaps

NOW, AT = 100.0, 1_800_000_000.0
CHEAP, WALK = DEAR / 2, 0.05


def job(id_=1, *, queue="q", priority=0, age=60.0):
    return claimed(id=id_, queue=queue, priority=priority, run_after=AT - age, ran_at=AT)


def dear(*jobs, short=()):
    floor = Floor()
    floor.looked_everywhere(NOW, WALK, jobs, at=AT, short=short)
    return floor


def test_at_first_and_while_it_is_cheap_each_claim_looks_everywhere():
    floor = Floor()
    assert floor.view(NOW) is EVERYWHERE
    floor.looked_everywhere(NOW, CHEAP, [job()], at=AT, short=["q"])
    assert floor.view(NOW) is EVERYWHERE


def test_after_a_dear_claim_the_next_begins_behind_its_last_job_of_each_lane():
    jobs = [job(1, priority=5, age=50), job(2, priority=5, age=40), job(3), job(4, queue="p", age=30)]
    view = dear(*jobs).view(NOW)
    assert view.lanes == {("q", 5): (AT - 40, 2), ("q", 0): (AT - 60, 3), ("p", 0): (AT - 30, 4)}
    assert not view.everywhere


def test_the_floor_rises_with_each_claim():
    floor = dear(job(1, age=50))
    floor.looked_above(CHEAP, [job(2, age=40)])
    assert floor.view(NOW).lanes == {("q", 0): (AT - 40, 2)}
    floor.looked_above(CHEAP, [])
    assert floor.view(NOW).lanes == {("q", 0): (AT - 40, 2)}


def test_a_look_everywhere_that_takes_jobs_from_below_goes_on_from_there():
    floor = dear(job(1, age=50))
    floor.looked_everywhere(NOW, WALK, [job(2, age=90)], at=AT, short=())
    assert floor.view(NOW).lanes == {("q", 0): (AT - 90, 2)}


@pytest.mark.parametrize("age", [0.0, GRACE / 2])
def test_the_floor_leaves_a_second_to_the_transactions_that_are_under_way(age):
    assert dear(job(9, age=age)).view(NOW).lanes == {("q", 0): (AT - GRACE, 0)}


def test_a_queue_that_gave_all_it_had_is_not_walked_again_whatever_the_priority():
    view = dear(job(1, priority=5), job(2, queue="p"), short=["q", "empty"]).view(NOW)
    assert view.queues == {"q": AT - GRACE, "empty": AT - GRACE}
    assert view.lanes == {("p", 0): (AT - 60, 2)}


def test_a_look_everywhere_comes_after_ten_times_as_long_as_the_last_one_took():
    floor = dear(job())
    assert floor.due == NOW + SHARE * WALK
    assert not floor.view(floor.due - 0.001).everywhere
    assert floor.view(floor.due).everywhere


def test_a_look_everywhere_need_not_find_the_lanes_that_are_known():
    view = dear(job(), short=["p"]).view(NOW + 3600)
    assert view == ({("q", 0): Position(None, 0)}, {}, True)


def test_without_a_floor_it_looks_everywhere_though_that_is_dear():
    assert dear().view(NOW).everywhere


@pytest.mark.parametrize("walked", [WALK, 0.6 * WALK])
def test_a_floor_that_saves_little_is_not_used_until_it_may_save_more(walked):
    floor = dear(job())
    floor.looked_above(walked, [job()])
    assert floor.view(NOW).everywhere
    floor.looked_everywhere(NOW, 3 * WALK, [job()], at=AT, short=())
    assert not floor.view(NOW).everywhere


def test_a_floored_claim_that_was_slow_by_chance_is_tried_again():
    floor = dear(job())
    floor.looked_above(WALK, [job()])
    for _ in range(10):
        floor.looked_everywhere(NOW, WALK, [job()], at=AT, short=())
    assert not floor.view(NOW).everywhere


def test_it_forgets_all_when_looking_everywhere_is_cheap_again_or_when_told():
    floor = dear(job(), short=["p"])
    floor.looked_everywhere(NOW, CHEAP, [job()], at=AT, short=())
    assert floor.view(NOW) is EVERYWHERE
    floor.looked_everywhere(NOW, WALK, [], at=AT, short=())
    assert floor.view(NOW) == ({}, {}, True)
    told = dear(job())
    told.forget()
    assert told.view(NOW) is EVERYWHERE


@given(st.sets(st.integers(-100, 100)))
def test_each_priority_is_a_known_one_or_in_one_gap(priorities):
    between = list(gaps(priorities))
    for priority in range(-100, 101):
        inside = [gap for gap in between if gap[0] > priority > gap[1]]
        assert len(inside) == (priority not in priorities)
