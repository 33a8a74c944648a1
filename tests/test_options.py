import re
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqla_neoq import options


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("25", 25),
        ("0", 0),
        ("0.5", 0.5),
        (".5", 0.5),
        ("500ms", 0.5),
        ("30s", 30),
        ("5m", 300),
        ("1.5h", 5400),
        (" 7D ", 604800),
        ("2w", 1209600),
    ],
)
def test_durations_are_seconds_or_have_a_unit(text, seconds):
    assert options.duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "-1", "1e3", "nan", "inf", "none", "5 m", "1y", "1h30m", "٣"])
def test_what_is_no_duration_is_named_with_examples(text):
    with pytest.raises(ValueError, match=re.escape(repr(text)) + r" is not a duration; .*500ms, 30s, 5m, 12h, 7d, 2w"):
        options.duration(text)


def test_a_duration_beyond_all_bounds_is_refused():
    with pytest.raises(ValueError, match="longer than a duration can be"):
        options.duration("99999999999999d")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512M", 512 * 2**20),
        ("1.5G", 1536 * 2**20),
        (" 2g ", 2 * 2**30),
        ("64MiB", 64 * 2**20),
        ("64MB", 64 * 2**20),
        ("65536K", 64 * 2**20),
        ("16777216", 16 * 2**20),
        ("1T", 2**40),
    ],
)
def test_sizes_have_a_unit_of_1024_each(text, size):
    assert options.size(text) == size


@pytest.mark.parametrize("text", ["", "M", "much", "-1G", "1,5G", "1e9", "5 apples", "5IB", "٣G"])
def test_what_is_no_size_is_named_with_examples(text):
    with pytest.raises(ValueError, match=f"^{re.escape(repr(text))} is not a size; write one like 512M or 1.5G"):
        options.size(text)


@pytest.mark.parametrize("text", ["512", "0", "15M"])
def test_a_size_that_no_worker_keeps_below_is_taken_for_a_forgotten_unit(text):
    with pytest.raises(ValueError, match=r"bytes, less than any worker takes; write a size like 512M"):
        options.size(text)


def test_none_is_a_duration_only_where_it_means_something():
    assert options.duration_or_none("None") is None
    assert options.duration_or_none("0") == timedelta(0)


@pytest.mark.parametrize(
    ("texts", "queues"),
    [
        (["emails:10,default:5"], {"emails": 10, "default": 5}),
        (["emails"], {"emails": None}),
        (["emails:10", "default"], {"emails": 10, "default": None}),
        ([" a , b:2 "], {"a": None, "b": 2}),
        (["tenant:7:3"], {"tenant:7": 3}),
        (["tenant:x"], {"tenant:x": None}),
        ([r"tenant\:7"], {"tenant:7": None}),
        ([r"a\,b:2,c"], {"a,b": 2, "c": None}),
        ([r"\ a\ :1"], {" a ": 1}),
        ([r"a\\:1"], {"a\\": 1}),
        (["Grüße \"und\" 'mehr'"], {"Grüße \"und\" 'mehr'": None}),
        ([], {}),
    ],
)
def test_queues_are_names_with_or_without_a_number(texts, queues):
    assert options.queues(texts) == queues


NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=128).filter(str.strip)


@given(st.dictionaries(NAMES, st.none() | st.integers(1, 10**6)))
def test_every_name_can_be_written(queues):
    def written(name, number):
        escaped = re.sub(r"([,:\\\s])", r"\\\1", name)
        return escaped if number is None else f"{escaped}:{number}"

    items = [written(name, number) for name, number in queues.items()]
    assert options.queues(items) == queues
    assert options.queues([",".join(items)] if items else []) == queues


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not a list of queues"),
        (",", "is not a list of queues"),
        ("a,,b", "is not a list of queues"),
        ("a\\", "is not a list of queues"),
        ("a, ", "names an empty queue"),
        (":5", "names an empty queue"),
        ("a:0", "queue 'a' would run 0 jobs at once"),
        ("a,a:2", "queue 'a' is given twice"),
        ("x" * 129, "129 characters, the most are 128"),
        ("a\0", "NUL"),
    ],
)
def test_what_is_no_list_of_queues_is_named(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        options.queues([text])


def test_a_database_url_is_one_that_the_runner_can_use():
    assert options.database_url("postgres://u:p@h/d") == "postgres://u:p@h/d"
    with pytest.raises(ValueError, match="not mysql://") as caught:
        options.database_url("mysql://u:secret@h/d")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "address"),
    [("8080", ("", 8080)), ("0", ("", 0)), ("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:80", ("::1", 80))],
)
def test_an_address_is_a_port_perhaps_with_a_host(text, address):
    assert options.address(text) == address


@pytest.mark.parametrize("text", ["", "x", "-1", "65536", "host:", "8080/"])
def test_what_is_no_port_is_named(text):
    with pytest.raises(ValueError, match=re.escape(repr(text)) + " is not a port"):
        options.address(text)
